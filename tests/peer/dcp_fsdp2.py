"""An FSDP2 model and its optimizer, saved by C++ as cpp_OPTIMIZER_N, loaded with Python's defaults (strict) and
compared; then the same state saved as py_OPTIMIZER_N. Parameters and optimizer state follow the rule of dcp_peer.py."""
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dcp_peer import rule_values, run_ranks
from peer_rank import leave


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one_row = nn.Parameter(torch.zeros(1, 8))
        self.frozen = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3, bias=False, dtype=torch.bfloat16)
        self.tied = self.down


OPTIMIZERS = {
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "plain_sgd": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "adagrad": lambda params, lr: torch.optim.Adagrad(params, lr=lr),
    "rmsprop": lambda params, lr: torch.optim.RMSprop(params, lr=lr, momentum=0.9, centered=True),
}


def fill(tensor, seed):
    """Gives the tensor (this rank's part of it) the values of the rule."""
    full = rule_values(tuple(tensor.shape), tensor.dtype, seed)
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements).to_local())
    else:
        tensor.copy_(full)


def check(tensor, seed, where):
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert torch.equal(full, rule_values(tuple(tensor.shape), tensor.dtype, seed)), (where, full)


def each_tensor(state, visit):
    """Visits all tensors but steps in an order that both sides agree on."""
    for i, fqn in enumerate(sorted(state["model"])):
        visit(state["model"][fqn], 0 if fqn == "tied.weight" else i, fqn)  # 0: down.weight
    optim = state["optim"]["state"]
    for i, fqn in enumerate(sorted(state["model"])):
        for k, name in enumerate(sorted(optim.get(fqn, {}))):
            if name != "step":
                visit(optim[fqn][name], 100 + 10 * i + k, f"{fqn}.{name}")


@torch.no_grad()
def rank_main(folder, rank, world_size, cases):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{world_size}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))

    def build(name, lr):
        model = Net()
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, OPTIMIZERS[name](model.parameters(), lr)

    def states(model, optimizer):
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}

    for name, saved_worlds in cases.items():
        for saved in saved_worlds:
            model, optimizer = build(name, lr=0.125)
            state = states(model, optimizer)
            dcp.load(state, checkpoint_id=f"{folder}/cpp_{name}_{saved}")
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optim"])
            loaded = states(model, optimizer)
            each_tensor(loaded, lambda tensor, seed, where: check(tensor, seed, f"{name}_{saved} {where}"))
            assert optimizer.param_groups[0]["lr"] == 0.5, optimizer.param_groups
            for fqn, entry in loaded["optim"]["state"].items():
                assert "step" not in entry or entry["step"].item() == 12, (name, fqn, entry["step"])
        model, optimizer = build(name, lr=0.5)
        state = states(model, optimizer)
        each_tensor(state, lambda tensor, seed, where: fill(tensor, seed))
        for entry in state["optim"]["state"].values():
            if "step" in entry:
                entry["step"].fill_(12)
        dcp.save(state, checkpoint_id=f"{folder}/py_{name}_{world_size}")
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = sys.argv[1]
    worlds = [1, 2, 3, 4]
    for world_size in worlds:
        cases = {"adamw": worlds}
        if world_size == 2:
            cases |= {name: [2] for name in OPTIMIZERS if name != "adamw"}
        run_ranks(world_size, lambda rank: rank_main(folder, rank, world_size, cases))
