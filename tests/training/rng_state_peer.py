"""Generator states both ways: rng_state_peer.py FOLDER

Loads FOLDER/cpp, and writes to FOLDER/drawn_py.json what it draws then. Saves FOLDER/py after draws of its own, and
writes to FOLDER/next_py.json what it draws then.
"""
import json
import sys

import torch
import torch.distributed.checkpoint as dcp


def draw():
    """Floats, doubles and an odd number of normal ones, which leaves one behind in the generator."""
    return [torch.rand(3).tolist(), torch.randn(5).tolist(), torch.randn((), dtype=torch.float64).tolist(),
            torch.randperm(9).tolist()]


def main(folder):
    state = {"rng": {"cpu": torch.zeros_like(torch.get_rng_state())}}
    dcp.load(state, checkpoint_id=folder + "/cpp", no_dist=True)
    torch.set_rng_state(state["rng"]["cpu"])
    with open(folder + "/drawn_py.json", "w") as file:
        json.dump(draw(), file)

    torch.manual_seed(2**40 + 1)
    draw()
    dcp.save({"rng": {"cpu": torch.get_rng_state()}}, checkpoint_id=folder + "/py", no_dist=True)
    with open(folder + "/next_py.json", "w") as file:
        json.dump(draw(), file)


if __name__ == "__main__":
    main(sys.argv[1])
