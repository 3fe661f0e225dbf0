"""A Python rank as torchrun would start it: joins the launcher's store and adds one number up."""
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"{sys.argv[1]}: sum {total.item()}")
dist.barrier()
dist.destroy_process_group()
