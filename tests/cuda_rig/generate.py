"""What the played driver needs of NVIDIA's headers, as C++: the functions that it does not play, their versions, names of errors. Pure."""

from __future__ import annotations

import re

#: Functions that count their calls, do nothing and succeed.
IDLE = (
    "cuCtxDestroy_v2", "cuCtxResetPersistingL2Cache", "cuCtxSetCacheConfig", "cuCtxSetLimit", "cuDevicePrimaryCtxReset_v2",
    "cuDeviceSetMemPool", "cuFlushGPUDirectRDMAWrites", "cuFuncLoad", "cuFuncSetCacheConfig", "cuFuncSetSharedMemConfig", "cuGraphUpload",
    "cuKernelSetCacheConfig", "cuLibraryUnload", "cuMemAdvise_v2", "cuMemPoolDestroy", "cuMemPoolSetAccess", "cuMemPoolTrimTo",
    "cuMemPrefetchAsync_v2", "cuMemSetAccess", "cuModuleUnload", "cuPointerSetAttribute", "cuProfilerStart", "cuProfilerStop",
    "cuStreamCopyAttributes",
)  # fmt: skip
#: What the headers do not tell: since CUDA 12, this name means a function of another name.
RENAMED = (("cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"),)

_NAME = re.compile(r"\b(cu[A-Z]\w*)\(")
_NEWEST = re.compile(r"^ *#define +cu\w+ +(?:__CUDA_API_PT[SD][ZS]\()?(cu\w+_v\d+)\)?\s*$", re.MULTILINE)
_TYPEDEF = re.compile(r"\*PFN_(cu\w+?)_v(\d+)\)")
_ERROR = re.compile(r"\b(CUDA_(?:SUCCESS|ERROR_\w+)) *= *(\d+)")
_PLAYED = re.compile(r"^CUresult (cu\w+)\(", re.MULTILINE)


def played(sources: list[str]) -> set[str]:
    """Return the names of the driver's functions that these C++ sources define."""
    return {name for source in sources for name in _PLAYED.findall(source)}


def symbols(cuda_h: str) -> set[str]:
    """Return all names of functions in ``cuda.h``, old versions and mentions in comments among them.

    A library that looks up functions by ``dlsym`` may fail if any of them is missing.
    """
    return {*_NAME.findall(cuda_h), *_NEWEST.findall(cuda_h)}


def shapes(cuda_h: str, typedefs: str) -> list[tuple[str, int, str]]:
    """Return what ``cuGetProcAddress`` needs to know of names with several versions: (name, since, symbol), the newest first.

    Args:
        typedefs: ``cudaTypedefs.h``, which has a type for each version of a function, named for the version of CUDA.
    """
    known = symbols(cuda_h)
    since: dict[str, set[int]] = {}
    for name, version in _TYPEDEF.findall(typedefs):
        since.setdefault(name, set()).add(int(version))
    found = list(RENAMED)
    for name, versions in since.items():
        names = [name, *sorted(other for other in known if re.fullmatch(rf"{name}_v\d", other))]
        if len(names) > 1 or len(versions) > 1:
            # The newest version has the last name; a name that the types leave out is the oldest.
            found += zip([name] * len(versions), sorted(versions, reverse=True), reversed(names), strict=False)
    return sorted(found, key=lambda shape: (shape[0], -shape[1]))


def generated(cuda_h: str, typedefs: str, sources: list[str]) -> str:
    """Return ``generated.cpp``; ``driver/generated.h`` declares what is in it."""
    ours = played(sources)
    idle = [f'int {name}() {{ return played::do_nothing("{name}"); }}' for name in IDLE]
    others = sorted(symbols(cuda_h) - ours - set(IDLE))
    missing = [f'int {name}() {{ return played::not_played("{name}"); }}' for name in others]
    names = sorted({int(number): name for name, number in _ERROR.findall(cuda_h)}.items())
    rows = [f'    {{"{name}", {since}, "{symbol}"}},' for name, since, symbol in shapes(cuda_h, typedefs)]
    return "\n".join(
        [
            '#include "generated.h"',
            '#pragma GCC diagnostic ignored "-Wmissing-declarations"',
            'extern "C" {',
            *idle,
            *missing,
            "}",
            "namespace played {",
            "const char* error_name(int error) {",
            "  switch (error) {",
            *(f'    case {number}: return "{name}";' for number, name in names),
            "    default: return nullptr;",
            "  }",
            "}",
            "const Shape kShapes[] = {",
            *rows,
            "};",
            "const size_t kShapeCount = sizeof kShapes / sizeof *kShapes;",
            "}  // namespace played",
            "",
        ]
    )
