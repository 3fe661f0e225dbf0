"""Loads the values that C++ read from dcp_items.py and saved again; they must be what they were."""
import collections
import datetime
import sys

import torch

folder = sys.argv[1]
base = torch.arange(24, dtype=torch.float32)
expected = {
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
    "shared": [[1], [1]],
    "opaque": datetime.date(2020, 1, 2),
}
for name, value in expected.items():
    loaded = torch.load(f"{folder}/{name}.back", weights_only=False)
    assert type(loaded) is type(value) and loaded == value, (name, loaded, value)
tensors = torch.load(f"{folder}/tensors.back")
assert torch.equal(tensors[0], torch.ones(2)) and torch.equal(tensors[1]["t"], base[:3])
