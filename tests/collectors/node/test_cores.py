"""Cores that a process may use, and its threads that compute, from files of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commwatch_collectors.node.cores import Cores, cores


def _process(proc: Path, threads: dict[int, str], status: str = "0-3,8", cgroup: str = "", environ: str = "") -> None:
    """The files of process 7."""
    for task, times in threads.items():
        (proc / f"7/task/{task}").mkdir(parents=True)
        (proc / f"7/task/{task}/schedstat").write_text(times)
    (proc / "7/status").write_text(
        f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{status}\nMems_allowed:\t1\n"
    )
    (proc / "7/cgroup").write_text(cgroup)
    (proc / "7/environ").write_text(environ)


@pytest.mark.parametrize(
    ("cgroup", "files", "usable"),
    [
        ("", {}, 5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, 5),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 5),
        ("0::/a\n", {"a/cpu.max": "900000 100000"}, 5),
        ("0::/a\n", {"a/cpu.max": "100 0"}, 5),
    ],
)
def test_usable_cores(tmp_path: Path, cgroup: str, files: dict[str, str], usable: float) -> None:
    """The least of its affinity and the CPU quotas of its cgroup and of those around it counts."""
    _process(tmp_path / "proc", {7: "100 0 1"}, cgroup=cgroup)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores(7, tmp_path / "proc", tmp_path).usable == usable


def test_threads_that_compute(tmp_path: Path) -> None:
    """Threads that ran or were ready for a tenth of the time of the busiest count; those that only wait do not."""
    _process(
        tmp_path,
        {7: "900 100 5", 8: "0 100 1", 9: "99 0 9", 10: "500 500 2", 11: "odd"},
        environ="A=1\0OMP_NUM_THREADS=6\0",
    )
    assert cores(7, tmp_path, tmp_path) == Cores(5, 3, 6)


@pytest.mark.parametrize(
    ("environ", "threads"), [("", None), ("OMP_NUM_THREADS=4,2\0", None), ("X_OMP_NUM_THREADS=3\0", None)]
)
def test_unknown(tmp_path: Path, environ: str, threads: int | None) -> None:
    """What cannot be read, or is of another form, is not known."""
    _process(tmp_path, {7: "0 0 0"}, status="?", environ=environ)
    assert cores(7, tmp_path, tmp_path) == Cores(None, None, threads)
    assert cores(8, tmp_path, tmp_path) == Cores(None, None, None)


def test_this_process() -> None:
    """Of this process, at least one core and one thread are found."""
    found = cores(os.getpid())
    assert found.usable is not None
    assert 0 < found.usable <= (os.cpu_count() or 1)
    assert found.threads is not None
    assert found.threads >= 1
