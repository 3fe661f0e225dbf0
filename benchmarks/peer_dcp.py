"""The Python twin of bench_dcp.cpp: the same state, rounds and JSON keys with torch.distributed.checkpoint.

    torchrun --nproc-per-node 2 benchmarks/peer_dcp.py --mb 512 --dir /dev/shm/peer

--make-metadata N writes a `.metadata` of N keys to --dir and times pickle.load of it, in one process.
"""
import argparse
import json
import os
import pickle
import resource
import shutil
import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def make_state(mb, tensors, mesh):
    side = 8 if tensors else 1024
    count = tensors or max(1, round(mb * 1e6 / (4 * side * side)))
    rows = -(-side // mesh.size())
    mine = min(side, rows * (mesh.get_rank() + 1)) - min(side, rows * mesh.get_rank())
    return {
        f"layer{i}.weight": DTensor.from_local(
            torch.rand(mine, side), mesh, [Shard(0)], shape=(side, side), stride=(side, 1)
        )
        for i in range(count)
    }


def raw_write(path, data):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.write(file, view[done : done + (64 << 20)])
    os.fsync(file)
    os.close(file)


def raw_read(path, data):
    view, done = memoryview(data), 0
    with open(path, "rb", buffering=0) as file:
        while done < len(view):
            done += file.readinto(view[done : done + (64 << 20)])


def bench(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    state = make_state(args.mb, args.tensors, init_device_mesh("cpu", (world,)))
    locals_ = [value.to_local() for value in state.values()]
    size = sum(local.nbytes for local in locals_)
    raw, copy = bytearray(size), torch.empty(size, dtype=torch.uint8).fill_(1)
    checkpoint, background = os.path.join(args.dir, "ck"), os.path.join(args.dir, "async")
    # All of it is removed in the end, so it must be nobody's; made once all ranks have looked.
    if os.path.exists(args.dir):
        raise SystemExit(f"--dir {args.dir} exists, and would be removed in the end with all that is in it: "
                         "name a folder that does not exist")
    dist.barrier()
    os.makedirs(args.dir, exist_ok=True)
    times = {}

    def slowest(seconds):
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def timed(work):
        dist.barrier()
        start = time.perf_counter()
        work()
        return slowest(time.perf_counter() - start)

    def note(what, work):
        times.setdefault(what, []).append(timed(work))

    def save():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint))

    def copy_state():
        at = 0
        for local in locals_:
            copy[at : at + local.nbytes].copy_(local.reshape(-1).view(torch.uint8))
            at += local.nbytes

    def one_round():
        file = os.path.join(args.dir, f"raw{rank}")
        note("raw_write", lambda: raw_write(file, raw))
        note("save", save)
        note("raw_read", lambda: raw_read(file, raw))
        note("load", lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint)))
        note("raw_copy", copy_state)
        future = []
        start = time.perf_counter()
        note("async_block", lambda: future.append(dcp.async_save(state, checkpoint_id=background)))
        future[0].result()
        times.setdefault("async_total", []).append(slowest(time.perf_counter() - start))

    first_save = timed(save)
    one_round()
    times.clear()
    for _ in range(args.rounds):
        one_round()
    if rank == 0:
        pairs = [("save", "raw_write"), ("load", "raw_read"), ("async_block", "raw_copy")]
        result = {
            "bench": "dcp",
            "world": world,
            "mb": size * world / 1e6,
            "tensors": len(state),
            "dir": args.dir,
            "ms": {what: statistics.median(seconds) * 1e3 for what, seconds in times.items()}
            | {"first_save": first_save * 1e3},
            "time_ratio": {
                f"{a}/{b}": statistics.median(x / y for x, y in zip(times[a], times[b])) for a, b in pairs
            },
            "rss_peak_mb": peak_mb(),
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(args.dir, ignore_errors=True)
    dist.destroy_process_group()


def make_metadata(args):
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    os.makedirs(args.dir, exist_ok=True)
    path = os.path.join(args.dir, ".metadata")
    size, zero = torch.Size((1024, 1024)), torch.Size((0, 0))
    properties = m.TensorProperties(torch.float32)
    keys = [f"model.layers.{i // 12}.block{i % 12}.weight.{i}" for i in range(args.make_metadata)]
    content = m.Metadata(
        state_dict_metadata={
            key: m.TensorStorageMetadata(properties, size, [m.ChunkStorageMetadata(zero, size)]) for key in keys
        },
        planner_data={key: ("model", key[6:]) for key in keys},
        storage_data={
            m.MetadataIndex(key, zero, 0): _StorageInfo(f"__{i % 64}_0.distcp", 4196000 * (i // 64), 4195557)
            for i, key in enumerate(keys)
        },
    )
    with open(path, "wb") as file:
        pickle.dump(content, file)
    del content
    start = time.perf_counter()
    with open(path, "rb") as file:
        pickle.load(file)
    seconds = time.perf_counter() - start
    print(json.dumps({"bench": "metadata", "keys": len(keys), "ms": seconds * 1e3, "bytes": os.path.getsize(path)}))


parser = argparse.ArgumentParser()
parser.add_argument("--mb", type=float, default=1024)
parser.add_argument("--dir", default="peer_dcp.tmp", help="a folder to make and to write to; removed in the end")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--tensors", type=int, default=0)
parser.add_argument("--make-metadata", type=int, default=0)
options = parser.parse_args()
if options.make_metadata:
    make_metadata(options)
else:
    bench(options)
