"""The native hook's own parts, driven by threads of C++: plainly, and under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from commwatch.collectors.native import library
from tests.helpers import needs

DRIVER = Path(__file__).parent
KINDS = {
    "plain": ["-Wall", "-Wextra", "-Werror"],
    "addresses": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts(kind: str, tmp_path: Path) -> None:
    """Ring, in-flight table, exposure, poller and session hold what they promise to eight threads at once."""
    needs(shutil.which("g++"), "g++")
    (tmp_path / "format.h").write_text(library.format_header())
    flags = ["-std=c++17", "-g", "-O1", "-pthread", f"-I{tmp_path}", f"-I{library.HERE}", *KINDS[kind]]
    files = [str(DRIVER / name) for name in ("ring_driver.cpp", "session_driver.cpp")]
    built = subprocess.run(
        ["g++", *flags, *files, "-o", str(tmp_path / "driver")],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [str(tmp_path / "driver")],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-6000:]
    assert done.stdout.split()[::2] == ["ring", "in_flight", "exposure", "few", "poller", "session"]
