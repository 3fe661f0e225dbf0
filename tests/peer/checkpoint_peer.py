"""Python on the other side of the program `fsdp2 checkpoint`: `make FOLDER` writes checkpoints of every format,
`check FOLDER` compares what the program made of them, bit by bit."""

import glob
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_peer import run_ranks


def numbers(*sizes, dtype=torch.float32, seed=1):
    numel = 1
    for size in sizes:
        numel *= size
    values = (torch.arange(numel, dtype=torch.int64) * 2654435761 + seed * 40503) % 4294967296
    return (values // 256 % 200 - 100).reshape(sizes).to(torch.float32).div(8).to(dtype)


def weights():
    """Of a model, under the names that its safetensors files use."""
    return {
        "embed.weight": numbers(7, 4, seed=2),
        "layers.0.weight": numbers(5, 3, dtype=torch.bfloat16, seed=3),
        "layers.0.permuted": numbers(4, 6, seed=4).t(),
        "layers.1.weight": numbers(1, 8, seed=5),
        "lm_head.weight": numbers(7, 4, seed=2),
        "norm.scale": torch.tensor(0.3),
        "norm.empty": torch.zeros(0, 3),
        "ids": torch.arange(6, dtype=torch.int64).reshape(6, 1) - 3,
        "mask": torch.tensor([True, False, True]),
        "small": numbers(4, dtype=torch.float8_e4m3fn, seed=6),
        "count": torch.tensor([1, 65535], dtype=torch.uint16),
        "wave": torch.complex(numbers(3, seed=7), numbers(3, seed=8)),
    }


def state():
    return {
        "model": weights(),
        "optim": {"step": torch.tensor(12.0),
                  "groups": [{"lr": 0.25, "betas": (0.9, 0.999), "params": ["embed.weight"]}]},
        "step": 7,
        "text": "grüße",
    }


def flat(nested, path=""):
    items = nested.items() if isinstance(nested, dict) else enumerate(nested)
    result = {}
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        entered = isinstance(value, list) and any(isinstance(x, (dict, torch.Tensor)) for x in value)
        enter = isinstance(value, dict) or entered
        result.update(flat(value, name) if enter else {name: value})
    return result


def equal(found, expected, where):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, f"{where}: {found.dtype} {found.shape}"
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)] if expected.numel() else [0, 0]
        assert expected.numel() == 0 or torch.equal(*bits), f"{where}: {found} {expected}"
    else:
        assert type(found) is type(expected) and found == expected, f"{where}: {found!r} {expected!r}"


def same(found, expected, where):
    assert sorted(found) == sorted(expected), f"{where}: {sorted(found)}"
    for key in expected:
        equal(found[key], expected[key], f"{where}: {key}")


def blank(nested):
    if isinstance(nested, dict):
        return {key: blank(value) for key, value in nested.items()}
    if isinstance(nested, list):
        return [blank(value) for value in nested]
    return torch.zeros_like(nested) if isinstance(nested, torch.Tensor) else None


def same_dcp(folder, expected):
    """`expected` is nested; the keys of the checkpoint are exactly those of it."""
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert sorted(keys) == sorted(flat(expected)), f"{folder}: {sorted(keys)}"
    loaded = blank(expected)
    dcp.load(loaded, checkpoint_id=folder)
    same(flat(loaded), flat(expected), folder)


def same_hf(folder, expected, files):
    """As transformers reads it: through the index."""
    with open(f"{folder}/model.safetensors.index.json") as file:
        index = json.load(file)
    loaded = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(f"{folder}/{name}")
        assert all(index["weight_map"][key] == name for key in part), name
        loaded.update(part)
    same(loaded, expected, folder)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    names = sorted(os.path.basename(path) for path in glob.glob(f"{folder}/*.safetensors"))
    assert names == [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)], names


def make(folder, rank):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = state()
    sharded = dict(whole, model={
        key: distribute_tensor(value.contiguous(), mesh, [Shard(value.dim() - 1)])
        if key in ("embed.weight", "layers.0.weight", "layers.1.weight", "ids") else value
        for key, value in whole["model"].items()})
    dcp.save(sharded, checkpoint_id=f"{folder}/py")
    shards = {key: distribute_tensor(value.contiguous(), mesh, [Shard(0)])
              for key, value in weights().items() if value.dim() == 2}
    dcp.save(shards, storage_writer=HuggingFaceStorageWriter(f"{folder}/hf_shards", save_distributed=True))
    if rank == 0:
        tied = {key: value.contiguous() for key, value in weights().items() if key != "lm_head.weight"}
        names = sorted(tied)
        os.mkdir(f"{folder}/hf")
        for i in range(2):
            save_file({key: tied[key] for key in names[i::2]}, f"{folder}/hf/model-{i + 1:05d}-of-00002.safetensors")
        with open(f"{folder}/hf/model.safetensors.index.json", "w") as file:
            json.dump({"metadata": {}, "weight_map": {key: f"model-{names.index(key) % 2 + 1:05d}-of-00002.safetensors"
                                                      for key in names}}, file)
        torch.save(whole, f"{folder}/state.pt")
        torch.save(torch.nn.Linear(2, 2).state_dict(), f"{folder}/linear.pt")
        torch.save({"weird": torch.zeros(1, dtype=torch.complex128), "huge": torch.tensor([1e6, 1.0]),
                    "half": torch.tensor([1.0])}, f"{folder}/odd.pt")
    dist.barrier()
    # What an earlier save on more ranks leaves behind.
    dcp.save({"x": distribute_tensor(numbers(4, 4), mesh, [Shard(0)])}, checkpoint_id=f"{folder}/reused")
    dist.barrier()
    sys.stdout.flush()


def check(folder):
    whole, plain = state(), weights()
    tied = {key: value for key, value in plain.items() if key != "lm_head.weight"}
    same_hf(f"{folder}/out_hf", tied, 5)
    same(load_file(f"{folder}/one.safetensors"), {f"model.{key}": value for key, value in plain.items()}, "one")
    same_dcp(f"{folder}/r3", whole)
    chunks = FileSystemReader(f"{folder}/r3").read_metadata().state_dict_metadata["model.embed.weight"].chunks
    boxes = [(list(chunk.offsets), list(chunk.sizes)) for chunk in chunks]
    assert boxes == [([0, 0], [3, 4]), ([3, 0], [3, 4]), ([6, 0], [1, 4])], boxes
    assert sorted(os.listdir(f"{folder}/r3"))[-3:] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    same_dcp(f"{folder}/from_hf", {f"model.{key}": value for key, value in plain.items()})
    same_dcp(f"{folder}/from_shards", {key: value for key, value in plain.items() if value.dim() == 2})
    same_dcp(f"{folder}/from_pt", whole)
    loaded = torch.load(f"{folder}/out.pt", weights_only=False)
    same(flat(loaded), flat(whole), "out.pt")
    assert list(loaded["optim"]["groups"][0]["params"]) == ["embed.weight"]
    cast = dict(whole, model=dict(plain))
    for key, value in plain.items():
        if value.dtype in (torch.float32, torch.float8_e4m3fn) and value.dim() > 0:
            cast["model"][key] = value.to(torch.bfloat16)
    same_dcp(f"{folder}/bf16", cast)
    same_dcp(f"{folder}/linear", torch.load(f"{folder}/linear.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = sys.argv[2]
    if sys.argv[1] == "make":
        run_ranks(2, lambda rank: make(folder, rank))
        dcp.save({"x": numbers(4, 4)}, checkpoint_id=f"{folder}/reused", no_dist=True)
    else:
        check(folder)
    print("ok")
