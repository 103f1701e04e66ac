"""A job whose Python and torch are others than the agent's, and of another system: Debian's packages, entered by chroot."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch_agent.analysis.queries import QueryService
from tests.e2e.torchjob import JOBS
from tests.helpers import clean_env, commwatch
from tests.image.test_built_image import DEBIAN

pytestmark = pytest.mark.image_proof

#: Runs a command in the root $1, where the other arguments before `--` are mounted at their own paths, in mounts of its own.
ENTER = """#!/usr/bin/env -S unshare --mount sh
set -eu
root=$1
shift
while [ "$1" != -- ]; do
    mount --rbind "$1" "$root$1"
    shift
done
shift
exec chroot "$root" "$@"
"""
#: Debian's torch has no libuv, which the launcher requires by default for its store over TCP; so the launcher uses a file.
DEBIANS = {"USE_LIBUV": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
VERSIONS = "import sys, torch; print(sys.version.split()[0], torch.__version__)"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Debian with its packages of Python and torch, without commwatch and without a compiler."""
    root = tmp_path_factory.mktemp("debian") / "root"
    packages = "--include=python3,python3-torch"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", packages, DEBIAN[0], root, DEBIAN[1]], check=True)
    return root


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of all that is there."""
    found = [(path, path.lstat()) for path in root.rglob("*")]
    return {str(path.relative_to(root)): (about.st_size, about.st_mtime_ns) for path, about in found}


def test_job_of_another_python(root: Path, native: Path, tmp_path: Path) -> None:
    """`commwatch run` records a job of another Python and torch, with the hook that these can load, and changes nothing there."""
    enter, cache = tmp_path / "enter", tmp_path / "cache"
    enter.write_text(ENTER)
    enter.chmod(0o755)
    for name in ("train.py", "common.py"):
        shutil.copy(JOBS / name, tmp_path)
    # The native hook of this torch lies there as well; the job must not take it.
    shutil.copytree(native.parents[1], cache / "commwatch" / "native")
    (root / tmp_path.relative_to("/")).mkdir(parents=True)
    there = (enter, root, "/proc", "/dev", tmp_path, "--", "python3")
    env = clean_env(
        COMMWATCH_JOB="other", COMMWATCH_HOOK="auto", XDG_CACHE_HOME=str(cache), TMPDIR=str(tmp_path), **DEBIANS
    )
    before = files(root)

    store = ("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", tmp_path / "store")
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", *store)
    place = ("--dir", tmp_path / "run", "--state", tmp_path / "state", "--port", "0")
    done = commwatch("run", *place, "--", *there, *launch, tmp_path / "train.py", cwd=tmp_path, env=env)
    print(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files(root) == before

    versions = subprocess.run([*there, "-c", VERSIONS], env=env, capture_output=True, text=True, check=True).stdout
    python, torch = versions.split()
    print(f"Python {python}, torch {torch}; the agent's Python {sys.version.split()[0]}")
    assert python.split(".")[:2] != sys.version.split(".")[:2]
    assert f"it has not been built for torch {torch}" in done.stderr
    assert re.search(r"2 of 2 ranks on \S+, hook python\n", done.stderr)
    assert "records, none lost" in done.stderr
    assert "untimed" not in done.stderr
    (history,) = (tmp_path / "state").glob("history*.sqlite")
    recorded = QueryService(history)
    (job,) = recorded.jobs()
    assert (job.job_id, job.lost) == ("other", 0)
    _, rows = recorded.summary(0, 1 << 62, ["op"], {})
    counts = {row.by["op"]: row.count for row in rows}
    assert counts["barrier"] == 2
    assert counts["all_reduce"] >= 40
