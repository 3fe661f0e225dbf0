"""The Python twin of bench_train.cpp, which explains the modes: the same flags, weights, tokens, rounds and JSON lines.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peer_train.py --mode fsdp2,nocomm,ddp --steps 20

--opt-impl fused, foreach and for choose PyTorch's implementation of AdamW; default leaves it to PyTorch, which takes
its loop over the parameters on CPU.
"""
import argparse
import contextlib
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import peer_common as common
from llama_peer import hash_tokens, hashed_llama

PARTS = ("forward", "backward", "clip", "optim")


class StubAllGather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        for rank, row in enumerate(output_tensor.view(group.size(), -1)):
            if rank != group.rank():  # the input is this rank's part of the output
                row.copy_(input_tensor)


class StubReduceScatter(StubAllGather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def own_rows(whole, rank, world):
    each = -(-whole.shape[0] // world)
    begin = min(whole.shape[0], each * rank)
    return whole[begin : begin + each]


def build_model(args):
    config = {key: getattr(args, key) for key in ("dim", "layers", "heads", "kv_heads", "ffn", "vocab")}
    return hashed_llama(config).to(torch.bfloat16 if args.dtype == "bf16" else torch.float32)


class Trainer:
    def __init__(self, mode, args):
        self.mode, self.args, self.rank, self.world = mode, args, dist.get_rank(), dist.get_world_size()
        self.model = build_model(args)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.own = []  # nocomm: (whole parameter, the part that is trained)
        if mode in ("fsdp2", "stub"):
            self.shard()
            parameters = list(self.model.parameters())
        elif mode == "ddp":
            parameters = list(self.model.parameters())
            self.model = DistributedDataParallel(self.model)
        elif mode == "local":
            parameters = list(self.model.parameters())
        elif mode == "nocomm":
            parts = [own_rows(p.data, self.rank, self.world) for p in self.model.parameters()]
            if args.mp:
                parts = [part.clone() for part in parts]
                self.model.to(torch.bfloat16)
            parameters = [torch.nn.Parameter(part) for part in parts]
            self.own = list(zip(self.model.parameters(), parameters))
        else:
            sys.exit(f"unknown mode {mode}")
        self.parameters = parameters
        choice = {}
        if args.opt_impl != "default":
            choice = {"foreach": args.opt_impl == "foreach", "fused": args.opt_impl == "fused"}
        self.optimizer = torch.optim.AdamW(
            parameters, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **choice
        )
        self.times, self.losses = [], []

    def shard(self):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.args.mp else MixedPrecisionPolicy()
        root = {"mesh": init_device_mesh("cpu", (self.world,)), "mp_policy": policy}
        blocks, reshard = dict(root), self.args.reshard_after_forward
        if reshard.isdigit():
            blocks["reshard_after_forward"] = int(reshard)
        elif reshard != "default":
            blocks["reshard_after_forward"] = root["reshard_after_forward"] = reshard == "always"
        for block in self.model.layers:
            fully_shard(block, **blocks)
        fully_shard(self.model, **root)
        if self.mode == "stub":
            for module in (self.model, *self.model.layers):
                module.set_custom_all_gather(StubAllGather())
                module.set_custom_reduce_scatter(StubReduceScatter())

    def reduce_on(self, last):
        if self.mode in ("fsdp2", "stub"):
            self.model.set_requires_gradient_sync(last)
        return self.model.no_sync() if self.mode == "ddp" and not last else contextlib.nullcontext()

    def autocast(self):
        needed = self.args.mp and self.mode in ("ddp", "local")
        return torch.autocast("cpu", torch.bfloat16) if needed else contextlib.nullcontext()

    def gradients_to_shards(self):
        for whole, own in self.own:
            own.grad = own_rows(whole.grad, self.rank, self.world).to(own.dtype)

    def shards_to_weights(self):
        for whole, own in self.own:
            whole.grad = None
            if self.args.mp:
                own_rows(whole.data, self.rank, self.world).copy_(own.data)

    def step(self, index, at_peak=None):
        args, accum, now = self.args, self.args.grad_accum, time.perf_counter
        batches = [
            hash_tokens(index, micro, accum, self.rank, self.world, args.batch, args.seq, args.vocab)
            for micro in range(accum)
        ]
        at_peak = at_peak or (lambda: None)
        forward = backward = total = 0.0
        dist.barrier()
        start = now()
        for micro, (tokens, targets) in enumerate(batches):
            with self.reduce_on(micro == accum - 1):
                before = now()
                with self.autocast():
                    logits = self.model(tokens)
                loss = F.cross_entropy(logits.float().view(-1, args.vocab), targets.view(-1)) / accum
                between = now()
                at_peak()
                loss.backward()
                after = now()
                at_peak()
            total += loss.item()
            forward, backward = forward + between - before, backward + after - between
            del logits, loss
        self.gradients_to_shards()
        before_clip = now()
        if args.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters, args.clip)
        after_clip = now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.shards_to_weights()
        end = now()
        at_peak()
        self.times.append(
            dict(step=end - start, forward=forward, backward=backward, clip=after_clip - before_clip,
                 optim=end - after_clip)
        )
        self.losses.append(total)


class Ranges:
    """Exclusive wall time of FSDP2's functions, by wrapping them. On CPU all of them run on the calling thread."""

    def __init__(self):
        self.seconds, self.calls, self.inside = {}, {}, []

    def wrap(self, owner, name, label):
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            self.inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                own = seconds - self.inside.pop()
                self.seconds[label] = self.seconds.get(label, 0.0) + own
                self.calls[label] = self.calls.get(label, 0) + 1
                if self.inside:
                    self.inside[-1] += seconds

        setattr(owner, name, timed)

    def install(self):
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state

        for name in ("_pre_forward", "_post_forward", "_pre_backward", "_root_post_backward_final_callback"):
            self.wrap(_fsdp_state.FSDPState, name, "hooks")
        self.wrap(_fsdp_param_group.FSDPParamGroup, "post_backward", "hooks")
        self.wrap(torch.ops.fsdp, "all_gather_copy_in", "copies")
        self.wrap(torch.ops.fsdp, "split_with_sizes_copy", "copies")
        self.wrap(torch.ops.fsdp, "chunk_cat", "copies")
        self.wrap(_fsdp_collectives, "_get_param_all_gather_inputs", "copies")
        self.wrap(_fsdp_collectives.DefaultAllocMixin, "allocate", "memory")
        self.wrap(_fsdp_param.FSDPParam, "alloc_all_gather_outputs", "memory")
        self.wrap(_fsdp_param, "free_storage", "memory")
        self.wrap(_fsdp_collectives.DefaultAllGather, "__call__", "all-gather")
        self.wrap(_fsdp_collectives.DefaultReduceScatter, "__call__", "reduce-scatter")


def report(args, mode, trainers, everyone, kept, noise):
    modes = [t.mode for t in trainers]

    def steps_of(which):  # the slowest rank of each step
        return [max(rank["modes"][which]["times"][i]["step"] for rank in everyone) for i in kept]

    def mean_of(values):
        values = list(values)
        return sum(values) / len(values)

    steps = steps_of(mode)
    ms = common.median(steps) * 1e3
    parts = {
        part: common.median(
            [mean_of(rank["modes"][mode]["times"][i][part] for rank in everyone) for i in kept]
        ) * 1e3
        for part in PARTS
    }
    record = {
        "bench": "train", "mode": modes[mode], "tag": args.tag, "backend": "gloo", "world": len(everyone),
        "params": trainers[mode].num_parameters, "step_ms": ms,
        "p10": common.quantile(steps, 0.1) * 1e3, "p90": common.quantile(steps, 0.9) * 1e3,
        "tok_s_rank": args.batch * args.seq * args.grad_accum / ms * 1e3, "parts_ms": parts,
        "ratio_to": {
            modes[other]: common.median([a / b for a, b in zip(steps, steps_of(other))])
            for other in range(len(modes)) if other != mode
        },
    }
    measured = len(everyone[0]["modes"][0]["times"]) - args.warmup
    if len(modes) == 1:
        record["cpu_ms_per_step_all_ranks"] = sum(rank["cpu"] for rank in everyone) / measured * 1e3
        record["rss_peak_over_start_mb"] = [rank["rss"] for rank in everyone]
        record["rss_peak_init_mb"] = [rank["rss_init"] for rank in everyone]
        record["pss_peak_over_start_mb"] = [rank["pss"] for rank in everyone]
    record["noise"] = noise
    if args.profile:
        count = measured * len(everyone)
        all_times = [t for rank in everyone for t in rank["modes"][mode]["times"][args.warmup :]]
        split = {
            label: sum(rank["ranges"][0].get(label, 0.0) for rank in everyone) / count * 1e3
            for label in everyone[0]["ranges"][0]
        }
        split["optimizer+clip"] = sum(t["optim"] + t["clip"] for t in all_times) / count * 1e3
        split["compute fwd+bwd (rest)"] = sum(t["step"] for t in all_times) / count * 1e3 - sum(split.values())
        record["split_ms"] = dict(sorted(split.items(), key=lambda item: -item[1]))
        record["calls_per_step"] = {k: v / measured for k, v in everyone[0]["ranges"][1].items()}
    record = common.rounded(record)
    losses = [
        mean_of(rank["modes"][mode]["losses"][i] for rank in everyone) for i in range(args.warmup + args.steps)
    ]
    record["loss"] = common.rounded(losses, 9)
    record["args"] = " ".join(sys.argv[1:])
    common.print_line(record)


def run(args):
    ranges = Ranges()
    if args.profile:
        ranges.install()
    start, start_proportional = common.resident(), common.proportional_memory()
    trainers = [Trainer(mode, args) for mode in args.mode.split(",")]

    def one_round(index):
        for trainer in trainers if index % 2 == 0 else trainers[::-1]:
            trainer.step(index)

    for index in range(args.warmup):
        one_round(index)
    ranges.seconds.clear()
    ranges.calls.clear()
    cpu = common.own_cpu_seconds()
    peak_before = common.peak_resident() - start
    common.forget_peak_resident()
    quiet = common.Quiet(args.steps, wait_seconds=args.max_wait)
    kept = [args.warmup + i for i in quiet.run(lambda i: one_round(args.warmup + i))]
    mine = {
        "modes": [{"times": list(t.times), "losses": list(t.losses)} for t in trainers],
        "cpu": common.own_cpu_seconds() - cpu,
        "rss_init": peak_before,
        "rss": common.peak_resident() - start,
        "ranges": (dict(ranges.seconds), dict(ranges.calls)),
        "pss": 0.0,
    }
    if len(trainers) == 1:
        samples = []
        for extra in range(2):
            trainers[0].step(
                len(mine["modes"][0]["times"]) + extra,
                lambda: samples.append(common.proportional_memory() - start_proportional),
            )
        mine["pss"] = max(samples)
    everyone = common.gather(mine)
    if dist.get_rank() == 0:
        for mode in range(len(trainers)):
            report(args, mode, trainers, everyone, kept, quiet.noise)


def check_init(args):
    for name, parameter in build_model(args).named_parameters():
        values = parameter.detach().float().reshape(-1)
        bits = values.view(torch.int32).to(torch.int64).sum().item()
        first = [value.hex() for value in values[:3].tolist()]
        common.print_line(dict(fqn=name, shape=list(parameter.shape), first=first, bitsum=bits))


def parse():
    parser = argparse.ArgumentParser()
    numbers = dict(dim=256, layers=4, heads=8, kv_heads=4, ffn=704, vocab=4096, seq=128, batch=2, grad_accum=1,
                   steps=20, warmup=3)
    for name, default in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--mode", default="fsdp2", help="fsdp2, ddp, local, nocomm, stub, or a list to take turns")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--mp", action="store_true")
    parser.add_argument("--reshard-after-forward", default="default", help="default, always, never or a number")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--opt-impl", default="default", choices=["default", "for", "foreach", "fused"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--profile", action="store_true", help="split the time inside FSDP2; for --mode fsdp2")
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--tag", default="")
    parser.add_argument("--check-init", action="store_true")
    parser.add_argument("--max-wait", type=float, default=90.0)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.check_init:
        check_init(arguments)
    else:
        common.join(arguments.pin)
        run(arguments)
        common.leave()
