"""Whole and flat state dicts of the model of tests/dcp/state_models.h, both ways. For 1 to 4 ranks: reads what C++
wrote (cpp_full_N, cpp_flat_N) through Python's setters and compares; writes py_full_N, py_flat_N, py_number_N,
py_nested_N with the same values, the keys of the dicts beside them as values, and py_lazy, where only one layer was
ever used."""
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_peer import rule_values, run_ranks
from peer_rank import leave


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one_row = nn.Parameter(torch.zeros(1, 8))
        self.frozen = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.up = nn.Linear(5, 17)
        self.down = nn.Linear(17, 3, bias=False)
        self.tied = self.down


def rule_model():
    f32 = torch.float32
    down = rule_values((3, 17), f32, 0)
    return {
        "one_row": rule_values((1, 8), f32, 2),
        "frozen": rule_values((3, 2), f32, 1),
        "steps": rule_values((2,), torch.int64, 3),
        "up.weight": rule_values((17, 5), f32, 6),
        "up.bias": rule_values((17,), f32, 5),
        "down.weight": down,
        "tied.weight": down.clone(),
    }


def rule_optimizer():
    model = rule_model()
    states = {}
    for i, fqn in enumerate(["one_row", "up.weight", "up.bias", "down.weight"]):
        shape = tuple(model[fqn].shape)
        states[fqn] = {
            "step": torch.tensor(12.0),
            "exp_avg": rule_values(shape, torch.float32, 100 + i),
            "exp_avg_sq": rule_values(shape, torch.float32, 200 + i).abs(),
        }
    return states


# Not strict, and without the second name of the tied weight, which Python's setters for whole tensors do not take.
FULL = StateDictOptions(full_state_dict=True, strict=False)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
RANK0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def build(mesh, lr):
    model = Net()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.25)


def untied(state):
    return {fqn: tensor for fqn, tensor in state.items() if fqn != "tied.weight"}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(model, optimizer, where):
    for fqn, tensor in get_model_state_dict(model).items():
        assert torch.equal(whole(tensor), rule_model()[fqn]), (where, fqn)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(states) == set(rule_optimizer()), (where, set(states))
    for fqn, entry in rule_optimizer().items():
        for field, expected in entry.items():
            assert torch.equal(whole(states[fqn][field]), expected), (where, fqn, field)
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.5, (0.8, 0.9), 0.25), (where, group)


def with_values(mesh):
    model, optimizer = build(mesh, lr=0.5)
    set_model_state_dict(model, untied(rule_model()), options=FULL)
    nested = get_optimizer_state_dict(model, optimizer)
    nested["state"] = rule_optimizer()
    set_optimizer_state_dict(model, optimizer, nested, options=FULL)
    return model, optimizer


@torch.no_grad()
def rank_main(folder, rank, world_size):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{world_size}", rank=rank, world_size=world_size)
    # Two replicas of two shards on four ranks.
    mesh = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if world_size == 4
            else init_device_mesh("cpu", (world_size,)))

    # What C++ wrote.
    model, optimizer = build(mesh, lr=0.125)
    saved_model, saved_optim = {}, {}
    if rank == 0:
        nested = get_optimizer_state_dict_of_plain()
        saved = {"model": {k: torch.zeros_like(v) for k, v in rule_model().items()}, "optim": nested}
        dcp.load(saved, checkpoint_id=f"{folder}/cpp_full_{world_size}", no_dist=True)
        saved_model, saved_optim = saved["model"], saved["optim"]
        assert torch.equal(saved_model["tied.weight"], saved_model["down.weight"])
    set_model_state_dict(model, untied(saved_model), options=FROM_RANK0)
    set_optimizer_state_dict(model, optimizer, saved_optim, options=FROM_RANK0)
    check(model, optimizer, f"cpp_full_{world_size}")

    model, optimizer = build(mesh, lr=0.125)
    set_model_state_dict(model, untied(rule_model()), options=FULL)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.load({"optim": flat}, checkpoint_id=f"{folder}/cpp_flat_{world_size}")
    set_optimizer_state_dict(model, optimizer, flat, options=FLAT)
    check(model, optimizer, f"cpp_flat_{world_size}")

    # What Python writes.
    model, optimizer = with_values(mesh)
    full = {"model": get_model_state_dict(model, options=RANK0),
            "optim": get_optimizer_state_dict(model, optimizer, options=RANK0)}
    assert rank == 0 or full == {"model": {}, "optim": {}}, full
    if rank == 0:
        full["model_keys"] = list(full["model"])
        full["state_keys"] = [f"{fqn}.{field}" for fqn, entry in full["optim"]["state"].items() for field in entry]
        full["group_keys"] = list(full["optim"]["param_groups"][0])
        dcp.save(full, checkpoint_id=f"{folder}/py_full_{world_size}", no_dist=True)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.save({"optim": flat, "keys": list(flat)}, checkpoint_id=f"{folder}/py_flat_{world_size}")
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=f"{folder}/py_number_{world_size}")
    dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
             checkpoint_id=f"{folder}/py_nested_{world_size}")

    if world_size == 2:
        # Only `up` had gradients before the save.
        model, optimizer = build(mesh, lr=0.5)
        with torch.enable_grad():
            (model.up(torch.ones(1, 5))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/py_lazy")
    leave()


def get_optimizer_state_dict_of_plain():
    """A template of whole tensors."""
    model = Net()
    return get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=0.125))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in (1, 2, 3, 4):
        run_ranks(size, lambda rank: rank_main(sys.argv[1], rank, size))
