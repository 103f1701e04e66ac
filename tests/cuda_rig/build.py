"""Build the played driver: ``python -m tests.cuda_rig.build`` prints the folder with ``libcuda.so.1`` and ``libnvidia-ml.so.1``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cuda_rig.generate import generated

TREE = Path(__file__).parents[2]
DRIVER = TREE / "tests" / "cuda_rig" / "driver"
NVML = TREE / "tests" / "collectors" / "fake_nvml" / "nvml.c"
CACHE = TREE / ".stamps" / "cache" / "cuda_rig"
#: Has cuda.h and cudaTypedefs.h of the version of CUDA that the driver claims to be for, and needs no other package.
HEADERS = "nvidia-cuda-runtime==13.0.96"
# With the first macro, cuda.h declares all versions of a function under their own names. So a definition with another signature
# than NVIDIA's is a new function, which the last warning shows.
FLAGS = (
    *("-D__CUDA_API_VERSION_INTERNAL", "-std=c++17", "-O2", "-g", "-fPIC", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", "-Wmissing-declarations"),
)
# Calls within the library stay there, also where another one is preloaded.
LINK = ("-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-ldl")


class NotAvailable(Exception):
    """There is no compiler, or pip cannot get the headers."""


class BuildFailed(Exception):
    """A command failed; the message has its output."""


def build() -> Path:
    """Return the folder with the libraries; build them if these sources have not been built before.

    Raises:
        NotAvailable: a compiler or the headers cannot be had.
        BuildFailed: the compiler failed.
    """
    inputs = [*sorted(DRIVER.iterdir()), NVML, Path(__file__), Path(__file__).with_name("generate.py")]
    key = hashlib.sha256(b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in inputs)).hexdigest()[:16]
    where = CACHE / key
    if not where.exists():
        include = package(HEADERS) / "cu13" / "include"
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            _compile(Path(made), include)
            _publish(Path(made) / "lib", where)
    return where


def package(requirement: str) -> Path:
    """Return the folder ``nvidia`` of one of NVIDIA's packages; pip installs it once.

    Raises:
        NotAvailable: pip cannot get it.
    """
    where = CACHE / requirement
    if not where.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            target = Path(made) / "package"
            try:
                _run(
                    sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), requirement
                )
            except BuildFailed as reason:
                raise NotAvailable(f"{requirement}: {reason}") from None
            _publish(target, where)
    return where / "nvidia"


def _compile(made: Path, include: Path) -> None:
    """Leave the libraries in ``made/lib``."""
    sources = sorted(DRIVER.glob("*.cpp"))
    text = generated(
        (include / "cuda.h").read_text(encoding="utf-8"),
        (include / "cudaTypedefs.h").read_text(encoding="utf-8"),
        [source.read_text(encoding="utf-8") for source in sources],
    )
    (made / "generated.cpp").write_text(text, encoding="utf-8")
    (made / "lib").mkdir()
    includes = ("-isystem", str(include), f"-I{DRIVER}")

    def compiled(source: Path) -> str:
        output = str(made / f"{source.stem}.o")
        _run("g++", *FLAGS, *includes, "-c", str(source), "-o", output)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = list(workers.map(compiled, [*sources, made / "generated.cpp"]))
    exports = f"-Wl,--version-script={DRIVER / 'exports.map'}"
    _run("g++", *objects, *LINK, exports, "-o", str(made / "lib" / "libcuda.so.1"))
    nvml = (
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{NVML.parent}",
        "-Wl,-soname,libnvidia-ml.so.1",
    )
    _run("gcc", *nvml, str(DRIVER / "more_nvml.c"), "-o", str(made / "lib" / "libnvidia-ml.so.1"))


def _publish(made: Path, where: Path) -> None:
    with contextlib.suppress(OSError):  # another process was faster
        made.rename(where)


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise NotAvailable(f"{command[0]}: not found")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(build())
