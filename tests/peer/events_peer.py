"""Order of events, collectives and memory under Python's FSDP2: events_peer.py CASES.json OUT.json

The same model and loop stand in events_peer_test.cpp. Only real transitions are written down: a gather that starts,
whole parameters that are freed, a module that begins its forward or backward with whole parameters, a reduction.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from peer_rank import run_cases

ParamGroup = param_group.FSDPParamGroup
events, groups, reducing = [], [], []
counts = {"all_gathers": 0, "reduce_scatters": 0, "all_reduces": 0, "bytes": 0}


def alive():
    whole = [getattr(p, "_unsharded_param", None) for g in groups for p in g.fsdp_params]
    return sum(p.untyped_storage().size() for p in whole if p is not None)


def note(event, group):
    events.append(f"{event} '{group._module_fqn}' {alive()}")


def replace(owner, name, make):
    setattr(owner, name, make(getattr(owner, name)))


def traced_unshard(call):
    def unshard(self, *args, **kwargs):
        pending = self._all_gather_result is not None
        call(self, *args, **kwargs)
        if not pending and self._all_gather_result is not None:
            note("unshard", self)

    return unshard


def traced_pre_forward(call):
    def pre_forward(self, *args):
        result = call(self, *args)
        note("forward", self._fsdp_param_groups[0])
        return result

    return pre_forward


def traced_pre_backward(call):
    def pre_backward(self, grad):
        group = self._fsdp_param_groups[0]
        first = group._training_state != TrainingState.PRE_BACKWARD  # of several outputs
        result = call(self, grad)
        if first:
            note("backward", group)
        return result

    return pre_backward


def traced_reshard(call):
    def to_sharded(self):
        whole = self.is_unsharded
        call(self)
        if whole:
            note("reshard", self)

    return to_sharded


def remembered(call):
    def post_backward(self, *unused):
        reducing.append(self)
        try:
            call(self, *unused)
        finally:
            reducing.pop()

    return post_backward


def traced_reduce(call):
    def foreach_reduce(*args, **kwargs):
        note("reduce", reducing[-1])
        return call(*args, **kwargs)

    return foreach_reduce


def recorded_with_grad_only(call):
    # Python also notes the order of forwards without gradients, and the next backward then gathers a group that
    # nobody needs. What is wanted is the order of those that a backward follows.
    def record(self):
        if torch.is_grad_enabled():
            call(self)

    return record


def counted(key, position, names):
    def make(call):
        def count(*args, **kwargs):
            given = next((kwargs[n] for n in names if n in kwargs), None)
            tensor = given if given is not None else args[position]
            counts[key] += 1
            counts["bytes"] += tensor.nbytes
            return call(*args, **kwargs)

        return count

    return make


def trace_everything():
    replace(ParamGroup, "unshard", traced_unshard)
    replace(FSDPState, "_pre_forward", traced_pre_forward)
    replace(FSDPState, "_pre_backward", traced_pre_backward)
    replace(ParamGroup, "_to_sharded", traced_reshard)
    replace(ParamGroup, "_to_sharded_post_forward", traced_reshard)
    replace(ParamGroup, "post_backward", remembered)
    replace(ParamGroup, "_record_post_forward", recorded_with_grad_only)
    replace(param_group, "foreach_reduce", traced_reduce)
    replace(collectives.DefaultAllGather, "__call__", counted("all_gathers", 1, ["output_tensor"]))
    replace(collectives.DefaultReduceScatter, "__call__", counted("reduce_scatters", 2, ["input_tensor"]))
    replace(dist, "all_reduce", counted("all_reduces", 0, ["tensor"]))


class Unit(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(case["dim"]))
        self.path = case["path"]
        for name in ["stem", "block0", "block1", "block2", "norm", "head"]:
            setattr(self, name, Unit(case["dim"]))
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_((torch.sin(torch.arange(param.numel()) * 0.7 + i) * 0.3).view_as(param))

    def forward(self, x):
        branches = []
        for path in self.path:
            y = x
            for name in path:
                y = branches[0] if name == "shared" else getattr(self, name)(y)
            branches.append(y)
        # The first of several paths only feeds the others, which name it "shared".
        return [b * self.scale for b in (branches[1:] if len(branches) > 1 else branches)]


def inputs(case, step, micro, forward, rank):
    count = torch.arange(2 * case["dim"], dtype=torch.double)
    x = torch.sin(0.1 * (count + 7 * rank + 3 * step + 5 * micro + 11 * forward))
    return x.float().view(2, case["dim"]).requires_grad_(case["input_grad"])


def shard(model, case):
    names = ["replicate", "shard"][-len(case["mesh"]) :]
    options = {"mesh": init_device_mesh("cpu", tuple(case["mesh"]), mesh_dim_names=tuple(names))}
    if case["reshard_after_forward"] is not None:
        options["reshard_after_forward"] = case["reshard_after_forward"]
    units = []
    for unit in case["units"]:
        modules = [getattr(model, name) for name in unit]
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
        units.append(modules[0])
    fully_shard(model, **options)
    for i, unit in enumerate(units):
        if depth := case["forward_prefetch"]:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
        if depth := case["backward_prefetch"]:
            unit.set_modules_to_backward_prefetch(units[max(i - depth, 0) : i][::-1])
    groups.clear()
    states = dict.fromkeys(m._get_fsdp_state() for m in [model, *units])
    groups.extend(g for state in states for g in state._fsdp_param_groups)


def run(case):
    rank = dist.get_rank()
    model = Net(case)
    shard(model, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(case["steps"]):
        events.clear()
        counts.update(dict.fromkeys(counts, 0))
        losses = []
        for micro, flags in enumerate(case["micros"]):
            model.set_requires_gradient_sync(flags["sync"])
            model.set_requires_all_reduce(flags["all_reduce"])
            model.set_reshard_after_backward(flags["reshard"])
            if case["eval_first"]:
                with torch.no_grad():
                    model(inputs(case, step, micro, 9, rank))
            outs = []
            for forward in range(case["forwards"]):
                outs += model(inputs(case, step, micro, forward, rank))
            if case["backward_each"]:
                for i, out in enumerate(outs):
                    model.set_is_last_backward(i + 1 == len(outs))
                    out.square().sum().backward(retain_graph=i + 1 < len(outs))
                losses += [out.square().sum().item() for out in outs]
            else:
                loss = sum(out.square().sum() for out in outs)
                loss.backward()
                losses.append(loss.item())
        steps.append({"events": list(events), "counts": dict(counts), "losses": losses})
        optimizer.step()
        if case["post_optim_event"]:
            model.set_post_optim_event(torch.cpu.Event())
        optimizer.zero_grad()
    return steps


run_cases(run, trace_everything)
