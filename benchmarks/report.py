"""Writes the report of run_all.py from its results."""
import math
from collections import defaultdict

SIZES = ("tiny", "small", "medium", "comm")
SIDES = {"python": "Python, Gloo", "gloo": "ours, Gloo", "shm": "ours, shm", "ours": "ours"}


def median(values):
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def number(value, unit=""):
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 20 else 2
    return f"{value:,.{digits}f}{unit}"


def spread(values, unit=""):
    """Median, and least to most where there are several."""
    if not values:
        return "-"
    if len(values) == 1:
        return number(values[0], unit)
    return f"{number(median(values), unit)} ({number(min(values))} to {number(max(values))})"


class Results:
    """Looks up numbers of cells; a missing one is an empty list."""

    def __init__(self, results):
        self.results = results

    def records(self, cell, side):
        """One list of records a repeat, by repeat."""
        return {r["repeat"]: r["records"] for r in self.results
                if r["cell"] == cell and r["side"] == side and not r["error"]}

    def train(self, cell, side, mode, *path):
        """A number of that mode in each repeat, by repeat."""
        found = {}
        for repeat, records in self.records(cell, side).items():
            for record in records:
                value = record if record.get("mode") == mode else None
                for key in path:
                    value = value.get(key) if value is not None else None
                if value is not None:
                    found[repeat] = max(value) if isinstance(value, list) else value
        return found

    def split(self, cell, side):
        """Milliseconds of the pieces of a step, from the first run that has them."""
        found = self.pick(cell, side, lambda record: "split_ms" in record, "split_ms")
        return found[0] if found else {}

    def over(self, cell, above, below):
        """Ratio of the step times of two (side, mode), within each repeat."""
        a, b = (self.train(cell, *which, "step_ms") for which in (above, below))
        return [a[repeat] / b[repeat] for repeat in a if repeat in b]

    def to_ideal(self, cell, side, mode="fsdp2", ideal="nocomm"):
        return list(self.train(cell, side, mode, "ratio_to", ideal).values())

    def pick(self, cell, side, keep, *path):
        """A number of the records that `keep` accepts, in all repeats."""
        found = []
        for records in self.records(cell, side).values():
            for value in filter(keep, records):
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
                if value is not None:
                    found.append(value)
        return found

    def comm(self, cell, side, size, *path):
        return self.pick(cell, side, lambda r: abs(math.log10(r["bytes"] / size)) < 0.1, *path)

    def hooks(self, cell, side, dim, variant, key="over_us"):
        names = {"python": "gloo"}.get(side, side) if variant[0] == "own" else variant[0]
        return self.pick(cell, side, lambda r: r["dim"] == dim, f"{names}/{variant[1]}", key)

    def optim(self, side, name):
        return self.pick("optimizers", side, lambda r: r["optimizer"] == name, "dtensor_cost_us")

    def dcp(self):
        return [record for records in self.records("checkpoints", "both").values() for record in records]

    def dcp_ratios(self, folder, world, side, *path):
        found = []
        for record in self.dcp():
            if record.get("dir") == folder and record.get("world") == world and "--mb" in record.get("options", []):
                for run in record[side]:
                    value = run
                    for key in path:
                        value = value[key]
                    found.append(value)
        return found

    def dcp_speedup(self, what, keep):
        """Python's time over ours, in the records that `keep` accepts."""
        found = []
        for record in self.dcp():
            if "world" in record and keep(record):
                ours, python = ([run["ms"][what] for run in record[side]] for side in ("ours", "python"))
                found.append(median(python) / median(ours))
        return found


def held_to(r):
    """Rows of what the performance issue holds the library to: (what, limit, whether at least, ours, Python's)."""
    rows = []

    def row(what, limit, ours, python=(), least=False, unit=""):
        rows.append((what, limit, list(ours), list(python), least, unit))

    for size, limit in zip(SIZES, (1.10, 1.07, 1.05, 1.25)):
        row(f"step / ideal on shm, {size}", limit, r.to_ideal(size, "shm"), r.to_ideal(size, "python"))
    for size, limit in (("small", 0.85), ("medium", 0.95), ("comm", 0.75)):
        row(f"step on Gloo / Python's step, {size}", limit, r.over(size, ("gloo", "fsdp2"), ("python", "fsdp2")))
    for size in SIZES:
        row(f"step on shm / Python DDP's step, {size}", 0.9, r.over(size, ("shm", "fsdp2"), ("python", "ddp")),
            r.over(size, ("python", "fsdp2"), ("python", "ddp")))
    for cell, limit, ideal in (("small mp", 1.10, "nocomm"), ("small 4 micro-batches", 1.06, "nocomm"),
                               ("small 1 rank", 1.01, "local"), ("small 4 ranks", 1.3, "nocomm")):
        name = {"small mp": "mp bf16/fp32, small / ideal", "small 4 micro-batches": "4 micro-batches, small / ideal",
                "small 1 rank": "world size 1 / plain model, small",
                "small 4 ranks": "4 ranks on 2 cores, small / its ideal"}[cell]
        row(name, limit, r.to_ideal(cell, "shm", ideal=ideal), r.to_ideal(cell, "python", ideal=ideal))
    row("hooks per wrapped module, forward + backward, 1 rank", 5,
        *(r.hooks("hooks 1 rank", side, 8, ("own", "reshard")) for side in ("shm", "python")), unit=" us")
    for name, limit, ours, python in (("torch::optim::AdamW", 3, "torch_adamw", "adamw"),
                                      ("at::_fused_adamw_ on lists", 0.3, "fused_adamw_lists", "adamw_fused"),
                                      ("fsdp2::optim::AdamW", 0.1, "fsdp2_adamw", "adamw_fused")):
        row(f"DTensor cost per parameter, {name}", limit, r.optim("ours", ours), r.optim("python", python), unit=" us")
    peak = [list(r.train("medium memory", side, "fsdp2", "rss_peak_over_start_mb").values())
            for side in ("shm", "python")]
    row("peak memory over start, medium", 420, *peak, unit=" MiB")
    pair = "collectives 2 ranks"
    for name, key in (("all-gather", "ag"), ("reduce-scatter", "rs")):
        row(f"{name} of 1e8 bytes / memcpy", 1.0, r.comm(pair, "shm", 1e8, "ratio", f"{key}/memcpy"),
            r.comm(pair, "python", 1e8, "ratio", f"{key}/memcpy"))
    for name, key in (("all-gather", "ag"), ("reduce-scatter", "rs")):
        row(f"{name} of 1e3 bytes", 3, r.comm(pair, "shm", 1e3, "us", key), r.comm(pair, "python", 1e3, "us", key),
            unit=" us")
    for folder, limit in (("/dev/shm", 1.3), ("/var/tmp", 1.15)):
        where = "in memory" if folder == "/dev/shm" else "on disk"
        for what, most in (("save/raw_write", limit), ("load_fast/raw_read", 1.3), ("load/raw_read", 1.6)):
            label = {"save/raw_write": "save / raw write", "load_fast/raw_read": "load / raw read, unchecked",
                     "load/raw_read": "load / raw read"}[what]
            theirs = what.replace("load_fast", "load")
            row(f"DCP {label}, 2 ranks {where}", most, r.dcp_ratios(folder, 2, "ours", "time_ratio", what),
                r.dcp_ratios(folder, 2, "python", "time_ratio", theirs))
    big = lambda record: "--mb" in record["options"] and record["world"] == 2 and record["dir"] == "/dev/shm"
    small = lambda record: "--tensors" in record["options"]
    for what in ("save", "load"):
        row(f"DCP {what}: Python's time / ours, 2 ranks in memory", 1.5, r.dcp_speedup(what, keep=big), least=True)
        row(f"DCP {what}, 2,000 tensors of 8x8: Python's time / ours", 10, r.dcp_speedup(what, keep=small), least=True)
    row("DCP async save blocks / memcpy, 2 ranks in memory", 1.1,
        r.dcp_ratios("/dev/shm", 2, "ours", "time_ratio", "async_block/raw_copy"),
        r.dcp_ratios("/dev/shm", 2, "python", "time_ratio", "async_block/raw_copy"))
    return rows


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def held_to_table(r):
    rows = []
    for what, limit, ours, python, least, unit in held_to(r):
        if not ours and not python:
            continue
        kept = "-" if not ours else "yes" if (median(ours) >= limit if least else median(ours) <= limit) else "**no**"
        bound = f"at {'least' if least else 'most'} {limit if unit else number(limit)}{unit}"
        rows.append((what, bound, spread(ours, unit), kept, spread(python, unit)))
    return table(("what", "held to", "measured", "kept", "Python, same run"), rows)


def train_tables(r):
    cells = [c for c in dict.fromkeys(x["cell"] for x in r.results if x["program"] == "train") if "profile" not in c]
    rows = []
    for cell in cells:
        for side in ("python", "gloo", "shm"):
            modes = dict.fromkeys(rec["mode"] for records in r.records(cell, side).values() for rec in records)
            for mode in modes:
                numbers = {key: list(r.train(cell, side, mode, *key).values()) for key in
                           [("step_ms",), ("p10",), ("p90",)] + [("parts_ms", p) for p in
                                                                 ("forward", "backward", "clip", "optim")]}
                ideal = "local" if "local" in modes else "nocomm"
                parts = " / ".join(number(median(numbers["parts_ms", p])) for p in
                                   ("forward", "backward", "clip", "optim"))
                noise = [list(r.train(cell, side, mode, "noise", key).values()) for key in
                         ("kept", "rounds", "foreign_cpu_share")]
                quiet = f"{sum(noise[0])} of {sum(noise[1])}, {100 * max(noise[2]):.0f} %"
                rows.append((cell, SIDES[side], mode, spread(numbers["step_ms",]),
                             f"{number(median(numbers['p10',]))} to {number(median(numbers['p90',]))}",
                             spread(r.to_ideal(cell, side, mode, ideal)) if mode != ideal else "1", parts, quiet))
    return table(("cell", "side", "mode", "step, ms", "10 % to 90 %", "/ ideal",
                  "forward / backward / clip / optimizer, ms", "steps kept, others' CPU"), rows)


def profile_tables(r):
    lines = []
    for side in ("python", "shm"):
        splits = {size: r.split(f"{size} profile", side) for size in SIZES}
        names = dict.fromkeys(name for split in splits.values() for name in split)
        if not names:
            continue
        rows = []
        for name in names:
            cells = []
            for size in SIZES:
                total = sum(splits[size].values())
                value = splits[size].get(name)
                cells.append("-" if value is None else f"{number(value)} ({100 * value / total:.0f} %)")
            rows.append((name, *cells))
        lines += ["", f"{SIDES[side]}:", "", *table(("piece, ms", *SIZES), rows)]
    return lines


def memory_table(r):
    rows = []
    for side in ("python", "gloo", "shm"):
        values = [list(r.train("medium memory", side, "fsdp2", key).values()) for key in
                  ("rss_peak_over_start_mb", "pss_peak_over_start_mb", "rss_peak_init_mb", "step_ms")]
        if values[0]:
            rows.append((SIDES[side], *map(spread, values)))
    return table(("side", "peak resident over start, MiB", "sampled, shared pages divided", "while building",
                  "step, ms"), rows)


def hooks_table(r):
    rows = []
    for cell in ("hooks 1 rank", "hooks 2 ranks"):
        for side in ("python", "gloo", "shm"):
            for dim in (8, 64):
                for kind in ("own", "stub"):
                    values = [r.hooks(cell, side, dim, (kind, keep)) for keep in ("reshard", "keep")]
                    if values[0]:
                        rows.append((cell.removeprefix("hooks "), SIDES[side], dim,
                                     "local copies" if kind == "stub" else "its own", *map(spread, values)))
    return table(("ranks", "side", "width", "collectives", "reshard after forward, us", "keep, us"), rows)


def comm_table(r):
    rows = []
    for cell in ("collectives 2 ranks", "collectives 4 ranks"):
        for size in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8):
            for side in ("python", "gloo", "shm"):
                us = [r.comm(cell, side, size, "us", key) for key in
                      ("ag", "rs", "ar", "ag_bf16", "rs_bf16", "ar_bf16", "barrier", "memcpy")]
                if us[0]:
                    ratio = [r.comm(cell, side, size, "ratio", f"{key}/memcpy") for key in ("ag", "rs", "ar")]
                    rows.append((cell.removeprefix("collectives "), f"{size:.0e}".replace("e+0", "e"), SIDES[side],
                                 *(number(median(v)) for v in us), " / ".join(number(median(v)) for v in ratio)))
    return table(("ranks", "bytes", "side", "all-gather, us", "reduce-scatter", "all-reduce", "bf16: all-gather",
                  "reduce-scatter", "all-reduce", "barrier", "memcpy", "first three / memcpy"), rows)


def optim_table(r):
    rows = []
    for side in ("python", "ours"):
        found = defaultdict(lambda: defaultdict(list))
        for records in r.records("optimizers", side).values():
            for record in records:
                for key in ("plain_us", "dtensor_us", "dtensor_cost_us"):
                    found[record["optimizer"]][key].append(record[key])
        for name, values in found.items():
            rows.append((SIDES[side] if side == "ours" else "Python", name,
                         *(spread(values[key]) for key in ("plain_us", "dtensor_us", "dtensor_cost_us"))))
    return table(("side", "step", "plain, us a parameter", "DTensors", "difference"), rows)


def dcp_table(r):
    rows, after = [], []
    for record in r.dcp():
        if "metadata" in record:
            ours, python = record["metadata"]["ours"], record["metadata"]["python"]
            peak = ours["rss_peak_mb"] - ours["rss_before_mb"]
            after = ["", f"`.metadata` of {ours['keys']:,} keys: ours {ours['ms'] / 1e3:.2f} s and {peak:,.0f} MB at "
                     f"the peak, Python {python['ms'] / 1e3:.2f} s."]
            continue
        what = "2,000 of 8x8" if "--tensors" in record["options"] else f"{record['ours'][0]['mb']:,.0f} MB"
        get = lambda side, key, kind="time_ratio": spread([run[kind][key] for run in record[side]])
        pair = lambda key: f"{get('ours', key)}; {get('python', key)}"
        faster = lambda key: number(median([x["ms"][key] for x in record["python"]]) /
                                    median([x["ms"][key] for x in record["ours"]]))
        rows.append((record["dir"], record["world"], what, pair("save/raw_write"), pair("load/raw_read"),
                     get("ours", "load_fast/raw_read"), pair("async_block/raw_copy"), faster("save"), faster("load")))
    return table(("where", "ranks", "state", "save / raw write: ours; Python", "load / raw read: ours; Python",
                  "unchecked", "async blocks / memcpy: ours; Python", "save: Python / ours", "load: Python / ours"),
                 rows) + after


def losses_line(r):
    """Whether all sides of a cell trained the same: the largest relative difference of their fsdp2 losses."""
    worst = {}
    for cell in dict.fromkeys(x["cell"] for x in r.results if x["program"] == "train"):
        losses = [rec["loss"] for side in SIDES for records in r.records(cell, side).values() for rec in records
                  if rec["mode"] == "fsdp2"]
        if len(losses) > 1:
            worst[cell] = max(abs(a - b) / abs(a) for other in losses[1:] for a, b in zip(losses[0], other))
    if not worst:
        return []
    text = ", ".join(f"{cell} {value:.0e}" for cell, value in worst.items())
    return ["", f"Largest relative difference between the losses of the sides in fsdp2 mode, over all steps: {text}."]


def noise_line(r):
    records = [record for x in r.results for record in x["records"] if isinstance(record, dict) and "noise" in record]
    if not records:
        return []
    shares = [record["noise"]["foreign_cpu_share"] for record in records]
    noisy = sum(share > 0.08 for share in shares)
    return ["", f"Of {len(records)} measurements {noisy} never saw a quiet machine and took the quieter half of their "
            f"rounds; the others' share of the CPU in the rounds that count was {100 * median(shares):.1f} % in the "
            f"median and {100 * max(shares):.0f} % at most."]


def plot_data(results):
    """What plots.py draws: bars of step / ideal by size, and bandwidth over size."""
    r = Results(results)
    bars = {}
    for label, side, mode in (("Python FSDP2", "python", "fsdp2"), ("Python DDP", "python", "ddp"),
                              ("ours on Gloo", "gloo", "fsdp2"), ("ours on shm", "shm", "fsdp2")):
        values = {size: r.to_ideal(size, side, mode) for size in SIZES}
        if any(values.values()):
            bars[label] = {size: median(v) if v else None for size, v in values.items()}
    lines = defaultdict(list)
    for size in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8):
        for side in ("python", "gloo", "shm"):
            for name, key in (("all-gather", "ag"), ("reduce-scatter", "rs")):
                rate = r.comm("collectives 2 ranks", side, size, "gb_s", key)
                if rate:
                    lines[f"{SIDES[side]}: {name}"].append((size, median(rate)))
        rate = r.comm("collectives 2 ranks", "shm", size, "gb_s", "memcpy")
        if rate:
            lines["memcpy"].append((size, median(rate)))
    return {"bars": bars, "lines": lines}


def render(saved, plots):
    r = Results(saved["results"])
    out = ["# Benchmarks", "", "Written by `make bench`; [how to read it](../docs/performance.md).", ""]
    out += [f"- {key}: {value}" for key, value in saved["machine"].items()]
    out += [f"- {saved['repeats']} repeat(s) of a cell at most, Python and the library alternately, each time fresh "
            f"processes; {saved['minutes']} min{' with --quick' if saved['quick'] else ''}. "
            "A number is the median, with the least and the most over the repeats in parentheses."]
    out += noise_line(r) + losses_line(r)

    def section(title, lines, text=""):
        nonlocal out
        if len(lines) > 2:
            out += ["", f"## {title}", ""] + ([text, ""] if text else []) + lines

    section("Held to", held_to_table(r), "\"Ideal\" is the nocomm mode of the same program in the same run.")
    if "step_over_ideal.svg" in plots:
        out += ["", "![step over ideal](step_over_ideal.svg)"]
    section("Training steps", train_tables(r))
    section("Where the step goes", profile_tables(r),
            "Mean ms of a step over all steps and ranks; time inside a range without the ranges within. Collectives "
            "include waiting for the other rank.")
    section("Memory", memory_table(r), "Medium, one mode in a process, the largest rank.")
    section("Hooks", hooks_table(r), "Microseconds a wrapped Linear, forward and backward, over the plain stack.")
    section("Collectives", comm_table(r))
    if "bandwidth.svg" in plots:
        out += ["", "![bandwidth](bandwidth.svg)"]
    section("Optimizers", optim_table(r))
    section("Checkpoints", dcp_table(r))
    failed = [x for x in saved["results"] if x["error"]]
    if failed:
        out += ["", "## What failed", ""]
        out += [f"- {x['cell']}, {SIDES.get(x['side'], x['side'])}, repeat {x['repeat']}: {x['error']}" for x in failed]
    return "\n".join(out) + "\n"
