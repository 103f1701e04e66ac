"""Packages of npm that tests use."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.conftest import CACHE
from tests.helpers import needs


def packages(manifest: Path) -> Path:
    """The folder ``node_modules`` with the packages of a ``package.json``; it is kept between runs under the name of their list."""
    npm = shutil.which("npm")
    needs(npm, "npm")
    kept = CACHE / f"npm-{hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]}"
    if not kept.exists():
        new = kept.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        shutil.copy(manifest, new)
        command = [str(npm), "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(command, cwd=new, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        new.rename(kept)
    return kept / "node_modules"
