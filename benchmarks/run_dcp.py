"""Times checkpoints of the library and of Python, alternately in one run, and prints ratios.

    benchmarks/run_dcp.py [--mb 1024] [--repeats 3] [--rounds 3] [--worlds 1,2,4] [--dirs /dev/shm,/var/tmp] [--json F]

Ratios of a library's own run are to raw file input and output of the same bytes in the same round; "Python / ours" is
the time of Python's save or load over ours. Numbers are medians over rounds, then over repeats.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent


def last_json(command):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def median_of(results, *path):
    values = []
    for result in results:
        for key in path:
            result = result[key]
        values.append(result)
    return statistics.median(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(root / "build" / os.environ.get("PRESET", "release")))
    parser.add_argument("--python", default=sys.executable, help="its torch is the one to compare with")
    parser.add_argument("--mb", type=float, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--dirs", default="/dev/shm,/var/tmp")
    parser.add_argument("--keys", type=int, default=1000000, help="of the metadata that are read; 0: none")
    parser.add_argument("--json", help="also write everything here")
    args = parser.parse_args()

    fsdp2, bench = f"{args.build}/bin/fsdp2", f"{args.build}/bin/bench_dcp"
    peer = str(root / "benchmarks" / "peer_dcp.py")
    everything = []

    def compare(folder, world, extra):
        ours, theirs = [], []
        commands = [
            (ours, [fsdp2, "run", "--nproc-per-node", str(world), bench]),
            (theirs, [args.python, "-m", "torch.distributed.run", "--nproc-per-node", str(world), peer]),
        ]
        for repeat in range(args.repeats):
            for results, command in commands if repeat % 2 == 0 else reversed(commands):
                place = f"{folder}/fsdp2_bench_dcp"
                results.append(last_json(command + extra + ["--dir", place, "--rounds", str(args.rounds)]))
                shutil.rmtree(place, ignore_errors=True)
        everything.append({"dir": folder, "world": world, "options": extra, "ours": ours, "python": theirs})
        return ours, theirs

    print("| where | ranks | save / raw | load / raw | load / raw, unchecked | async block / memcpy |"
          " Python's the same | save: Python / ours | load: Python / ours |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for folder in args.dirs.split(","):
        for world in map(int, args.worlds.split(",")):
            ours, theirs = compare(folder, world, ["--mb", str(args.mb)])
            ratio = lambda results, key: f"{median_of(results, 'time_ratio', key):.2f}"
            times = lambda what: f"{median_of(theirs, 'ms', what) / median_of(ours, 'ms', what):.2f}"
            python = ", ".join(ratio(theirs, k) for k in ("save/raw_write", "load/raw_read", "async_block/raw_copy"))
            print(f"| {folder} | {world} | {ratio(ours, 'save/raw_write')} | {ratio(ours, 'load/raw_read')} |"
                  f" {ratio(ours, 'load_fast/raw_read')} | {ratio(ours, 'async_block/raw_copy')} | {python} |"
                  f" {times('save')} | {times('load')} |", flush=True)

    print("\n| 2,000 tensors of 8x8, 2 ranks | ours, ms | Python, ms | Python / ours |\n|---|---:|---:|---:|")
    ours, theirs = compare(args.dirs.split(",")[0], 2, ["--tensors", "2000"])
    for what in ("save", "load", "async_block"):
        a, b = median_of(ours, "ms", what), median_of(theirs, "ms", what)
        print(f"| {what} | {a:.1f} | {b:.0f} | {b / a:.1f} |", flush=True)

    if args.keys:
        place = f"{args.dirs.split(',')[0]}/fsdp2_bench_metadata"
        python = last_json([args.python, peer, "--make-metadata", str(args.keys), "--dir", place])
        ours = last_json([bench, "--metadata", place])
        shutil.rmtree(place, ignore_errors=True)
        everything.append({"metadata": {"ours": ours, "python": python}})
        print(f"\n.metadata of {args.keys} keys, {python['bytes'] / 1e6:.0f} MB: ours {ours['ms'] / 1e3:.2f} s and "
              f"{ours['rss_peak_mb'] - ours['rss_before_mb']:.0f} MB at the peak, Python {python['ms'] / 1e3:.2f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n")


main()
