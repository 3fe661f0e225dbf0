"""Writes torch.save archives of many tensors and values, and what they hold in a form that needs no pickle:
items.json and one file of raw bytes per tensor."""
import collections
import datetime
import io
import json
import sys

import torch


def dump(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


folder = sys.argv[1]
base = torch.arange(24, dtype=torch.float32)
complex_values = torch.complex(base, base + 0.5).reshape(4, 6)
tensors = {
    "contiguous": base.reshape(4, 6),
    "transposed": base.reshape(4, 6).t(),
    "channels_last": base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "slice": base.reshape(4, 6)[1:3, 2:5],
    "expanded": torch.ones(1).expand(3, 2),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "conj": complex_values.conj(),
    "imag": complex_values.conj().imag,
    "conj_slice": complex_values.conj()[1:, ::2],
}
names = "float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128"
names += " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
for name in names.split():
    dtype = getattr(torch, name)
    bits = torch.arange(4 * 16, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(4 * 16, dtype=torch.uint8)
    tensors["dtype_" + name] = bits.view(dtype)
entries = []
for name, tensor in tensors.items():
    with open(f"{folder}/{name}.item", "wb") as file:
        file.write(dump(tensor))
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    with open(f"{folder}/{name}.raw", "wb") as file:
        file.write(bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b"")
    entries.append({"name": name, "dtype": str(tensor.dtype).split(".")[1], "sizes": list(tensor.shape)})

shared = [1]
values = {
    "none": None,
    "int": 7,
    "long": 2**40,
    "big": -(2**100),
    "float": 0.1,
    "text": "héllo",
    "bytes": bytes(range(256)),
    "no_bytes": b"",
    "bytearray": bytearray(b"\x00\xfe"),
    "complex": 1 - 2j,
    "tuple": (1, 2.5, ("x",)),
    "set": {3},
    "frozenset": frozenset({"a"}),
    "dict": {"a": 1, 2: "two", (1, 2): None},
    "ordered": collections.OrderedDict(a=1, b=[]),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "shared": [shared, shared],
    "tensors": (torch.ones(2), {"t": base[:3]}),
    "opaque": datetime.date(2020, 1, 2),
}
for name, value in values.items():
    with open(f"{folder}/{name}.value", "wb") as file:
        file.write(dump(value))
json.dump(entries, open(f"{folder}/items.json", "w"))
