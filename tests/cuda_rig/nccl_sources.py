"""Builds NVIDIA's profiler plugins from a checkout of NVIDIA/nccl, as its sources are not ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cuda_rig.build import HEADERS, package

#: What ``cuda_runtime.h`` includes.
COMPILER_HEADERS = "nvidia-cuda-crt==13.0.88"
#: The Makefile of Inspector generates this.
VERSION = 'extern "C" const char* get_git_version_info() { return "unknown"; }\n'


def build_plugin(sources: Path, name: str, into: Path) -> Path:
    """Return a plugin in ``plugins/profiler`` of the sources, such as "example" or "inspector", built in a folder.

    Raises:
        NotAvailable: pip cannot get CUDA's headers.
    """
    where, runtime = sources / "plugins" / "profiler" / name, package(HEADERS) / "cu13"
    built, version = into / f"lib{name}.so", into / "version.cc"
    version.write_text(VERSION)
    files = [
        *sorted(str(file) for file in where.glob("*.cc") if file.name != version.name),
        *([str(version)] if (where / "version.h").exists() else []),
    ]
    includes = [
        f"-I{folder}"
        for folder in (where, where / "nccl", runtime / "include", package(COMPILER_HEADERS) / "cu13" / "include")
    ]
    cudart = runtime / "lib"
    libraries = [f"-L{cudart}", "-l:libcudart.so.13", f"-Wl,-rpath,{cudart}", "-ldl", "-pthread"]
    macros = ["-DNCCL_INSPECTOR_ENABLE_WARN=0"]
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *macros, *includes, *files, *libraries, "-o", str(built)]
    subprocess.run(command, check=True, timeout=300)
    return built
