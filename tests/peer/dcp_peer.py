"""Reads every checkpoint cpp_N of a folder with torch.distributed.checkpoint on 1 to 4 ranks and compares it bit by
bit with the state that both sides compute; then writes the same state as py_N. One process forks all ranks."""
import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

TENSORS = [
    ("uneven", (7, 3), torch.float32, Shard(0)),
    ("half", (5, 4), torch.bfloat16, Shard(0)),
    ("ids", (3,), torch.int64, Shard(0)),
    ("one_row", (1, 8), torch.float32, Shard(0)),
    ("columns", (4, 6), torch.float32, Shard(1)),
    ("narrow_columns", (4, 2), torch.bfloat16, Shard(1)),
    ("replicated", (3, 3), torch.float32, Replicate()),
    ("plain", (2, 2), torch.float32, None),
    ("scalar", (), torch.float32, None),
    ("flags", (5,), torch.bool, None),
    ("no_rows", (0, 3), torch.float32, Shard(0)),
    ("plain_empty", (0,), torch.int64, None),
    ("double", (3, 2), torch.float64, None),
    ("complex", (2,), torch.complex64, None),
    ("small", (4,), torch.float8_e4m3fn, None),
    ("unsigned", (3,), torch.uint16, None),
    ("name.with.dots", (2,), torch.int32, Shard(0)),
    ("float16", (6,), torch.float16, Shard(0)),
    ("float8_e5m2", (9,), torch.float8_e5m2, None),
    ("float8_e4m3fnuz", (3,), torch.float8_e4m3fnuz, None),
    ("float8_e5m2fnuz", (3,), torch.float8_e5m2fnuz, None),
    ("int8", (5,), torch.int8, Shard(0)),
    ("uint8", (5,), torch.uint8, None),
    ("int16", (5,), torch.int16, None),
    ("uint32", (5,), torch.uint32, None),
    ("uint64", (5,), torch.uint64, None),
    ("complex128", (2, 2), torch.complex128, None),
]
LAYOUTS = [
    ("hybrid", [Replicate(), Shard(0)]),
    ("blocks", [Shard(1), Shard(0)]),
    ("twice", [Shard(0), Shard(0)]),
]
SMALL = {dtype for _, _, dtype, _ in TENSORS if "float8" in str(dtype) or "uint" in str(dtype)}


def rule_values(sizes, dtype, seed):
    numel = 1
    for size in sizes:
        numel *= size
    values = (torch.arange(numel, dtype=torch.int64) * 2654435761 + seed * 40503) % 4294967296
    values = values // 256 % 200 - 100
    if dtype in SMALL:
        values = values % 8
    if dtype == torch.bool:
        values = values % 2
    return values.reshape(sizes).to(dtype)


def state(mesh, zero):
    def make(full, placement):
        full = torch.zeros_like(full) if zero else full
        return full if placement is None else distribute_tensor(full, mesh, [placement])

    def value(plain):
        return None if zero else plain

    tensors = {key: make(rule_values(sizes, dtype, i + 1), placement)
               for i, (key, sizes, dtype, placement) in enumerate(TENSORS)}
    # The ranks once more as a mesh of two axes.
    rows = 2 if mesh.size() % 2 == 0 else 1
    square = init_device_mesh("cpu", (rows, mesh.size() // rows))
    for key, placements in LAYOUTS:
        full = rule_values((7, 5), torch.float32, 90)
        tensors[key] = distribute_tensor(torch.zeros_like(full) if zero else full, square, placements)
    adam = {
        name: {
            "step": torch.tensor(0.0 if zero else 12.0),
            "exp_avg": make(rule_values(sizes, torch.float32, 70), Shard(0)),
            "exp_avg_sq": make(rule_values(sizes, torch.float32, 71), Shard(0)),
        }
        for name, sizes in (("uneven", (7, 3)), ("one_row", (1, 8)))
    }
    group = {
        "lr": value(0.25),
        "betas": value((0.9, 0.999)),
        "foreach": None,
        "amsgrad": value(False),
        "params": value(["uneven", "one_row"]),
    }
    values = {
        "int": value(42),
        "negative": value(-5000000000),
        "big": value(-123456789012345678901234567890),
        "float": value(2.5),
        "text": value("grüße\n"),
        "bytes": value(b"\x00\xff\x80 raw"),
        "true": value(True),
        "numbers": value([1, 2.5, "x", None]),
        "nested_tuple": value((1, ("a", []))),
    }
    return {
        "tensors": tensors,
        "optim": {"state": adam, "param_groups": [group]},
        "values": values,
        "list": [torch.zeros(2) if zero else torch.ones(2), {"deep": value(7)}],
    }


def same(a, b, where):
    assert type(a) is type(b), f"{where}: {type(a)} {type(b)}"
    if isinstance(a, dict):
        assert list(a) == list(b), f"{where}: {list(a)} {list(b)}"
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{where}.{i}")
    elif isinstance(a, torch.Tensor):
        if isinstance(a, DTensor):
            a, b = a.to_local(), b.to_local()
        assert a.dtype == b.dtype and a.shape == b.shape, f"{where}: {a.dtype} {b.dtype} {a.shape} {b.shape}"
        if a.numel():
            bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
            assert torch.equal(*bits), f"{where}: {a} {b}"
    else:
        assert a == b, f"{where}: {a!r} {b!r}"


def rank_main(folder, rank, world_size, cpp_worlds):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{world_size}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    expected = state(mesh, zero=False)
    for cpp_world in cpp_worlds:
        loaded = state(mesh, zero=True)
        dcp.load(loaded, checkpoint_id=f"{folder}/cpp_{cpp_world}")
        same(loaded, expected, f"cpp_{cpp_world} on {world_size}, rank {rank}: ")
    dcp.save(expected, checkpoint_id=f"{folder}/py_{world_size}")
    dist.destroy_process_group()


def run_ranks(world_size, body):
    """Forks the ranks, after torch was imported once; ends the script if one fails."""
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                body(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = sys.argv[1]
    worlds = [int(text) for text in sys.argv[2:]]
    for world_size in worlds:
        run_ranks(world_size, lambda rank: rank_main(folder, rank, world_size, worlds))
