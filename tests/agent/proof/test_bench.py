"""The parts of ``commwatch bench`` that need no job: sizes, tables, what came back, and what launchers say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.proof.bench import DEFAULT, SWEPT, CannotBench, Outcome, Point, _read, keep, wanted
from commwatch_agent.proof.bench_tables import Growing, compared, curves, note, table
from commwatch_agent.reference.references import Measured, load

sweep: Any = importlib.import_module("commwatch.probe.torch_sweep")


def sizes(low: str, high: str, factor: float) -> list[int]:
    """The sizes that these flags ask for."""
    return list(wanted(None, None, low, high, factor=factor, seconds=1.0).sizes)


def test_sizes() -> None:
    """Sizes go from the smallest by the factor to the largest, whole elements of four bytes, none twice."""
    assert sizes("1K", "64M", 4) == [1024 * 4**k for k in range(9)]
    assert sizes("4", "4", 2) == [4]
    assert sizes("5", "6KiB", 10) == [4, 48, 500, 5000]
    assert sizes("100", "150", 1.1) == [100, 108, 120, 132, 144]
    with pytest.raises(CannotBench, match=r"--factor 1.2: gives 140 sizes, at most 64; choose a larger factor"):
        sizes("4", "999G", 1.2)


def test_defaults() -> None:
    """Without --ops the operations that training uses are swept, and the script knows every operation that can be named."""
    assert wanted(None, None, "1K", "1M", factor=4, seconds=20).ops == DEFAULT
    chosen = wanted("gloo, nccl,gloo", "reduce,gather", "1K", "1M", factor=4, seconds=20)
    assert (chosen.backends, chosen.ops) == (("gloo", "nccl"), ("reduce", "gather"))
    assert set(SWEPT) == set(sweep.OPERATIONS)


# -- tables -------------------------------------------------------------------------------------


def reference(backend: str, points: dict[str, dict[int, float]]) -> Measured:
    """A reference among four ranks."""
    return Measured("bench", backend, backend, 4, ("node1",), 0.0, points, "torchrun")


def test_table() -> None:
    """A line says size, count, time in µs and both bandwidths in GB/s, worked by hand: 8 MB in 1 ms are 8 GB/s, among four 12."""
    lines = table(
        reference("gloo", {"all_reduce": {8_000_000: 1e-3}, "broadcast": {4096: 1.0}, "all_gather": {4096: 1e-3}})
    ).splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert rows == [
        ["8000000", "2000000", "float", "sum", "-1", "1000.00", "8.0000", "12.00"],
        ["4096", "1024", "float", "none", "0", "1000000.00", "0.0000", "0.0000"],
        ["4096", "256", "float", "none", "-1", "1000.00", "0.0041", "0.0031"],
    ]
    assert lines[-1] == "# all_gather: too few sizes for a curve"


def test_rows_one_by_one() -> None:
    """A sweep's rows, printed one by one, are those of the table of its reference, with the same heads; other lines print nothing."""
    points = {"all_reduce": {1024: 1e-4, 4096: 2e-4}, "gather": {1024: 1e-3}}
    growing = Growing()
    printed = growing.lines({"ranks": 4, "hosts": ["node1"], "torch": "2.13.0"})
    for op, times in points.items():
        for size, time_s in times.items():
            printed += growing.lines({"backend": "gloo", "op": op, "size": size, "time_s": time_s, "timed": 5})
    printed += growing.lines({"left_out": "nccl", "op": None, "why": "no cuda device"}) + growing.lines({"done": True})
    rest = [*curves(reference("gloo", points))]
    assert "\n".join([*printed, *rest]) == table(reference("gloo", points))


def test_notes_fit() -> None:
    """Remarks are wrapped at 80 cells."""
    lines = note("gloo, 16 ranks on " + ", ".join(f"node{n:03}" for n in range(16)))
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80


def test_backends_side_by_side() -> None:
    """Each operation and size has the busbw of each backend that did it, and the fastest with how many times."""
    slow = reference("gloo", {"all_reduce": {8_000_000: 2e-3}, "gather": {4000: 1e-3}})
    fast = reference("nccl", {"all_reduce": {8_000_000: 1e-3}})
    rows = [line.split() for line in compared([slow, fast]).splitlines() if not line.startswith("#")]
    assert rows == [
        ["all_reduce", "8000000", "6.0000", "12.00", "nccl", "(2.0x)"],
        ["gather", "4000", "0.0030", "–", "gloo"],
    ]


# -- what came back -------------------------------------------------------------------------------


HEAD = {"ranks": 2, "hosts": ["node1"], "torch": "2.13.0"}
POINT = {"backend": "gloo", "op": "all_reduce", "size": 1024, "time_s": 1e-4, "timed": 5}


def test_a_fall_at_the_end_is_none(tmp_path: Path) -> None:
    """With all results written, the job's exit code does not matter (torch 2.13 aborts at times while it leaves); without, it does."""
    results = tmp_path / "results"
    results.write_text("\n".join(map(json.dumps, (HEAD, POINT, {"done": True}))))
    assert _read(results, 134, ["x"]).outcomes == [Outcome("gloo", 2, ("node1",), [Point("all_reduce", 1024, 1e-4, 5)])]
    results.write_text("\n".join(map(json.dumps, (HEAD, POINT))))
    with pytest.raises(CannotBench, match="exit code 134") as caught:
        _read(results, 134, ["x"])
    assert caught.value.exit_code == 134


def test_kept_as_measured(tmp_path: Path) -> None:
    """A reference holds the points of its sweep, and where they come from."""
    path, kept = keep(Outcome("gloo", 2, ("a", "b"), [Point("reduce", 8, 0.5, 1)]), tmp_path, ["srun", "python"])
    assert load(path) == kept
    assert (kept.points, kept.source, kept.hosts) == ({"reduce": {8: 0.5}}, "srun python", ("a", "b"))
    assert "2 ranks on 2 hosts" in kept.name


# -- launchers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ("1", "2", "h", "1")),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "gpu[07-09,12]"}, ("3", "8", "gpu07", "5")),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a1,b[1-2]"}, ("3", "8", "a1", "5")),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ("0", "2", "127.0.0.1", "5"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "h"}, ("0", "2", "h", "5")),
        # What torchrun says wins over the Slurm job it runs in.
        (
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "MASTER_ADDR": "h"},
            ("1", "2", "h", "5"),
        ),
    ],
)
def test_launchers(env: dict[str, str], expected: tuple[str, ...]) -> None:
    """Rank, number of ranks, and where rank 0 listens are found in the variables of torchrun, Slurm, Open MPI and MPICH."""
    found = sweep.environment(env, 5)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]) == expected


@pytest.mark.parametrize(
    ("env", "named"),
    [({}, "RANK"), ({"RANK": "0"}, "WORLD_SIZE"), ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MASTER_ADDR")],
)
def test_no_launcher(env: dict[str, str], named: str) -> None:
    """A variable that no launcher has set is named."""
    with pytest.raises(sweep.CannotSweep, match=named):
        sweep.environment(env, 5)


@pytest.mark.parametrize(
    ("seconds", "once", "timed"), [(1.0, 0.01, 100), (1.0, 0.5, 2), (0.01, 1.0, 1), (10.0, 1e-6, 5000), (1.0, 0.3, 3)]
)
def test_iterations(seconds: float, once: float, timed: int) -> None:
    """As many operations are timed as fit in the time that a point has, at least one, at most 1,000 in each of five rounds."""

    class Clock:
        def time(self, launch: Callable[[], object], iterations: int) -> float:
            return once

    assert sweep.measure(Clock(), lambda: None, seconds) == (once, timed)
