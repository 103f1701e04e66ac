"""Closes its standard error and writes a checkpoint as ``torch.save`` does, whose file gets the number 2, amid the first operation.

reused.py WHEN TROUBLE: before or after the import of torch; ``no threads``: the process may have no further thread.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

WHEN, TROUBLE = sys.argv[1:]
#: A user without rights of root's, for whom limits count.
NOBODY = 54_321

if WHEN == "before":
    os.close(2)
    early = open("early", "wb", buffering=0)  # noqa: SIM115 - it stays open
    early.write(b"CHECKPOINT")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
if WHEN == "after":
    os.close(2)
    writer: Any = torch._C.PyTorchFileWriter("checkpoint")
    writer.write_record("first", bytes(1000), 1000)
assert Path("/proc/self/fd/2").readlink().name == ("early" if WHEN == "before" else "checkpoint")
if TROUBLE == "no threads":
    os.setresuid(NOBODY, NOBODY, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
dist.all_reduce(torch.ones(4))
if WHEN == "after":
    writer.write_record("second", bytes(1000), 1000)
    writer.write_end_of_file()
# Without this, torch sometimes ends the process with an abort while it exits.
dist.destroy_process_group()
print("job done")
