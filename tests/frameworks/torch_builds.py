"""Compiles and links the native hook against PyTorch's wheels, version by version; prints one line for each (``make torch-builds``).

Arguments: versions of torch. Only headers and libraries are extracted from a wheel (about 800 MB each), so the hook is not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from commwatch.collectors.probe.native import library
from commwatch.collectors.probe.native.build import command_line, recipe

#: The name of a function that takes a ``std::string`` of the C++11 ABI.
TAKES_NEW_STRING = b"torchInternalAssertFailEPKcS2_jS2_RKNSt7__cxx11"
PARTS = ("torch/include/", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so")


def unpacked(version: str, where: Path) -> Path:
    """Download the wheel of a version; return its folder ``torch``, with headers and libraries only."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(where), f"torch=={version}"]
    subprocess.run(pip, check=True)
    (wheel,) = where.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where, [name for name in archive.namelist() if name.startswith(PARTS)])
    wheel.unlink()
    return where / "torch"


def build(version: str) -> str | None:
    """Build the hook with a version; return the compiler's errors, or ``None`` if the build succeeds."""
    with tempfile.TemporaryDirectory() as made:
        where = Path(made)
        torch = unpacked(version, where)
        for file, text in library.sources().items():
            (where / file).write_text(text, encoding="utf-8")
        cxx11_abi = TAKES_NEW_STRING in (torch / "lib" / "libc10.so").read_bytes()
        command = command_line(recipe(os.environ), torch, cxx11_abi, version, where / "hook.so")
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else None


def main() -> None:
    """Build with every version; exit with code 1 if a build fails."""
    failed = False
    for version in sys.argv[1:]:
        said = build(version)
        failed |= said is not None
        print(f"torch {version}: {'builds' if said is None else said[:2000]}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
