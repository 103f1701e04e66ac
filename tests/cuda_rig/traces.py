"""What a real GPU did, from a trace of PyTorch's profiler, in the form of the played driver's report."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any


def traced(path: Path, wall_offset_ns: int) -> dict[str, Any]:
    """Return NCCL's kernels, with when they were launched, began and ended, and begin and end of all other kernels.

    Args:
        path: a trace in Chrome's format.
        wall_offset_ns: ns of Unix time at CLOCK_MONOTONIC's zero; times of a trace are Unix times, those of a report are not.
    """
    trace = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    zero = int(trace.get("baseTimeNanoseconds", 0)) - wall_offset_ns
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }

    def ns(at: Decimal | int) -> int:
        return zero + int(at * 1000)

    nccl: list[dict[str, Any]] = []
    computed: list[tuple[int, int]] = []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        begin, end = ns(event["ts"]), ns(event["ts"] + event["dur"])
        launch = launches.get(event["args"]["correlation"])
        if not event["name"].startswith("nccl"):
            computed.append((begin, end))
        elif launch is not None:
            replayed = "GraphLaunch" in launch["name"]
            stream = event["args"]["stream"]
            kernel = {"name": event["name"], "comm": stream, "queued": ns(launch["ts"]), "replayed": replayed}
            nccl.append({**kernel, "begin": begin, "end": end})
    return {"nccl": nccl, "computed": computed}
