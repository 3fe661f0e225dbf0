"""What the peer_*.py programs share: statistics, this process's time and memory, and quiet.h in Python.

Weights, tokens and the model are those of tests/peer/llama_peer.py, the twin of examples/llama.
"""
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "peer"))
from peer_rank import leave  # noqa: E402,F401


def quantile(values, q):
    values = sorted(values)
    if not values:
        return float("nan")
    position = q * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def median(values):
    return quantile(values, 0.5)


def rounded(value, digits=4):
    """The same with every float, also inside, rounded to that many significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def print_line(record):
    print(json.dumps(record), flush=True)


def gather(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def mib_of(file, key):
    with open(file) as lines:
        for line in lines:
            if line.startswith(key + ":"):
                return int(line.split()[1]) / 1024
    raise KeyError(f"{file} has no line {key}")


def resident():
    return mib_of("/proc/self/status", "VmRSS")


def peak_resident():
    return mib_of("/proc/self/status", "VmHWM")


def forget_peak_resident():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def proportional_memory():
    return mib_of("/proc/self/smaps_rollup", "Pss")


def own_cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_busy_seconds():
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def join(pin):
    """One thread, a Gloo group over the ranks, and where asked one core."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    dist.init_process_group("gloo")


class Quiet:
    """Runs rounds in blocks, keeps those during which others used little of the machine. Collective. See quiet.h."""

    def __init__(self, wanted, limit=0.08, block_seconds=0.5, max_factor=3, wait_seconds=90.0):
        self.wanted, self.limit, self.block_seconds = wanted, limit, block_seconds
        self.most, self.wait_seconds = max_factor * wanted, wait_seconds
        self.noise = {}

    def wait_until_quiet(self):
        calm = 0
        while dist.get_rank() == 0 and calm < 2 and self.wait_seconds > 0:
            busy, start = machine_busy_seconds(), time.perf_counter()
            time.sleep(0.5)
            elapsed = time.perf_counter() - start
            self.wait_seconds -= elapsed
            share = (machine_busy_seconds() - busy) / elapsed / os.cpu_count()
            calm = calm + 1 if share < self.limit else 0
        dist.barrier()

    @staticmethod
    def of_rank_0(value):
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def run(self, one_round):
        """Calls one_round(number) and returns the numbers of the rounds to keep."""
        blocks, done, good = [], 0, 0
        self.wait_until_quiet()
        while good < self.wanted and done < self.most:
            begin, start, busy, own = done, time.perf_counter(), machine_busy_seconds(), own_cpu_seconds()
            over = False
            while not over:
                one_round(done)
                done += 1
                over = self.of_rank_0(time.perf_counter() - start >= self.block_seconds or done >= self.most)
            ours = sum(gather(own_cpu_seconds() - own))
            foreign = (machine_busy_seconds() - busy - ours) / (time.perf_counter() - start) / os.cpu_count()
            foreign = self.of_rank_0(max(0.0, foreign))
            blocks.append((begin, done, foreign))
            if foreign < self.limit:
                good += done - begin
            elif done < self.most:
                self.wait_until_quiet()
        kept = [block for block in blocks if block[2] <= self.limit]
        if sum(end - begin for begin, end, _ in kept) < max(3, self.wanted // 4):
            limit = median([foreign for _, _, foreign in blocks]) + 1e-9
            kept = [block for block in blocks if block[2] <= limit]
        rounds = [i for begin, end, _ in kept for i in range(begin, end)]
        share = sum(foreign for _, _, foreign in kept) / len(kept)
        self.noise = {"kept": len(rounds), "rounds": done, "foreign_cpu_share": round(share, 3)}
        return rounds
