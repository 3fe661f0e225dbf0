"""The end of a rank of a peer."""
import os
import sys

import torch.distributed as dist


def leave():
    """When all ranks are done, ends this one past Gloo's teardown, which aborts now and then while its threads run."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
