#!/usr/bin/env python3
"""Step time and memory of fully_shard on many GPUs, from message sizes, bandwidths and the order of one step.

  scaling_model.py                 prints every table of docs/scaling.md
  scaling_model.py --write         puts them into docs/scaling.md and draws docs/scaling.svg
  scaling_model.py --check FILE    fails where a table of FILE is not what this program computes, or a published
                                   number is missed by more than 15 %
  scaling_model.py --bytes SHARDS REPLICAS    JSON: calls and bytes of one step of one rank

docs/scaling.md explains the model. Units here: seconds, bytes, GiB where a name says so.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import sys

GIB = 2.0**30
GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Chip:
    name: str
    bf16_flops: float  # dense, the maker's figure
    watts: float  # limit of the run
    hbm: float  # bytes per second
    hbm_gib: float
    nvlink: float  # bytes per second and direction
    nic: float  # bytes per second and direction, one per GPU


# Of the published runs: docs/scaling.md gives the sources.
H100 = Chip("H100", 989e12, 500, 2.4e12, 96e9 / GIB, 450e9, 50e9)
H200 = Chip("H200", 989e12, 700, 4.8e12, 141e9 / GIB, 450e9, 50e9)

# Assumed, not fitted.
LINK_EFFICIENCY = 0.8  # of NVLink's and the NIC's rate, large messages
HBM_EFFICIENCY = 0.8
SLOWDOWN = 0.15  # of computation while a collective runs: it takes processors and memory bandwidth
RING_BASE, HOP_INSIDE, HOP_BETWEEN = 8.4e-6, 3.4e-6, 14e-6  # NCCL's own estimates, ring, protocol "simple"
POWER_TO_SPEED = 1 / 3  # matrix products under a power limit: clock grows with its cube root


@dataclasses.dataclass(frozen=True)
class Llama:
    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256

    @property
    def kv_dim(self):
        return self.dim // self.heads * self.kv_heads

    def layer_shapes(self):
        d, k, f = self.dim, self.kv_dim, self.ffn
        return [(d, d), (k, d), (k, d), (d, d), (f, d), (d, f), (f, d), (d,), (d,)]

    def root_shapes(self):
        return [(self.vocab, self.dim), (self.dim,), (self.vocab, self.dim)]

    @property
    def layer_params(self):
        return sum(math.prod(s) for s in self.layer_shapes())

    @property
    def root_params(self):
        return sum(math.prod(s) for s in self.root_shapes())

    @property
    def params(self):
        return self.layers * self.layer_params + self.root_params


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a step is computed. The two rates and the eager factor are what is fitted."""

    name: str
    gemm_flops: float  # matrix products in bf16, at H100's power limit
    fp8_flops: float = 0  # those of the layers in float8; 0: bf16
    elementwise: float = 1  # memory traffic outside matrix products, compiled = 1
    loss_copies: float = 3  # float32 copies of the logits that are alive at once in the loss
    param_bytes: int = 2  # gathered


@dataclasses.dataclass(frozen=True)
class Job:
    shards: int
    replicas: int = 1
    batch: int = 2
    seq: int = 8192

    @property
    def gpus(self):
        return self.shards * self.replicas

    @property
    def tokens(self):
        return self.batch * self.seq


# --- What is sent -----------------------------------------------------------------------------------------------------


def padded(shapes, shards):
    """Elements that all ranks hold together: dim 0 in equal parts, the last ones padded."""
    return sum(-(-s[0] // shards) * shards * math.prod(s[1:]) for s in shapes)


def traffic(model, job, param_bytes=2, reduce_bytes=4):
    """Calls and bytes (of the whole side) of one step of one rank; every layer is gathered twice, the root once."""
    layer, root = padded(model.layer_shapes(), job.shards), padded(model.root_shapes(), job.shards)
    n = model.layers
    result = {
        "all_gather": {"calls": 1 + 2 * n, "bytes": param_bytes * (root + 2 * n * layer)},
        "reduce_scatter": {"calls": 1 + n, "bytes": reduce_bytes * (root + n * layer)},
    }
    if job.replicas > 1:
        result["all_reduce"] = {"calls": 1 + n, "bytes": reduce_bytes * (root + n * layer) // job.shards}
    return result


def ring_time(chip, bytes_whole, ranks, hosts, rounds=1):
    """An all-gather or reduce-scatter (rounds 1) or all-reduce (2) over `ranks` that are spread over `hosts`.

    Every byte but the own part passes each GPU's NVLink once; between hosts all NICs of a host carry their share.
    """
    if ranks == 1:
        return 0.0
    rate = chip.nvlink if hosts == 1 else min(chip.nvlink, chip.nic * min(GPUS_PER_HOST, max(1, ranks // hosts)))
    between = hosts - 1 if hosts > 1 else 0
    latency = RING_BASE + rounds * ((ranks - 1 - between) * HOP_INSIDE + between * HOP_BETWEEN)
    return latency + rounds * bytes_whole * (ranks - 1) / ranks / (LINK_EFFICIENCY * rate)


def shard_time(chip, bytes_whole, job):
    return ring_time(chip, bytes_whole, job.shards, -(-job.shards // GPUS_PER_HOST))


def replica_time(chip, bytes_part, job):
    """Neighbours hold the shards, so ranks of one replica group sit on different hosts, or host parts."""
    ranks_per_host = max(1, GPUS_PER_HOST // job.shards)
    return ring_time(chip, bytes_part, job.replicas, max(1, job.replicas // ranks_per_host), rounds=2)


# --- What is computed -------------------------------------------------------------------------------------------------


def speed(chip):
    return (chip.watts / H100.watts) ** POWER_TO_SPEED


def pieces(model, chip, recipe, job):
    """Seconds of one layer forward and backward, and of the head (output product, loss) the same."""
    matrices = model.layer_params - 2 * model.dim
    gemm = recipe.gemm_flops * speed(chip)
    linear = (recipe.fp8_flops or recipe.gemm_flops) * speed(chip)
    memory = HBM_EFFICIENCY * chip.hbm
    # Causal attention: half of two products of seq x seq; backward does five for the two.
    attention = 2 * job.seq * model.dim
    # Vectors of dim that a compiled layer moves between matrix products, forward: two norms, rotations, the gate,
    # residuals; recomputation and backward about three times that.
    d, f = model.dim, model.ffn
    vectors = 2 * (2 * d) + 2 * (d + model.kv_dim) + 3 * f + 4 * d
    if recipe.fp8_flops:
        vectors += 3 * (3 * d + f)  # largest value, and casts, of what goes into the products
    move = 2 * vectors * recipe.elementwise / memory
    forward = job.tokens * (2 * matrices / linear + attention / gemm + move)
    # Selective checkpointing recomputes every second product.
    backward = job.tokens * (5 * matrices / linear + 2.5 * attention / gemm + 3 * move)
    output = job.tokens * 2 * model.vocab * model.dim / gemm
    loss = job.tokens * model.vocab * 4 * 5 * recipe.elementwise / memory / 2
    return forward, backward, output + loss, 2 * output + loss


def optimizer_time(model, chip, job):
    """AdamW and the norm: reads weight, gradient twice, two moments; writes three."""
    return model.params / job.shards * 4 * 8 / (HBM_EFFICIENCY * chip.hbm)


# --- One step in the order of time ------------------------------------------------------------------------------------


class Link:
    """Runs collectives one after another."""

    def __init__(self):
        self.free = self.busy = 0.0

    def run(self, issued, duration):
        self.free = max(self.free, issued) + duration
        self.busy += duration
        return self.free


def simulate(model, chip, recipe, job):
    layer, root = padded(model.layer_shapes(), job.shards), padded(model.root_shapes(), job.shards)
    gather = shard_time(chip, recipe.param_bytes * layer, job)
    gather_root = shard_time(chip, 2 * root, job)
    reduce = shard_time(chip, 4 * layer, job)
    reduce_root = shard_time(chip, 4 * root, job)
    forward, backward, head, head_backward = pieces(model, chip, recipe, job)
    computed = model.layers * (forward + backward) + head + head_backward
    sent = 2 * model.layers * gather + gather_root + model.layers * reduce + reduce_root
    slower = 1 + SLOWDOWN * min(1.0, sent / computed)
    forward, backward, head, head_backward = (slower * t for t in (forward, backward, head, head_backward))

    shard_link, replica_link = Link(), Link()

    def all_reduce(issued, elements):
        if job.replicas == 1:
            return issued
        return replica_link.run(issued, replica_time(chip, 4 * elements / job.shards, job))

    now = shard_link.run(0, gather_root)
    start = 0.0
    for _ in range(model.layers):  # the host runs ahead: a layer is gathered while the one before computes
        start = max(now, shard_link.run(start, gather))
        now = start + forward
    now += head
    ready = shard_link.run(now, gather)  # the last layer's, asked for when the head begins its backward
    now += head_backward
    reduced = 0.0
    for layer_above in range(model.layers):
        start = max(now, ready)
        if layer_above + 1 < model.layers:
            ready = shard_link.run(start, gather)  # of the layer below, before this one's reduction
        now = start + backward
        reduced = all_reduce(shard_link.run(now, reduce), layer)
    reduced = max(reduced, all_reduce(shard_link.run(now, reduce_root), root))
    step = max(now, reduced) + optimizer_time(model, chip, job)
    return {
        "step": step,
        "computed": slower * computed,
        "sent": shard_link.busy + replica_link.busy,
        "exposed": step - slower * computed - optimizer_time(model, chip, job),
        "tokens_per_second": job.tokens / step,
        "memory_gib": memory(model, recipe, job)["total"],
    }


def memory(model, recipe, job):
    """GiB at the peak, which is in the backward of the loss: all activations are there, and the logits' copies."""
    d, f = model.dim, model.ffn
    # Kept of a layer and token by selective checkpointing: its input, every second product (wq, wv, w1, w2), the
    # attention's result.
    kept = 2 * (d + d + model.kv_dim + f + d + d) + 4 * model.heads
    parts = {
        "states": 16 * model.params / job.shards,  # float32 weight, gradient, two moments
        "activations": job.tokens * model.layers * kept,
        "logits": job.tokens * model.vocab * (4 * recipe.loss_copies),
        "root": 2 * model.root_params,  # stays whole
        "layers": 2 * model.layer_params * 3,  # two whole ones and a gather's output
    }
    parts = {name: value / GIB for name, value in parts.items()}
    return {**parts, "total": sum(parts.values())}


# --- Published runs ---------------------------------------------------------------------------------------------------

MODEL = Llama()
# (label, chip, recipe, GPUs, tokens per second and GPU, GiB)
PUBLISHED = [
    ("eager", H100, "eager", 8, 5762, 82.4),
    ("compile", H100, "compile", 8, 6667, 77.0),
    ("compile + float8", H100, "float8", 8, 8532, 76.8),
    ("eager", H100, "eager", 128, 5605, 67.0),
    ("compile", H100, "compile", 128, 6514, 62.0),
    ("compile + float8", H100, "float8", 128, 8380, 61.8),
    ("compile + float8", H200, "float8, compiled loss", 32, 10938, 47.96),
    ("compile + float8", H200, "float8, compiled loss", 64, 10753, 46.97),
]


def bisect(low, high, too_fast):
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if too_fast(middle) else (middle, high)
    return (low + high) / 2


def fitted():
    """The three numbers that make the three 8-GPU throughputs exact; nothing else is fitted."""
    job = Job(8)

    def rate(recipe):
        return simulate(MODEL, H100, recipe, job)["tokens_per_second"]

    gemm = bisect(100e12, 989e12, lambda x: rate(Recipe("compile", x)) > 6667)
    eager = bisect(1, 20, lambda x: rate(Recipe("eager", gemm, elementwise=x)) < 5762)
    fp8 = bisect(100e12, 1979e12, lambda x: rate(Recipe("float8", gemm, x, param_bytes=1)) > 8532)
    return {
        "eager": Recipe("eager", gemm, elementwise=eager),
        "compile": Recipe("compile", gemm),
        "float8": Recipe("float8", gemm, fp8, param_bytes=1),
        "float8, compiled loss": Recipe("float8, compiled loss", gemm, fp8, loss_copies=1, param_bytes=1),
    }


RECIPES = fitted()


def anchors():
    for label, chip, recipe, gpus, rate, gib in PUBLISHED:
        result = simulate(MODEL, chip, RECIPES[recipe], Job(gpus))
        yield label, chip, gpus, rate, result["tokens_per_second"], gib, result["memory_gib"]


# --- Tables -----------------------------------------------------------------------------------------------------------


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def percent(value):
    return f"{100 * value:+.1f} %"


def anchors_table():
    rows = []
    for label, chip, gpus, rate, our_rate, gib, our_gib in anchors():
        fit = gpus == 8
        rows.append([f"{gpus} {chip.name}, {label}", f"{rate:,}", f"{our_rate:,.0f}",
                     "fitted" if fit else percent(our_rate / rate - 1), f"{gib:.1f}", f"{our_gib:.1f}",
                     percent(our_gib / gib - 1)])
    return table(["run", "tokens/s/GPU", "model", "", "GiB", "model", ""], rows)


def fitted_table():
    compile_, float8, eager = RECIPES["compile"], RECIPES["float8"], RECIPES["eager"]
    return table(["number", "value", "what it says"], [
        ["matrix products, bf16", f"{compile_.gemm_flops / 1e12:.0f} TFLOP/s",
         f"{100 * compile_.gemm_flops / H100.bf16_flops:.0f} % of the dense peak"],
        ["matrix products of the layers, float8", f"{float8.fp8_flops / 1e12:.0f} TFLOP/s",
         f"{100 * float8.fp8_flops / 2 / H100.bf16_flops:.0f} % of the dense peak"],
        ["memory traffic of eager over compiled", f"{eager.elementwise:.1f}", "outside matrix products"],
    ])


def bytes_table():
    rows = []
    for shards, replicas in [(8, 1), (64, 1), (1024, 1), (4096, 1), (8, 128), (64, 16)]:
        sent = traffic(MODEL, Job(shards, replicas))
        reduced = sent.get("all_reduce", {"calls": 0, "bytes": 0})
        rows.append([f"{shards} x {replicas}", *(f"{sent[op]['calls']}, {sent[op]['bytes'] / 1e9:.2f}"
                                                  for op in ("all_gather", "reduce_scatter")),
                     f"{reduced['calls']}, {reduced['bytes'] / 1e9:.3f}"])
    return table(["shards x replicas", "all-gather: calls, GB", "reduce-scatter", "all-reduce"], rows)


WORLDS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]


def scaling_rows(batch):
    for gpus in WORLDS:
        plain = simulate(MODEL, H100, RECIPES["compile"], Job(gpus, 1, batch))
        shards = min(gpus, 8)
        hybrid = simulate(MODEL, H100, RECIPES["compile"], Job(shards, gpus // shards, batch))
        wide = min(gpus, 64)
        middle = simulate(MODEL, H100, RECIPES["compile"], Job(wide, gpus // wide, batch))
        yield gpus, plain, hybrid, middle


def scaling_table(batch):
    rows = []
    for gpus, *results in scaling_rows(batch):
        cells = [str(gpus)]
        for result in results:
            cells += [f"{1e3 * result['step']:.0f} ({1e3 * result['exposed']:.0f})",
                      f"{result['tokens_per_second']:,.0f}", f"{result['memory_gib']:.1f}"]
        rows.append(cells)
    names = ["step (exposed) ms", "tokens/s/GPU", "GiB"]
    return table(["GPUs", *names, *("8: " + n for n in names), *("64: " + n for n in names)], rows)


def memory_table():
    rows = []
    for gpus in [8, 64, 1024]:
        for batch in [1, 2, 4]:
            parts = memory(MODEL, RECIPES["compile"], Job(gpus, 1, batch))
            rows.append([f"{gpus}, batch {batch}", *(f"{value:.1f}" for value in parts.values())])
    return table(["GPUs", *memory(MODEL, RECIPES["compile"], Job(8)).keys()], rows)


def limits_table():
    """The first shard size at which more than 5 % of the step waits for collectives."""

    def limit(recipe, batch):
        for gpus in WORLDS:
            result = simulate(MODEL, H100, RECIPES[recipe], Job(gpus, 1, batch))
            if result["exposed"] > 0.05 * result["step"]:
                return str(gpus)
        return f"over {WORLDS[-1]}"

    rows = [[str(batch), limit("compile", batch), limit("float8", batch)] for batch in (1, 2, 4)]
    return table(["sequences per GPU", "compile", "compile + float8"], rows)


TABLES = {
    "anchors": anchors_table,
    "fitted": fitted_table,
    "bytes": bytes_table,
    "batch 1": lambda: scaling_table(1),
    "batch 2": lambda: scaling_table(2),
    "limits": limits_table,
    "memory": memory_table,
}

BLOCK = re.compile(r"(<!-- table: (?P<name>[^>]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


# --- Plot -------------------------------------------------------------------------------------------------------------


def svg():
    width, height, left, right, top, bottom = 760, 400, 70, 190, 30, 50
    series = []
    for batch in (1, 2):
        rows = list(scaling_rows(batch))
        for index, name in ((1, "all GPUs"), (3, "64 a replica"), (2, "8 a replica")):
            series.append((f"{name}, batch {batch}", batch, index, [row[index]["tokens_per_second"] for row in rows]))
    highest = 8000
    colors = {1: "#c0392b", 2: "#2471a3", 3: "#1e8449"}

    def x(i):
        return left + (width - left - right) * i / (len(WORLDS) - 1)

    def y(value):
        return height - bottom - (height - top - bottom) * value / highest

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{left}" y="18">Llama 3.1 8B on H100, compiled, bf16: tokens per second and GPU (model)</text>']
    for value in range(0, highest + 1, 1000):
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,}</text>')
    for i, gpus in enumerate(WORLDS):
        out.append(f'<text x="{x(i):.1f}" y="{height - bottom + 18}" text-anchor="middle">{gpus}</text>')
    out.append(f'<text x="{(left + width - right) / 2:.0f}" y="{height - 12}" text-anchor="middle">GPUs</text>')
    for place, (name, batch, index, values) in enumerate(series):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        dash = ' stroke-dasharray="5 4"' if batch == 1 else ""
        out.append(f'<polyline points="{points}" fill="none" stroke="{colors[index]}" stroke-width="2"{dash}/>')
        at = top + 20 * place + 10
        out.append(f'<line x1="{width - right + 12}" x2="{width - right + 40}" y1="{at}" y2="{at}" '
                   f'stroke="{colors[index]}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{width - right + 46}" y="{at + 4}">{name}</text>')
    for gpus, rate in ((8, 6667), (128, 6514)):
        out.append(f'<circle cx="{x(WORLDS.index(gpus)):.1f}" cy="{y(rate):.1f}" r="4" fill="black"/>')
    at = top + 20 * len(series) + 10
    out.append(f'<circle cx="{width - right + 26}" cy="{at}" r="4" fill="black"/>')
    out.append(f'<text x="{width - right + 46}" y="{at + 4}">published, batch 2</text>')
    return "\n".join(out + ["</svg>", ""])


# --- Program ----------------------------------------------------------------------------------------------------------


def check(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    faults = []
    shown = {match["name"]: match["body"] for match in BLOCK.finditer(text)}
    for name in sorted(TABLES.keys() | shown.keys()):
        if name not in shown or name not in TABLES:
            faults.append(f'table "{name}" is {"not shown" if name in TABLES else "not computed"}')
        elif shown[name] != TABLES[name]() + "\n":
            faults.append(f'table "{name}" differs')
    for label, chip, gpus, rate, our_rate, gib, our_gib in anchors():
        for what, published, ours in (("tokens/s/GPU", rate, our_rate), ("GiB", gib, our_gib)):
            if abs(ours / published - 1) > 0.15:
                faults.append(f"{gpus} {chip.name}, {label}: {ours:.1f} {what}, published {published}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", metavar="FILE")
    parser.add_argument("--bytes", nargs=2, type=int, metavar=("SHARDS", "REPLICAS"))
    args = parser.parse_args()
    docs = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs")
    if args.bytes:
        print(json.dumps(traffic(MODEL, Job(*args.bytes))))
        return 0
    if args.check:
        faults = check(args.check)
        for fault in faults:
            print(f"scaling_model: {fault}; scripts/scaling_model.py --write renews {args.check}", file=sys.stderr)
        return 1 if faults else 0
    if args.write:
        path = os.path.join(docs, "scaling.md")
        with open(path, encoding="utf-8") as file:
            text = file.read()
        text = BLOCK.sub(lambda m: m[1] + TABLES[m["name"]]() + "\n" + m[4], text)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        with open(os.path.join(docs, "scaling.svg"), "w", encoding="utf-8") as file:
            file.write(svg())
        return 0
    for name, make in TABLES.items():
        print(f"{name}\n\n{make()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
