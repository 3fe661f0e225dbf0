"""Python's fused optimizers on the cases of optim_peer_test.cpp: optim_peer.py CASES.json FOLDER

For 1 to 3 parts of every parameter, each part by itself as a rank would have it: the values and state after the steps,
as a checkpoint FOLDER/parts. Then continues FOLDER/cpp, which C++ saved after three steps, by two more and compares
with the values in it; and saves FOLDER/python, the same the other way round.
"""
import json
import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "peer"))
from dcp_peer import rule_values

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def values(sizes, dtype, seed):
    return (rule_values(sizes, torch.float32, seed) / 64).to(dtype)


def part(full, parts, index):
    chunks = torch.chunk(full, parts)
    return chunks[index].clone() if index < len(chunks) else full[:0].clone()


def run_part(case, parts, index):
    dtype = DTYPES[case["dtype"]]
    params = [torch.nn.Parameter(part(values(sizes, dtype, i), parts, index)) for i, sizes in enumerate(case["sizes"])]
    optimizer = getattr(torch.optim, case["optimizer"])(params, fused=True, **case["options"])
    for step in range(case["steps"]):
        for i, param in enumerate(params):
            param.grad = part(values(case["sizes"][i], dtype, 100 * (step + 1) + i), parts, index)
        optimizer.step()
    result = {}
    for i, param in enumerate(params):
        state = {key: value for key, value in optimizer.state[param].items() if key != "step" and value is not None}
        result[str(i)] = {"param": param.detach(), **state}
    return result


def model():
    net = torch.nn.Linear(5, 17)
    with torch.no_grad():
        for i, param in enumerate(net.parameters()):
            param.copy_(values(tuple(param.shape), torch.float32, i))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, amsgrad=True, fused=True)


def steps(net, optimizer, numbers):
    for step in numbers:
        for i, param in enumerate(net.parameters()):
            param.grad = values(tuple(param.shape), torch.float32, 100 * (step + 1) + i)
        optimizer.step()


def final(net):
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def continue_cpp(folder):
    net, optimizer = model()
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer), "final": final(net)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, state["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    steps(net, optimizer, range(3, 5))
    for name, value in final(net).items():
        torch.testing.assert_close(value, state["final"][name], rtol=1e-6, atol=1e-6)


def save_python(folder):
    net, optimizer = model()
    steps(net, optimizer, range(3))
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    state = get_optimizer_state_dict(net, optimizer)
    dcp_state = {"model": saved, "optim": torch.utils._pytree.tree_map(
        lambda v: v.clone() if isinstance(v, torch.Tensor) else v, state)}
    steps(net, optimizer, range(3, 5))
    dcp.save({**dcp_state, "final": final(net)}, checkpoint_id=folder, no_dist=True)


def main():
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    folder = sys.argv[2]
    parts = {
        f"{name}.{count}.{index}": run_part(case, count, index)
        for name, case in cases.items() for count in (1, 2, 3) for index in range(count)
    }
    dcp.save(parts, checkpoint_id=os.path.join(folder, "parts"), no_dist=True)
    continue_cpp(os.path.join(folder, "cpp"))
    save_python(os.path.join(folder, "python"))


if __name__ == "__main__":
    main()
