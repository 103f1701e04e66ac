"""The GPU's clock on the host: the smallest delay of the last one to two seconds counts, in whatever order reports come."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from commwatch import nccl_plugin

S, DELAY = 10**9, 5_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of the header."""
    directory = tmp_path_factory.mktemp("clock")
    code = directory / "clock.c"
    code.write_text(
        '#include "gpu_clock.h"\n'
        "static struct gpu_clock clock;\n"
        "void report(int64_t gpu_ns, int64_t host_ns) { gpu_clock_report(&clock, gpu_ns, host_ns); }\n"
        "int64_t host(int64_t gpu_ns) { return gpu_clock_host(&clock, gpu_ns); }\n"
    )
    sources = Path(nccl_plugin.__file__).parent
    made = directory / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", f"-I{sources}", str(code), "-o", str(made)], check=True, timeout=60)
    found = ctypes.CDLL(str(made))
    found.report.argtypes = [ctypes.c_int64] * 2
    found.host.argtypes, found.host.restype = [ctypes.c_int64], ctypes.c_int64
    return found


def test_reports_out_of_order(library: ctypes.CDLL) -> None:
    """A report of the second before that comes late neither replaces the smaller delays of this one, nor those of its own."""
    base = 100 * S
    library.report(base + 900_000_000, base + 900_000_000 + DELAY)
    library.report(base + S + 1, base + S + 1 + 2 * DELAY)
    library.report(base + 990_000_000, base + 990_000_000 + 160 * DELAY)
    assert library.host(base + S + 2) == base + S + 2 + DELAY


def test_old_delays_are_forgotten(library: ctypes.CDLL) -> None:
    """After two seconds, a smaller delay no longer counts; nor does one by a clock that was set."""
    base = 200 * S
    library.report(base, base + DELAY)
    for second in (1, 2):
        library.report(base + second * S, base + second * S + 3 * DELAY)
    assert library.host(base + 2 * S) == base + 2 * S + 3 * DELAY
    library.report(10 * S, base)
    assert library.host(10 * S) == base
