"""What Python and the system say of this machine, and `fsdp2 doctor` on a terminal.

doctor_peer.py facts            prints JSON
doctor_peer.py terminal WORD... runs the words with stderr on a pseudo terminal, prints what it got there
"""

import json
import os
import resource
import socket
import subprocess
import sys


def facts():
    import torch
    import torch.distributed as dist

    shm = os.statvfs("/dev/shm")
    memory = dict(line.split(":") for line in open("/proc/meminfo"))
    try:
        addresses = sorted({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        addresses = []
    return {
        "version": torch.__version__.split("+")[0],
        "cuda": torch.version.cuda,
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "library_folder": os.path.realpath(os.path.join(os.path.dirname(torch.__file__), "lib")),
        "gpus": torch.cuda.device_count(),
        "cores_online": os.cpu_count(),
        "cores_affinity": len(os.sched_getaffinity(0)),
        "memory_total": int(memory["MemTotal"].split()[0]) * 1024,
        "dev_shm_total": shm.f_blocks * shm.f_frsize,
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "processes": list(resource.getrlimit(resource.RLIMIT_NPROC)),
        "locked_memory": list(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        "host_name": socket.gethostname(),
        "host_addresses": addresses,
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
    }


def terminal(words):
    ours, theirs = os.openpty()
    program = subprocess.Popen(words, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        sys.stdout.buffer.write(part)
    return program.wait()


if sys.argv[1] == "facts":
    print(json.dumps(facts()))
else:
    sys.exit(terminal(sys.argv[2:]))
