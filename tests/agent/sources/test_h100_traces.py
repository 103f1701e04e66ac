"""Overlap out of traces that were recorded on an H100 (``tests/fixtures/h100``), against a plain sweep."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from commwatch_agent.sources.trace_overlap import overlap
from tests.agent.sources.kernel_sweep import kernels, sweep

FIXTURES = Path(__file__).parents[2] / "fixtures" / "h100"


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_sweep(name: str, parts: int) -> None:
    """Communication and its exposed part, over all and over parts whose edges cut kernels, are exactly what a plain sweep finds."""
    text = gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()).decode()
    content, ran = json.loads(text), sorted(kernels(text))
    base, last = int(content["baseTimeNanoseconds"]), max(kernel.end for kernel in ran)
    within = [ran[len(ran) * part // parts] for part in range(1, parts)]
    edges = [ran[0].start, *((kernel.start + kernel.end) // 2 for kernel in within), last]
    for begin, end in pairwise(edges):
        found = overlap(content, base + begin, base + end)
        assert found.comm_s is not None
        assert found.exposed_s is not None
        assert (round(found.comm_s * 1e9), round(found.exposed_s * 1e9)) == sweep(ran, begin, end)
    communicated, exposed = sweep(ran, ran[0].start, last)
    assert 0 < exposed < communicated
