"""Overlap out of public traces of GPU jobs, against a plain sweep and HolisticTraceAnalysis; run by ``make test-traces``.

``hta_figures.py`` says where the traces are from, and how HTA's figures were made.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.sources import trace_files
from commwatch_agent.sources.trace_overlap import overlap
from tests.agent.sources.hta_figures import FIGURES, digest
from tests.agent.sources.kernel_sweep import Kernel, kernels, sweep

PROVEN = json.loads(FIGURES.read_text(encoding="utf-8"))["traces"]
pytestmark = [pytest.mark.public_traces, pytest.mark.parametrize("name", PROVEN)]


@dataclass(frozen=True)
class Trace:
    """A public trace, and its kernels as the sweep reads them."""

    path: Path
    content: dict[str, Any]
    kernels: list[Kernel]

    @property
    def base(self) -> int:
        """Unix time of the trace's zero, in ns."""
        return int(self.content.get("baseTimeNanoseconds", 0))

    @property
    def extent(self) -> tuple[int, int]:
        """From the first kernel's start until the last one's end."""
        return min(kernel.start for kernel in self.kernels), max(kernel.end for kernel in self.kernels)


@cache
def read(name: str) -> Trace:
    """Read a trace; fail if it is not the one that HTA measured."""
    assert "TRACES" in os.environ, "TRACES must be the folder tests/data of a clone of HolisticTraceAnalysis"
    path = Path(os.environ["TRACES"]).resolve() / name
    assert digest(path) == PROVEN[name]["sha256"]
    text = gzip.decompress(path.read_bytes()).decode(errors="replace")
    return Trace(path, json.loads(text), kernels(text))


def ns(comm_s: float, exposed_s: float) -> tuple[int, int]:
    """Seconds as ns."""
    return round(comm_s * 1e9), round(exposed_s * 1e9)


def hidden_percent(trace: dict[str, Any], from_ns: int, until_ns: int) -> float:
    """The percentage of the time of communication in which a compute kernel runs, which HTA calls overlap."""
    found = overlap(trace, from_ns, until_ns)
    assert found.comm_s is not None
    assert found.exposed_s is not None
    return 100 * (1 - found.exposed_s / found.comm_s)


def steps(trace: Trace) -> list[dict[str, Any]]:
    """The profiler's marks of steps on the CPU, in order."""
    marks = [event for event in trace.content["traceEvents"] if str(event.get("name")).startswith("ProfilerStep")]
    found = [event for event in marks if event["cat"] != "gpu_user_annotation"]
    return sorted(found, key=lambda event: float(event["ts"]))


def without_last_step(trace: Trace) -> dict[str, Any]:
    """The trace without the kernels that were launched in its last step, which HTA leaves out."""
    last = steps(trace)[-1]["ts"]
    events = [event for event in trace.content["traceEvents"] if event.get("ph") == "X"]

    calls = [event.get("args", {}) for event in events if event["ts"] < last]
    early = {call["correlation"] for call in calls if "correlation" in call and "stream" not in call}
    kept = [event for event in events if event.get("cat") == "kernel" and event["args"]["correlation"] in early]
    return {**trace.content, "traceEvents": kept}


def test_sweep(name: str) -> None:
    """The process that reads a trace finds exactly the communication and exposed communication that a plain sweep finds."""
    trace = read(name)
    begin, end = trace.extent
    answer = trace_files.overlap(trace.path, trace.base + begin, trace.base + end, 60)
    assert answer.get("error") is None
    assert answer["source"] == "kernels"
    expected = sweep(trace.kernels, begin, end)
    assert expected[0] > 0
    assert ns(answer["comm_s"], answer["exposed_s"]) == expected


def test_steps(name: str) -> None:
    """Within each step of the profiler, whose edges cut kernels, it is exactly what a plain sweep finds there."""
    trace = read(name)
    marks = steps(trace)
    assert len(marks) >= 2
    for mark in marks:
        begin = round(mark["ts"] * 1000)
        end = begin + round(mark["dur"] * 1000)
        found = overlap(trace.content, trace.base + begin, trace.base + end)
        assert found.comm_s is not None
        assert found.exposed_s is not None
        assert ns(found.comm_s, found.exposed_s) == sweep(trace.kernels, begin, end)


def test_hta(name: str) -> None:
    """The overlap of all kernels is HTA's, to the two decimals that HTA gives; with HTA's whole µs, within two points."""
    trace = read(name)
    begin, end = trace.extent
    ours = hidden_percent(trace.content, trace.base + begin, trace.base + end)
    assert ours == pytest.approx(PROVEN[name]["all_kernels_ns"], abs=0.0051)
    assert ours == pytest.approx(PROVEN[name]["all_kernels"], abs=2)


def test_hta_default(name: str) -> None:
    """Without the kernels of the last step, which HTA leaves out by default, the overlap is within two points of HTA's."""
    trace = read(name)
    begin, end = trace.extent
    ours = hidden_percent(without_last_step(trace), trace.base + begin, trace.base + end)
    assert ours == pytest.approx(PROVEN[name]["default"], abs=2)
