"""Runs the benchmarks of the library and their Python twins alternately and writes a report.

    make bench                                everything, under half an hour
    make bench ARGS=--quick                   less of everything, under 8 minutes
    make bench ARGS="--only train --cells small,medium --repeats 5"
    benchmarks/run_all.py --from results.json     only writes the report again

A cell is one setting. Its sides (Python, the library on Gloo, the library on shared memory) run one after another, in
reverse order every other repeat, each as fresh processes. Every cell runs once before any runs again. What fails is
listed in the report, and the rest goes on.
Results are in build/<preset>/bench/results.json, the report in benchmarks/report.md with its plots beside it.
"""
import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"

SIZES = {
    "tiny": "--dim 64 --layers 8 --heads 4 --kv-heads 2 --ffn 192 --vocab 512 --seq 32 --batch 1",
    "small": "--dim 256 --layers 6 --heads 8 --kv-heads 4 --ffn 704 --vocab 4096 --seq 128 --batch 2",
    "medium": "--dim 512 --layers 8 --heads 8 --kv-heads 4 --ffn 1408 --vocab 8192 --seq 128 --batch 2",
    "comm": "--dim 512 --layers 8 --heads 8 --kv-heads 4 --ffn 1408 --vocab 8192 --seq 16 --batch 1",
}
STEPS = {"tiny": (30, 5), "small": (15, 3), "medium": (6, 2), "comm": (6, 2)}
QUICK_STEPS = {"tiny": (15, 3), "small": (8, 2), "medium": (4, 1), "comm": (4, 1)}


@dataclass
class Cell:
    group: str  # what --only names
    name: str
    program: str  # train, overhead, comm, optim: bench_X beside peer_X.py; dcp: run_dcp.py for both
    world: int
    flags: str
    modes: dict = field(default_factory=dict)  # by side; the sides that run
    repeats: int = 3  # at most
    quick: bool = True  # also with --quick


def train(name, size, steps, modes, flags="", world=2, repeats=3, quick=True):
    count, warmup = steps[size]
    flags = f"{SIZES[size]} --steps {count} --warmup {warmup} --clip 1 {flags}"
    return Cell("train", name, "train", world, flags, modes, repeats, quick)


def all_cells(quick):
    steps = QUICK_STEPS if quick else STEPS
    three = {"python": "fsdp2,nocomm,ddp", "gloo": "fsdp2,nocomm", "shm": "fsdp2,nocomm"}
    two = {"python": "fsdp2,nocomm", "shm": "fsdp2,nocomm"}
    alone = {"python": "fsdp2", "gloo": "fsdp2", "shm": "fsdp2"}
    profile = {"python": "fsdp2", "shm": "fsdp2"}
    few = {**steps, "small": tuple(max(2, n // 2) for n in steps["small"])}
    cells = [train(size, size, steps, three) for size in SIZES]
    cells += [
        train("small mp", "small", steps, two, "--mp", repeats=2),
        train("small 4 micro-batches", "small", few, two, "--grad-accum 4", repeats=2),
        train("small 1 rank", "small", steps, {"python": "fsdp2,local", "shm": "fsdp2,local"}, world=1, repeats=2),
        train("small 4 ranks", "small", few, two, world=4, repeats=2),
        train("small fused AdamW", "small", steps, two, "--opt-impl fused", repeats=2, quick=False),
        train("small keep", "small", steps, two, "--reshard-after-forward never", repeats=1, quick=False),
        train("medium memory", "medium", steps, alone, repeats=2),
    ]
    cells += [train(f"{size} profile", size, steps, profile, "--profile", repeats=1, quick=False) for size in SIZES]
    rounds = 20 if quick else 40
    all_sides, host = {"python": "", "gloo": "", "shm": ""}, {"python": "", "shm": ""}
    cells += [
        Cell("overhead", "hooks 1 rank", "overhead", 1, f"--dims 8,64 --rounds {rounds}", host, 2),
        Cell("overhead", "hooks 2 ranks", "overhead", 2, f"--dims 8 --rounds {rounds}", all_sides, 2),
    ]
    sizes = "1e3,1e5,1e7,1e8" if quick else "1e3,1e4,1e5,1e6,1e7,1e8"
    rounds = 8 if quick else 15
    cells += [
        Cell("comm", "collectives 2 ranks", "comm", 2, f"--sizes {sizes} --rounds {rounds}", all_sides, 2),
        Cell("comm", "collectives 4 ranks", "comm", 4, "--sizes 1e3,1e5,1e7 --rounds 8", all_sides, 1, False),
        Cell("optim", "optimizers", "optim", 1, "", {"python": "", "ours": ""}, 3),
    ]
    dcp = "--mb 256 --repeats 1 --rounds 2 --worlds 2 --keys 0" if quick else "--repeats 1 --rounds 3"
    cells += [Cell("dcp", "checkpoints", "dcp", 0, dcp, {"both": ""}, 1)]
    return cells


class Runner:
    def __init__(self, args):
        self.args = args
        self.out = Path(args.build) / "bench"
        self.out.mkdir(parents=True, exist_ok=True)

    def command(self, cell, side):
        args, extra = self.args, cell.flags.split()
        if cell.program == "dcp":
            where = ["--build", args.build, "--python", args.python, "--json", str(self.out / "dcp.json")]
            return [args.python, str(HERE / "run_dcp.py"), *where, *extra]
        if cell.program == "optim":
            ours = f"{args.build}/bin/bench_optim"
            return [args.python, str(HERE / "peer_optim.py")] if side == "python" else [ours]
        extra += ["--tag", cell.name.replace(" ", "-"), "--max-wait", str(args.max_wait)]
        if cell.program == "train":
            extra += ["--mode", cell.modes[side]]
        if side == "python":
            start = [args.python, "-m", "torch.distributed.run", "--nproc-per-node", str(cell.world)]
            return [*start, str(HERE / f"peer_{cell.program}.py"), *extra]
        start = [f"{args.build}/bin/fsdp2", "run", "--nproc-per-node", str(cell.world)]
        return [*start, f"{args.build}/bin/bench_{cell.program}", *extra, "--backend", side]

    @staticmethod
    def stop(process):
        """Ends the launcher and its ranks, which ends them where it is given the time."""
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, cell, side):
        """The JSON lines that the command printed, or what went wrong."""
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        process = subprocess.Popen(self.command(cell, side), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=environment, start_new_session=True)
        try:
            limit = self.args.timeout * (4 if cell.program == "dcp" else 1)
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.stop(process)
            return [], f"took longer than {limit} s"
        except BaseException:  # this program is told to end
            self.stop(process)
            raise
        if cell.program == "dcp":
            file = self.out / "dcp.json"
            records = json.loads(file.read_text()) if process.returncode == 0 and file.exists() else []
        else:
            lines = [line[line.index("{") :] for line in output.splitlines() if "{" in line]
            records = [json.loads(line) for line in lines if line.endswith("}")]
        if process.returncode or not records:
            tail = " / ".join((output + errors).strip().splitlines()[-3:])
            return records, f"exit code {process.returncode}: {tail[-400:]}"
        return records, None

    def run_all(self, cells, saved):
        """Every cell once, then again while there is time. The file of results is kept up to date: it is what a run
        that is stopped leaves."""
        started, needed = time.monotonic(), {}
        elapsed = lambda: time.monotonic() - started
        for repeat in range(self.args.repeats):
            for cell in (cell for cell in cells if repeat < cell.repeats):
                begin = elapsed()
                over = begin + needed.get(cell.name, 0) > self.args.minutes * 60
                if over and repeat > 0:
                    continue
                sides = [side for side in cell.modes if side in self.args.sides or side in ("ours", "both")]
                for side in sides if repeat % 2 == 0 else sides[::-1]:
                    start = elapsed()
                    records, error = ([], "not run: the time was over") if over else self.run(cell, side)
                    seconds = round(elapsed() - start, 1)
                    saved["results"].append({"cell": cell.name, "group": cell.group, "program": cell.program,
                                             "side": side, "repeat": repeat, "records": records, "error": error,
                                             "seconds": seconds})
                    saved["minutes"] = round(elapsed() / 60, 1)
                    (self.out / "results.json").write_text(json.dumps(saved, indent=1) + "\n")
                    print(f"[{elapsed():5.0f} s] {cell.name}, {side}, repeat {repeat}: {seconds} s, "
                          f"{f'failed: {error}' if error else 'ok'}", file=sys.stderr, flush=True)
                needed[cell.name] = elapsed() - begin


def first_match(file, key):
    for line in Path(file).read_text().splitlines():
        if line.startswith(key):
            return line.split(":", 1)[1].strip()
    return "unknown"


def describe_machine(args):
    def output(*command):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"

    memory = int(first_match("/proc/meminfo", "MemTotal").split()[0]) / 1024**2
    return {
        "CPU": f"{first_match('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release().split("-")[0],
        "torch": output(args.python, "-c", "import torch; print(torch.__version__)"),
        "compiler": output("c++", "--version"),
        "commit": output("git", "describe", "--always", "--dirty"),
        "date": time.strftime("%Y-%m-%d"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build" / os.environ.get("PRESET", "release")))
    parser.add_argument("--python", default=sys.executable, help="its torch is the one to compare with")
    parser.add_argument("--only", default="train,overhead,comm,optim,dcp", help="groups of cells")
    parser.add_argument("--cells", default="", help="names of cells, all of --only by default")
    parser.add_argument("--sides", default="python,gloo,shm")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=0, help="of each cell at most; default 3, with --quick 1")
    parser.add_argument("--minutes", type=float, default=0, help="then nothing more is started; default 28, or 7.5")
    parser.add_argument("--max-wait", type=float, default=20, help="seconds that a process waits for a quiet machine")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one process")
    parser.add_argument("--plot-python", default="", help="a Python with matplotlib; without one there are no plots")
    parser.add_argument("--out", default=str(HERE / "report.md"))
    parser.add_argument("--from", dest="source", help="results.json of an earlier run")
    parser.add_argument("--list", action="store_true", help="print the cells")
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.quick else 3)
    args.minutes = args.minutes or (7.5 if args.quick else 28)

    names = {name.strip() for name in args.cells.split(",") if name.strip()}
    cells = [cell for cell in all_cells(args.quick)
             if cell.group in args.only.split(",") and (cell.quick or not args.quick or cell.name in names)
             and (not names or cell.name in names)]
    unknown = names - {cell.name for cell in cells}
    if unknown:
        parser.error(f"no cell {', '.join(sorted(unknown))} in --only {args.only}; see --list")
    if args.list:
        for cell in cells:
            print(f"{cell.group:9s} {cell.name:24s} {cell.world} ranks  {' '.join(cell.modes)}")
        return

    if args.source:
        saved = json.loads(Path(args.source).read_text())
    else:
        args.sides = args.sides.split(",")
        saved = {"machine": describe_machine(args), "quick": args.quick, "repeats": args.repeats, "minutes": 0,
                 "results": []}
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            Runner(args).run_all(cells, saved)
        except KeyboardInterrupt:
            print("stopped: a report of what was measured", file=sys.stderr)

    out, plots = Path(args.out), []
    if args.plot_python:
        data = json.dumps(report.plot_data(saved["results"]))
        drawn = subprocess.run([args.plot_python, str(HERE / "plots.py"), str(out.parent)], input=data, text=True,
                               capture_output=True)
        plots = drawn.stdout.split() if drawn.returncode == 0 else []
        if drawn.returncode:
            print(f"no plots: {drawn.stderr.strip()[-300:]}", file=sys.stderr)
    out.write_text(report.render(saved, plots))
    print(f"wrote {os.path.relpath(out)}", file=sys.stderr)


if __name__ == "__main__":
    main()
