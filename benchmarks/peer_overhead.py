"""The Python twin of bench_overhead.cpp: microseconds that FSDP2 adds to a tiny Linear, forward and backward.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peer_overhead.py --dims 8,64 --layers 32
"""
import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import peer_common as common
from peer_train import StubAllGather, StubReduceScatter

WARMUP = 3


def make_stack(dim, layers, mesh, variant):
    torch.manual_seed(0)
    stack = torch.nn.Sequential(*(torch.nn.Linear(dim, dim, bias=False) for _ in range(layers)))
    if variant == "plain":
        return stack
    collectives, reshard = variant.split("/")
    for layer in stack:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard == "reshard")
        if collectives == "stub":
            layer.set_custom_all_gather(StubAllGather())
            layer.set_custom_reduce_scatter(StubReduceScatter())
    return fully_shard(stack, mesh=mesh)


def bench(args, dim, mesh):
    variants = ["plain", "gloo/reshard", "gloo/keep"]
    if dist.get_world_size() > 1:
        variants += ["stub/reshard", "stub/keep"]
    models = {variant: make_stack(dim, args.layers, mesh, variant) for variant in variants}
    times = {"forward": {variant: [] for variant in variants}, "both": {variant: [] for variant in variants}}
    x = torch.randn(args.batch, dim)

    def one_round(index):
        for variant in variants if index % 2 == 0 else variants[::-1]:
            model = models[variant]
            dist.barrier()
            start = time.perf_counter()
            y = model(x).sum()
            between = time.perf_counter()
            y.backward()
            end = time.perf_counter()
            for parameter in model.parameters():
                parameter.grad = None
            times["forward"][variant].append((between - start) / args.layers * 1e6)
            times["both"][variant].append((end - start) / args.layers * 1e6)

    for index in range(WARMUP):
        one_round(index)
    quiet = common.Quiet(args.rounds, wait_seconds=args.max_wait)
    kept = [WARMUP + i for i in quiet.run(one_round)]
    everyone = common.gather(times)
    if dist.get_rank() != 0:
        return

    def slowest(what, variant):
        return [max(rank[what][variant][i] for rank in everyone) for i in kept]

    def over(what, variant):
        return [a - b for a, b in zip(slowest(what, variant), slowest(what, "plain"))]

    base = slowest("both", "plain")
    record = {"bench": "overhead", "tag": args.tag, "world": len(everyone), "dim": dim, "layers": args.layers,
              "plain_us_per_module": common.median(base)}
    for variant in variants[1:]:
        both = over("both", variant)
        record[variant] = {
            "over_us": common.median(both),
            "over_us_p10": common.quantile(both, 0.1),
            "over_us_p90": common.quantile(both, 0.9),
            "ratio": common.median([a / b for a, b in zip(slowest("both", variant), base)]),
            "over_fwd_us": common.median(over("forward", variant)),
        }
    record["noise"] = quiet.noise
    common.print_line(common.rounded(record))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dims", default="8,64")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--tag", default="")
    parser.add_argument("--max-wait", type=float, default=90.0)
    args = parser.parse_args()
    common.join(args.pin)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in args.dims.split(","):
        bench(args, int(dim), mesh)
    common.leave()


main()
