"""Trains the twin under Python's FSDP2 and writes losses and collective counts: training_peer.py CASES.json OUT.json"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from llama_peer import hash_tokens, hashed_llama
from peer_rank import run_cases

counts = {"all_gathers": 0, "reduce_scatters": 0, "bytes": 0}


def count_calls(owner, key, position):
    call = owner.__call__

    def counted(self, *args, **kwargs):
        tensors = [a for a in list(args) + list(kwargs.values()) if isinstance(a, torch.Tensor)]
        counts[key] += 1
        counts["bytes"] += tensors[position].nbytes
        return call(self, *args, **kwargs)

    owner.__call__ = counted


def run(case):
    config, world, rank = case["config"], dist.get_world_size(), dist.get_rank()
    model = hashed_llama(config)
    policy = MixedPrecisionPolicy()
    if case["mixed_precision"]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy}
    if case["reshard_after_forward"] is not None:
        options["reshard_after_forward"] = case["reshard_after_forward"]
    for block in model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, steps = [], []
    for step in range(case["steps"]):
        counts.update(all_gathers=0, reduce_scatters=0, bytes=0)
        total = torch.zeros(())
        for micro in range(case["accum"]):
            model.set_requires_gradient_sync(micro == case["accum"] - 1)
            tokens, targets = hash_tokens(step, micro, case["accum"], rank, world, case["batch"], case["seq"],
                                          config["vocab"])
            logits = model(tokens)
            loss = F.cross_entropy(logits.float().view(-1, config["vocab"]), targets.view(-1)) / case["accum"]
            loss.backward()
            total += loss.detach()
        steps.append(dict(counts))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return {"losses": losses, "steps": steps, "last_norm": norm.full_tensor().item()}


def count_collectives():
    count_calls(collectives.DefaultAllGather, "all_gathers", 0)
    count_calls(collectives.DefaultReduceScatter, "reduce_scatters", 1)


run_cases(run, count_collectives)
