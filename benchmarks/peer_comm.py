"""The Python twin of bench_comm.cpp, on Gloo: collectives against memcpy of the same bytes on every rank at once.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peer_comm.py --sizes 1e3,1e5,1e7
"""
import argparse
import time

import torch
import torch.distributed as dist

import peer_common as common

# What FSDP2 calls; the older names warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def buffers(size, dtype):
    count = size // dtype.itemsize
    part = count // dist.get_world_size()
    return torch.zeros(count, dtype=dtype), torch.zeros(part, dtype=dtype), torch.zeros(count, dtype=dtype)


def bench(args, size, wanted):
    ranks = dist.get_world_size()
    unit = 64 * ranks
    size = max(unit, int(size) // unit * unit)
    whole, part, reduced = buffers(size, torch.float32)
    whole16, part16, reduced16 = buffers(size, torch.bfloat16)
    copy, source = (torch.empty(size, dtype=torch.uint8).fill_(value) for value in (1, 2))
    operations = {
        "ag": lambda: all_gather(whole, part),
        "rs": lambda: reduce_scatter(part, reduced),
        "ar": lambda: dist.all_reduce(reduced),
        "ag_bf16": lambda: all_gather(whole16, part16),
        "rs_bf16": lambda: reduce_scatter(part16, reduced16),
        "ar_bf16": lambda: dist.all_reduce(reduced16),
        "barrier": dist.barrier,
        "memcpy": lambda: copy.copy_(source),
    }
    repeats = {
        name: max(1, min(200, int(1e7 / size)) if name == "memcpy" else min(50, int(3e6 / size))) for name in operations
    }
    seconds = {name: [] for name in operations}

    def one_round(index):
        names = list(operations)
        for name in names if index % 2 == 0 else names[::-1]:
            dist.barrier()
            operations[name]()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                operations[name]()
            seconds[name].append((time.perf_counter() - start) / repeats[name])

    one_round(0)
    for values in seconds.values():
        values.clear()
    quiet = common.Quiet(wanted, max_factor=2, wait_seconds=args.max_wait)
    kept = quiet.run(one_round)
    everyone = common.gather(seconds)
    if dist.get_rank() != 0:
        return
    slowest = {name: [max(rank[name][i] for rank in everyone) * 1e6 for i in kept] for name in operations}
    us = {name: common.median(values) for name, values in slowest.items()}
    record = {
        "bench": "comm", "tag": args.tag, "backend": "gloo", "world": ranks, "bytes": size, "us": us,
        "us_p10_p90": {n: [common.quantile(v, 0.1), common.quantile(v, 0.9)] for n, v in slowest.items()},
        "ratio": {
            f"{name}/memcpy": common.median([a / b for a, b in zip(slowest[name], slowest["memcpy"])])
            for name in operations if name not in ("barrier", "memcpy")
        },
        "gb_s": {name: size / value / 1e3 for name, value in us.items() if name != "barrier"},
        "noise": quiet.noise,
    }
    common.print_line(common.rounded(record))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="1e3,1e4,1e5,1e6,1e7,1e8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--tag", default="")
    parser.add_argument("--max-wait", type=float, default=90.0)
    args = parser.parse_args()
    common.join(args.pin)
    for size in map(float, args.sizes.split(",")):
        bench(args, size, max(4, args.rounds if size < 5e7 else args.rounds // 3))
    common.leave()


main()
