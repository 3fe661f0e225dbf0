"""Two ranks of Python save one state in every layout that its writers can make, below FOLDER; `back` reads checkpoints
of the other side in place of that."""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peer_rank import leave  # noqa: E402


def state(mesh, values=True):
    def make(tensor):
        return tensor if values else torch.zeros_like(tensor)

    def cut(tensor, dim=0):
        return distribute_tensor(make(tensor), mesh, [Shard(dim)])

    return {
        "model": {
            "weight": cut(torch.arange(35, dtype=torch.float32).reshape(7, 5)),
            "columns": cut(torch.arange(24, dtype=torch.bfloat16).reshape(3, 8), 1),
            "one_row": cut(torch.arange(8, dtype=torch.int64).reshape(1, 8)),
            "zeros": cut(torch.zeros(512, 256)),
        },
        "plain": make(torch.arange(6, dtype=torch.float64)),
        "step": make(torch.tensor(12.0)),
        "lr": 0.25 if values else None,
        "names": ["a", "b"] if values else None,
    }


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (a, b))
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def tensors_only(values):
    return {"model": values["model"], "plain": values["plain"]}


dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,))
folder = sys.argv[1]
if sys.argv[2:3] == ["back"]:
    for name in sys.argv[3:]:
        found = state(mesh, values=False)
        dcp.load(found, storage_reader=FileSystemReader(os.path.join(folder, name)), no_dist=False)
        assert equal(found, state(mesh)), name
else:
    def save(name, values=None, use_collectives=True, **options):
        writer = FileSystemWriter(os.path.join(folder, name), **options)
        dcp.save(values or state(mesh), storage_writer=writer, use_collectives=use_collectives)

    save("default")
    save("three_files", thread_count=3)
    save("file_per_item", single_file_per_rank=False)
    save("rank_local", use_collectives=False)
    save("rank_local_files", use_collectives=False, thread_count=2)
    save("zstd", _extensions=[ZStandard()])
    save("zstd_twice", _extensions=[ZStandard(), ZStandard()])
    save("zstd_files", _extensions=[ZStandard()], thread_count=2)
    save("safetensors", serialization_format=SerializationFormat.SAFETENSORS)
    save("safetensors_files", serialization_format=SerializationFormat.SAFETENSORS, thread_count=2)
    save("safetensors_alone", tensors_only(state(mesh)), serialization_format=SerializationFormat.SAFETENSORS)
leave()
