"""The Python twin of bench_optim.cpp: what DTensors cost AdamW and clipping, in us per parameter, in one process.

    OMP_NUM_THREADS=1 python benchmarks/peer_optim.py
"""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import peer_common as common


def make_parameters(args, mesh):
    torch.manual_seed(0)

    def tensor(values):
        return values if mesh is None else distribute_tensor(values, mesh, [Shard(0)])

    parameters = []
    for _ in range(args.params):
        parameters.append(torch.nn.Parameter(tensor(torch.randn(args.numel))))
        parameters[-1].grad = tensor(torch.randn(args.numel))
    return parameters


STEPS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters).step,
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True).step,
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True).step,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9).step,
    "clip_grad_norm": lambda parameters: lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9),
}


def measure(name, args, mesh):
    plain, sharded = (STEPS[name](make_parameters(args, where)) for where in (None, mesh))

    def microseconds(step):
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        return (time.perf_counter() - start) * 1e6 / (args.steps * args.params)

    microseconds(plain)
    microseconds(sharded)
    pairs = [(microseconds(plain), microseconds(sharded)) for _ in range(args.rounds)]
    common.print_line(common.rounded({
        "bench": "optim", "optimizer": name, "params": args.params, "numel": args.numel,
        "plain_us": common.median([a for a, _ in pairs]), "dtensor_us": common.median([b for _, b in pairs]),
        "dtensor_cost_us": common.median([b - a for a, b in pairs]),
    }))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=int, default=200)
    parser.add_argument("--numel", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=list(STEPS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'store')}", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        for name in [args.only] if args.only else STEPS:
            measure(name, args, mesh)
    common.leave()


main()
