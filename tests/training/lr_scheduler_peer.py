"""Learning rates of Python's schedulers: lr_scheduler_peer.py CASES.json OUT.json FOLDER

A case is the expression of a scheduler for the optimizer o. Then goes on from the checkpoint FOLDER/cpp, and saves
FOLDER/py at the same step.
"""
import json
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
import torch.optim.lr_scheduler as L

KEYS = ("last_epoch", "base_lrs", "_last_lr", "_step_count")


def optimizer(base_lrs):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in base_lrs]
    return torch.optim.SGD(groups, lr=1.0)


def rates(scheduler, o, steps):
    result = [[group["lr"] for group in o.param_groups]]
    for _ in range(steps):
        o.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [group["lr"] for group in o.param_groups]
        result.append(scheduler.get_last_lr())
    return result


def main(cases_file, out_file, folder):
    warnings.simplefilter("ignore")
    with open(cases_file) as file:
        cases = json.load(file)
    results = {}
    for expression in cases["expressions"]:
        o = optimizer(cases["base_lrs"])
        results[expression] = rates(eval(expression, {"L": L, "o": o}), o, cases["steps"])

    o = optimizer(cases["base_lrs"])
    scheduler = eval(cases["resumed"], {"L": L, "o": o})
    rates(scheduler, o, cases["saved_at"])
    dcp.save({"lr": scheduler.state_dict()}, checkpoint_id=folder + "/py", no_dist=True)

    o = optimizer([1.0 for _ in cases["base_lrs"]])
    scheduler = eval(cases["resumed"], {"L": L, "o": o})
    state = {"lr": {key: scheduler.state_dict()[key] for key in KEYS}}
    dcp.load(state, checkpoint_id=folder + "/cpp", no_dist=True)
    scheduler.load_state_dict(state["lr"])
    for group, lr in zip(o.param_groups, scheduler.get_last_lr()):
        group["lr"] = lr
    results["resumed"] = rates(scheduler, o, cases["steps"] - cases["saved_at"])
    with open(out_file, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
