"""The wheel ``commwatch-hooks``: native hooks built for several versions of torch, for environments without a compiler (``make hooks``).

A hook depends on the C++ interface of torch, and not on CUDA: one per version serves the builds of that commit with and without CUDA. It is
loaded only by the commwatch whose sources it was built from (``collectors/commwatch/probe/native/library.py``).

Run it as ``python -m commwatch_agent.deploy.hooks_wheel --out DIR TORCH ...``. A TORCH is a version, whose wheel pip downloads (about 800 MB; only
its headers and libraries are unpacked), or the folder of an installed torch. It needs a C++ compiler and objdump.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from commwatch import __version__
from commwatch.probe.native import library
from commwatch.probe.native.build import command_line, plugin_command_line, recipe

#: The name of a function that takes a ``std::string`` of the C++11 ABI.
_TAKES_NEW_STRING = b"torchInternalAssertFailEPKcS2_jS2_RKNSt7__cxx11"
_PARTS = ("torch/include/", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/version.py")
NAME = "commwatch-hooks"
_ABOUT = f"commwatch_hooks-{__version__}.dist-info"
_METADATA = f"""Metadata-Version: 2.1
Name: {NAME}
Version: {__version__}
Summary: Native hooks of commwatch for environments without a compiler
License: Apache-2.0
"""


class CannotBuild(Exception):
    """A hook cannot be built; the text has the errors of pip or of the compiler."""


def unpacked(version: str, where: Path) -> Path:
    """Download the wheel of a version of torch; return its folder ``torch``, with headers and libraries only.

    Raises:
        CannotBuild: pip cannot get it.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(where), f"torch=={version}"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(done.stderr)
    (wheel,) = where.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where, [name for name in archive.namelist() if name.startswith(_PARTS)])
    wheel.unlink()
    return where / "torch"


def build(torch: Path, where: Path) -> dict[str, bytes]:
    """Build the hook and NCCL's plugin with the torch in a folder; return the files for the wheel, by name.

    Raises:
        CannotBuild: the compiler refuses.
    """
    began, made = time.monotonic(), recipe(os.environ)
    for file, text in library.sources().items():
        (where / file).write_text(text, encoding="utf-8")
    cxx11_abi = _TAKES_NEW_STRING in (torch / "lib" / "libc10.so").read_bytes()
    hook, plugin = where / "hook.so", where / "nccl.so"
    for command in (
        command_line(made, torch, cxx11_abi, library.source_key(), hook),
        plugin_command_line(made, plugin),
    ):
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(done.stderr)
    return packed(torch, hook.read_bytes(), plugin.read_bytes(), made, time.monotonic() - began)


def packed(torch: Path, hook: bytes, plugin: bytes, made: Mapping[str, str], built_s: float) -> dict[str, bytes]:
    """Return the files of one version for the wheel, by name: the libraries, and the manifest that ``library.prebuilt`` reads."""
    facts = runpy.run_path(str(torch / "version.py"))
    manifest = {
        "library": "hook.so",
        "sha256": hashlib.sha256(hook).hexdigest(),
        "plugin": "nccl.so",
        "plugin_sha256": hashlib.sha256(plugin).hexdigest(),
        "git_version": facts["git_version"],
        "machine": platform.machine(),
        "sources": library.source_key(),
        "recipe": {"compiler": library.PREBUILT, "version": made["version"], "flags": made["flags"]},
        "built_s": round(built_s, 1),
        "built_at": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    version = str(facts["__version__"]).partition("+")[0]
    folder = f"{library.PACKAGE}/torch-{version}"
    files = {"hook.so": hook, "nccl.so": plugin, library.MANIFEST: json.dumps(manifest, indent=1).encode()}
    return {f"{folder}/{name}": content for name, content in files.items()}


def glibc_of(libraries: Sequence[Path]) -> tuple[int, int]:
    """Return the version of the GNU C library that some shared libraries need, as objdump shows it."""
    text = subprocess.run(["objdump", "-T", *map(str, libraries)], capture_output=True, text=True, check=True).stdout
    return max((int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", text))


def write(files: Mapping[str, bytes], glibc: tuple[int, int], out: Path) -> Path:
    """Write the wheel; return its path."""
    tag = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_{platform.machine()}"
    about = f"Wheel-Version: 1.0\nGenerator: commwatch\nRoot-Is-Purelib: false\nTag: {tag}\n"
    package = f'"""Native hooks of commwatch {__version__}; commwatch finds them by itself."""\n'
    every = {
        f"{library.PACKAGE}/__init__.py": package.encode(),
        **files,
        f"{_ABOUT}/METADATA": _METADATA.encode(),
        f"{_ABOUT}/WHEEL": about.encode(),
    }
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in every.items())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"commwatch_hooks-{__version__}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in every.items():
            archive.writestr(name, content)
        archive.writestr(f"{_ABOUT}/RECORD", f"{record}{_ABOUT}/RECORD,,\n")
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def main() -> None:
    """Build with each version, one after the other, and write the wheel; exit with code 1 if a build fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of the wheel; without it, the hooks are only built")
    parser.add_argument("torches", nargs="+", metavar="TORCH", help="a version, or the folder of an installed torch")
    arguments = parser.parse_args()
    files: dict[str, bytes] = {}
    failed, needs = False, (0, 0)
    for torch in arguments.torches:
        with tempfile.TemporaryDirectory() as made:
            where = Path(made)
            try:
                files |= build(Path(torch).resolve() if Path(torch).is_dir() else unpacked(torch, where), where)
            except CannotBuild as error:
                failed = True
                print(f"torch {torch}: {str(error)[:2000]}", flush=True)
                continue
            needs = max(needs, glibc_of([where / "hook.so", where / "nccl.so"]))
            print(f"torch {torch}: builds", flush=True)
    if arguments.out is not None and not failed:
        print(write(files, needs, arguments.out))
    sys.exit(failed)


if __name__ == "__main__":
    main()
