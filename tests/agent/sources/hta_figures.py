"""Measures the overlap of public traces with HolisticTraceAnalysis (HTA), and records it in ``hta_figures.json``.

The traces are test data of HTA itself: real training jobs with NCCL, of 2 to 128 ranks. HTA and its data have the MIT licence,
"Copyright (c) Meta Platforms, Inc. and affiliates". We keep no copy of them: ``TRACES`` is the folder ``tests/data`` of a clone of
https://github.com/facebookresearch/HolisticTraceAnalysis at ``COMMIT``, and ``hta_figures.json`` has the digest of each file.

HTA needs pandas, plotly and Jupyter (500 MB), so it has an environment of its own::

    python3 -m venv .venv-hta && .venv-hta/bin/pip install HolisticTraceAnalysis==0.5.0 pandas==3.1.1
    TRACES=DIR .venv-hta/bin/python -m tests.agent.sources.hta_figures

Each figure is HTA's ``get_comm_comp_overlap``: the percentage of the time of communication in which a compute kernel runs.

- ``default``: as HTA is called. It leaves out kernels that were launched in the last step, and rounds times to whole µs.
- ``all_kernels``: of all kernels of the trace.
- ``all_kernels_ns``: of all kernels, without rounding (``HTA_DISABLE_NS_ROUNDING=1``). This is what commwatch measures.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path

FIGURES = Path(__file__).with_name("hta_figures.json")
#: The commit of HTA's repository that has the traces.
COMMIT = "f4d0062c382f42bd8a74838bcdad1916c7d5d2da"
#: All traces of that commit that have NCCL's kernels, up to 3 MB.
TRACES = (
    "df_index_resolver/df_index_resolver.json.gz",
    "nccl_parser_config/nccl_data.json.gz",
    "negative_queue_length_values_check/rank0.json.gz",
    "trace_diff/control/control.json.gz",
    "trace_diff/test/test.json.gz",
    "trace_filter/sampled_rank-0.json.gz",
    "trace_filter/sampled_rank-1.json.gz",
)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _default(path: Path) -> float:
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    found = TraceAnalysis(trace_files={0: str(path)}).get_comm_comp_overlap(visualize=False)
    return float(found["comp_comm_overlap_pctg"].iloc[0])


def _all_kernels(path: Path) -> float:
    from hta.analyzers.communication_analysis import CommunicationAnalysis  # type: ignore[import-not-found]
    from hta.common.trace import Trace  # type: ignore[import-not-found]

    trace = Trace(trace_files={0: str(path)})
    trace.parse_traces(use_multiprocessing=False)
    found = CommunicationAnalysis.get_comm_comp_overlap(trace, visualize=False)
    return float(found["comp_comm_overlap_pctg"].iloc[0])


def _figures(path: Path) -> dict[str, str | float]:
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "0"
    rounded = {"default": _default(path), "all_kernels": _all_kernels(path)}
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    return {"sha256": digest(path), **rounded, "all_kernels_ns": _all_kernels(path)}


def main() -> None:
    """Write the figures of all traces."""
    folder = Path(os.environ["TRACES"]).resolve()
    packages = {name: version(name) for name in ("HolisticTraceAnalysis", "pandas", "numpy")}
    traces = {name: _figures(folder / name) for name in TRACES}
    FIGURES.write_text(json.dumps({"commit": COMMIT, "packages": packages, "traces": traces}, indent=2) + "\n")


if __name__ == "__main__":
    main()
