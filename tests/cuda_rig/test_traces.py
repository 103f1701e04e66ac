"""What the tests read out of a trace of a real GPU, in the form of the simulated driver's report."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_rig.traces import traced

FIXTURES = Path(__file__).parents[1] / "fixtures" / "h100"
#: Unix time of monotonic 0, in ns: an hour before the traces were recorded.
WALL_OFFSET_NS = 1_795_736_000_000_000_000


@pytest.mark.parametrize(("name", "communicated", "streams"), [("ddp", 43, 1), ("fsdp2", 120, 2)])
def test_traced(tmp_path: Path, name: str, communicated: int, streams: int) -> None:
    """Each kernel of NCCL's was launched before it began, on a stream that runs one at a time; no other kernel is one of NCCL's."""
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()))
    report = traced(path, WALL_OFFSET_NS)
    assert len(report["nccl"]) == communicated
    by_stream: dict[int, list[dict[str, Any]]] = {kernel["comm"]: [] for kernel in report["nccl"]}
    for kernel in sorted(report["nccl"], key=lambda kernel: int(kernel["begin"])):
        assert 0 < kernel["queued"] < kernel["begin"] < kernel["end"] < 10 * 3600 * 10**9
        assert kernel["name"].startswith("ncclDevKernel")
        by_stream[kernel["comm"]].append(kernel)
    assert len(by_stream) == streams
    for kernels in by_stream.values():
        assert all(before["end"] <= after["begin"] for before, after in pairwise(kernels))
    assert not any(kernel["replayed"] for kernel in report["nccl"])
    assert len(report["computed"]) > 100
