"""The frame of a peer's rank, started by torchrun."""
import json
import os
import sys

import torch
import torch.distributed as dist


def run_cases(run, prepare):
    """`script CASES.json OUT.json`: prepare(), then rank 0 writes run(case) of every case, by name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prepare()
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    results = {name: run(case) for name, case in cases.items()}
    if dist.get_rank() == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(results, file)
    leave()


def leave():
    """When all ranks are done, ends this one past Gloo's teardown, which aborts now and then while its threads run."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
