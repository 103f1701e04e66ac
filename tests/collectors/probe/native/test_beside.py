"""No job waits for a compiler: the native hook is built beside a job, for the jobs after it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from commwatch.probe.native import beside, build, library
from commwatch.probe.native.library import NotAvailable
from commwatch.wire.identity import make_private_dir
from tests.collectors.probe.native.test_build import FAILS, WORKS, Cache
from tests.helpers import wait_for

MB = 1 << 20
#: Waits until it may compile, and notes its priority and how early it would be killed for memory.
WHEN_ASKED = """case "$*" in *hook.cpp*) read go < {diary}.go
(read line < /proc/$$/stat; read adjusted < /proc/$$/oom_score_adj; set -- $line; echo "${{19}} $adjusted" > {diary}.notes);; esac
"""


@pytest.fixture
def cache(tmp_path: Path, native: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """An empty cache, and a builder that comes to its turn on a busy machine."""
    monkeypatch.setattr(beside, "NICE", 1)
    return Cache(tmp_path, native)


def found(env: Mapping[str, str]) -> Path | None:
    """The hook that a trainer would load."""
    try:
        return library.find(env, library.torch_facts())[0]
    except NotAvailable:
        return None


def test_built_beside(cache: Cache) -> None:
    """The first job gets its answer while nothing is compiled yet, later ones get the hook; the builder gives way to every other process."""
    script = WHEN_ASKED + WORKS
    env = cache.env(script=script)
    os.mkfifo(f"{cache.diary}.go")
    code, out, err = cache.call("later", script=script)
    assert (code, out) == (1, "")
    assert err.startswith("commwatch: this job has the Python hook; the native one, ")
    assert found(env) is None
    Path(f"{cache.diary}.go").write_text("go\n")
    wait_for(lambda: found(env), "the hook")
    assert Path(f"{cache.diary}.notes").read_text() == f"{min(os.nice(0) + 1, 19)} 1000\n"
    assert cache.call("later", script=script) == (0, "", "")


def test_failure(cache: Cache) -> None:
    """Jobs after a build that failed have the reason, and do not try again with this compiler; what a killed builder left is gone."""
    folder = cache.folder
    for each in (folder.parent, folder):
        make_private_dir(each, {})
    left = folder / ".build-killed"
    left.mkdir()
    assert cache.call("later", script=FAILS)[0] == 1
    wait_for(lambda: build.read_failure(folder), "the failure")
    assert not left.exists()
    for _ in range(2):
        code, _, err = cache.call("later", script=FAILS)
        assert (code, err.partition(": the compiler")[0]) == (1, "commwatch: no native hook, using the Python one")
    assert cache.builds == 1


def test_cannot_be_started(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, or no process can be started, the job has the Python hook and a line with the reason and the remedy."""
    monkeypatch.setattr(beside, "available", lambda: 2000 * MB)
    code, _, err = cache.call("later")
    assert (code, cache.builds) == (1, 0)
    assert "using the Python one: 2.1 GB of memory are free, and building it beside a job takes 4.3; before the" in err
    assert err.rstrip().endswith("commwatch native build --python " + err.rstrip().rpartition(" ")[2])

    def fails(env: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(beside, "available", lambda: None)
    monkeypatch.setattr(beside, "start", fails)
    assert "the builder cannot be started: Resource temporarily unavailable\n" in cache.call("later")[2]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", 9000), (f"{4000 * MB}", 3000), (f"{20000 * MB}", 9000), (None, 9000)],
)
def test_available(limit: str | None, expected: int, tmp_path: Path) -> None:
    """What a container may still take counts, with the page cache that it could give back, and never more than the node has."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {16000 * 1024} kB\nMemFree: 7 kB\nMemAvailable:   {9000 * 1024} kB\n")
    (tmp_path / "memory.current").write_text(f"{1500 * MB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {500 * MB}\nactive_file 9\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert beside.available(meminfo, tmp_path) == expected * MB
    assert beside.available(tmp_path / "missing", tmp_path) is None
    meminfo.write_text("MemTotal: 7 kB\n")  # of a kernel before 3.14
    assert beside.available(meminfo, tmp_path) is None
