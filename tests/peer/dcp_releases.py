"""Writes metadata as each release of PyTorch and of Python pickled them, one file per variant and protocol, all of the
same checkpoint; and a few that no release writes."""
import io
import os
import pathlib
import pickle
import sys
import types

import torch
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
)

folder = sys.argv[1]


def stub(module, name):
    """A class that pickles as module.name(*parts), as path objects do."""
    if module not in sys.modules:
        sys.modules[module] = types.ModuleType(module)
    cls = type(name, (), {"__init__": lambda self, *parts: setattr(self, "parts", parts),
                          "__reduce__": lambda self: (type(self), self.parts)})
    cls.__module__ = module
    setattr(sys.modules[module], name, cls)
    return cls


class ByName(pickle.Pickler):
    """Python 3.11.0 to 3.11.3 named the values of enums instead of their numbers."""

    def reducer_override(self, value):
        if isinstance(value, (MEM_FORMAT_ENCODING, _MEM_FORMAT_ENCODING)):
            return getattr, (type(value), value.name)
        return NotImplemented


class Plain(pickle._Pickler):
    """The simplest writer there can be: nothing is remembered, nothing is framed."""

    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.fast = True


def checkpoint(properties=TensorProperties, **fields):
    def tensor(size, dtype, *chunks):
        return TensorStorageMetadata(
            properties=properties(dtype=dtype), size=torch.Size(size),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks])

    def place(fqn, offset, index, file, start, length):
        key = MetadataIndex(fqn, None if offset is None else torch.Size(offset), index)
        return key, _StorageInfo(file, start, length)

    entries = {
        "layer.weight": tensor((4, 3), torch.float32, ((2, 0), (2, 3)), ((0, 0), (2, 3))),
        "step": tensor((), torch.int64, ((), ())),
        "half": tensor((1, 1, 1), torch.bfloat16, ((0, 0, 0), (1, 1, 1))),
        "extra.\u00e4": BytesStorageMetadata(),
    }
    places = dict([
        place("layer.weight", (0, 0), 1, "__0_0.distcp", 5000000000, 1261),
        place("layer.weight", (2, 0), 0, "__1_0.distcp", 0, 1260),
        place("step", (), None, "__0_1.distcp", 300, 70000),
        place("half", (0, 0, 0), 0, "__0_0.distcp", 0, 1),
        place("extra.\u00e4", None, None, "__0_2.distcp", 7, 8),
    ])
    paths = {"layer.weight": ("layer", "weight"), "step": ("step",), "half": ("half",), "extra.\u00e4": ("extra", 0)}
    result = Metadata(entries, paths, places)
    result.__dict__.update(fields)
    return result


def bare(metadata, *names):
    for name in names:
        metadata.__dict__.pop(name, None)
    return metadata


def write(name, metadata, pickler=pickle.Pickler, protocols=(2, 3, 4, 5)):
    for protocol in protocols:
        out = io.BytesIO()
        pickler(out, protocol).dump(metadata)
        with open(os.path.join(folder, f"{name}.{protocol}"), "wb") as file:
            file.write(out.getvalue())


def meta(path):
    return StorageMeta(checkpoint_id=path, save_id="1b4e28ba")


write("torch_2_2", bare(checkpoint(OldProperties), "storage_meta", "version"))
write("torch_2_3", bare(checkpoint(), "storage_meta", "version"))
write("torch_2_4", bare(checkpoint(storage_meta=meta(pathlib.PurePosixPath("/data/run"))), "version"))
write("torch_2_9", checkpoint(storage_meta=meta(pathlib.PosixPath("/data/run")), version="1.0.0"))
write("fsspec", checkpoint(storage_meta=meta("s3://bucket/run"), version="1.0.0"))
write("python_3_13", checkpoint(storage_meta=meta(stub("pathlib._local", "PosixPath")("/", "data"))))
windows = stub("pathlib", "WindowsPath")
write("windows", checkpoint(storage_meta=meta(windows("C:\\", "run"))))
write("enum_by_name", checkpoint(storage_meta=meta(None)), ByName)
write("old_enum_by_name", bare(checkpoint(OldProperties), "storage_meta", "version"), ByName)
write("no_memo", checkpoint(), Plain)
unknown = checkpoint()
unknown.__dict__["of_a_later_release"] = {"x": [1, 2.5, None]}
write("unknown_field", unknown)
unflat = checkpoint()
unflat.planner_data = None
write("not_flattened", unflat)

# What must be refused.

class Getattr:
    def __reduce__(self):
        return getattr, (MetadataIndex, "fqn")


class NamedGetattr:
    def __reduce__(self):
        return getattr, (_StorageInfo, "__init__")


class System:
    def __reduce__(self):
        return os.system, ("true",)


for name, thing in (("evil_field", Getattr()), ("evil_getattr", NamedGetattr()), ("evil_call", System())):
    evil = checkpoint()
    evil.__dict__["more"] = thing
    write(name, evil, protocols=(4,))
quantized = checkpoint()
quantized.state_dict_metadata["half"].properties.dtype = torch.qint8
write("quantized", quantized, protocols=(4,))
