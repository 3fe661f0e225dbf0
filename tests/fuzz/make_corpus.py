"""Writes the seeds of the fuzzers: small files as Python makes them, and a damaged one of each kind.
Usage: make_corpus.py CORPUS_FOLDER"""
import collections
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile

import torch
import zstandard

corpus = sys.argv[1]


def write(target, name, content):
    os.makedirs(os.path.join(corpus, target), exist_ok=True)
    with open(os.path.join(corpus, target, name), "wb") as file:
        file.write(content)


def archive(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


values = {
    "numbers": [0, -1, 255, 65536, 2**40, -(2**100), 1.5, True, None],
    "texts": ["", "a", "\u00e4" * 300, b"bytes", bytearray(b"array")],
    "sets": [{1, 2}, frozenset(["x"]), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ()],
    "shared": [[1]] * 3,
    "ordered": collections.OrderedDict(a=1, b={"c": [2, {}]}),
    "big": list(range(1500)),
}
for name, value in values.items():
    for protocol in (2, 4, 5):
        write("pickle", f"{name}.{protocol}", pickle.dumps(value, protocol))
write("pickle", "cut", pickle.dumps(values, 4)[:-20])

base = torch.arange(6, dtype=torch.float32)
items = {
    "tensor": base.reshape(2, 3),
    "permuted": base.reshape(2, 3).t(),
    "conj": torch.complex(base, base).conj(),
    "untyped": base.to(torch.float8_e4m3fn),
    "scalar": torch.tensor(1, dtype=torch.int64),
    "empty": torch.empty(0, 3),
    "value": {"betas": (0.9, 0.999), "size": torch.Size([2]), "dtype": torch.bfloat16, "bytes": b"x", "c": 1 + 2j},
    "nested": [torch.ones(2), {"t": (torch.zeros(1),)}],
}
for name, value in items.items():
    write("item", name, archive(value))
torch.serialization.set_crc32_options(False)
write("item", "no_checksums", archive(base))
torch.serialization.set_crc32_options(True)
write("item", "cut", archive(base)[:-60])


def frame(content, **options):
    stream = zstandard.ZstdCompressor(**options).compressobj()
    return stream.compress(content) + stream.flush()


write("zstd", "tensor", frame(archive(items["tensor"])))
write("zstd", "checksum", frame(archive(items["value"]), write_checksum=True))
write("zstd", "empty", frame(b""))
write("zstd", "two_frames", frame(b"abc" * 100) + frame(b"def"))
write("zstd", "zeros", frame(bytes(1 << 18)))
write("zstd", "bomb", frame(bytes(1 << 22)))
write("zstd", "cut", frame(os.urandom(300))[:-5])


def blob(header, data=b"", pad=True):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if pad else 0)
    return struct.pack("<Q", len(text)) + text + data


one = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
write("safetensors", "one", blob({"w": one}, bytes(24)))
write("safetensors", "notes", blob({"__metadata__": {"format": "pt"}, "w": one}, bytes(24), pad=False))
write("safetensors", "two", blob({"b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}, "w": one,
                                  "s": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]}}, bytes(40)))
write("safetensors", "none", blob({}))
write("safetensors", "gap", blob({"w": {**one, "data_offsets": [8, 32]}}, bytes(32)))
write("safetensors", "wrong_size", blob({"w": {**one, "shape": [2, 4]}}, bytes(24)))
write("safetensors", "huge", blob({"w": {**one, "shape": [2**62, 2**62]}}, bytes(24)))
write("safetensors", "twice", struct.pack("<Q", 64) + (b'{"w":{},"w":{}}' + b" " * 64)[:64])
write("safetensors", "cut", struct.pack("<Q", 1 << 40) + b"{}")

releases = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "peer", "dcp_releases.py")
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, releases, folder], check=True)
    for name in ("torch_2_2.2", "torch_2_9.4", "python_3_13.5", "enum_by_name.4", "no_memo.2", "windows.3",
                 "not_flattened.4", "evil_call.4", "evil_getattr.4", "quantized.4"):
        with open(os.path.join(folder, name), "rb") as file:
            write("metadata", name, file.read())
