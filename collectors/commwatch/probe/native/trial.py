"""Test a library that was just built, in a process of its own, so that a faulty hook does not crash a training.

``python -m commwatch.probe.native.trial LIBRARY KEY``, with ``COMMWATCH_DIR`` set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commwatch.probe.native.library import Library
from commwatch.probe.torch_native import NativeProbe
from commwatch.wire.events import OP_CODE, RECORD, Record
from commwatch.wire.ring_reader import RingReader

CALLS = 5


def main(path: str, key: str) -> None:
    """Record a few collectives of the fake backend, and check the records."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    probe = NativeProbe(
        {"COMMWATCH_DIR": os.environ["COMMWATCH_DIR"], "COMMWATCH_JOB": "trial"}, Library(Path(path), key)
    )
    probe.install()
    tensor = torch.ones(16)
    for _ in range(CALLS):
        dist.all_reduce(tensor)
    assert probe.ring is not None, "no ring was made"
    reader = RingReader(probe.ring.path)
    probe.uninstall()
    records = [Record._make(fields) for fields in RECORD.iter_unpack(reader.drain(final=True).records)]
    seen = [(record.op, record.seq, record.size_bytes) for record in records]
    assert seen == [(OP_CODE["all_reduce"], n, 64) for n in range(CALLS)], f"recorded {records}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
