"""The safetensors library on the other side: `write FILE` makes a file of all dtypes, `check FILE` compares one with
the same tensors bit by bit."""

import sys

import torch
from safetensors.torch import load_file, save_file

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


def tensors():
    """Byte i of every tensor is a function of i (bools: of its parity); see bytes_of() in safetensors_test.cpp."""
    result = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        raw = (torch.arange(6 * dtype.itemsize, dtype=torch.int64) * 37 + 11) % 251
        raw = (raw % 2 if dtype == torch.bool else raw).to(torch.uint8)
        result[name] = raw.view(dtype).reshape(2, 3)
    result["scalar"] = torch.tensor(1.5)
    result["empty"] = torch.zeros(0, 3)
    result["grüße \"quoted\"\n"] = torch.arange(5, dtype=torch.uint8)
    return result


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        save_file(tensors(), sys.argv[2], metadata={"format": "pt", "note": "ä"})
    else:
        loaded = load_file(sys.argv[2])
        expected = tensors()
        assert sorted(loaded) == sorted(expected), sorted(loaded)
        for key, tensor in expected.items():
            found = loaded[key]
            assert found.dtype == tensor.dtype and found.shape == tensor.shape, f"{key}: {found.dtype} {found.shape}"
            assert torch.equal(bits(found), bits(tensor)), key
    print("ok")
