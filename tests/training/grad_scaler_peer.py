"""Scales of Python's GradScaler on given findings: grad_scaler_peer.py CASES.json OUT.json CHECKPOINT_FOLDER

A case has the scaler's options and "iterations": per iteration one letter per optimizer, f finite, i infinity, n NaN,
u finite and only unscaled. The state of the last case's scaler is saved before its second half.
"""
import json
import math
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp

VALUES = {"f": 1.0, "u": 1.0, "i": math.inf, "n": math.nan}


def run(case, checkpoint):
    scaler = torch.amp.GradScaler("cpu", **case["options"])
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0) for _ in case["iterations"][0]]
    scales, stepped = [], []
    for i, letters in enumerate(case["iterations"]):
        if i == len(case["iterations"]) // 2:
            dcp.save({"scaler": scaler.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
        done = ""
        for optimizer, letter in zip(optimizers, letters):
            param = optimizer.param_groups[0]["params"][0]
            before = param.detach().clone()
            optimizer.zero_grad()
            scaler.scale((param * torch.tensor([1.0, VALUES[letter], 2.0])).sum()).backward()
            if letter == "u":
                scaler.unscale_(optimizer)
            else:
                scaler.step(optimizer)
            done += "y" if not torch.equal(before, param.detach()) else "n"
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(done)
    return {"scales": scales, "stepped": stepped}


def main():
    warnings.simplefilter("ignore")
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    with open(sys.argv[2], "w") as file:
        json.dump([run(case, sys.argv[3]) for case in cases], file)


main()
