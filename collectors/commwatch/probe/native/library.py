"""Find the built hook, check that it can be trusted, and load it. Runs in the trainer, and builds nothing.

One folder per torch, architecture, C library and source in the user's cache directory. Its manifest names the library
and its checksum; it is written last, by renaming, so an existing manifest is complete.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import runpy
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commwatch.probe import governor
from commwatch.wire import crossing, events, modes, ring, splits
from commwatch.wire.c10d_table import Measure
from commwatch.wire.handlers import raised_by_handler

HERE = Path(__file__).parent
#: The folder of NCCL's profiler plugin, which is built with the hook and lies beside it.
PLUGIN = HERE.parents[1] / "nccl_plugin"
MANIFEST = "manifest.json"
#: The package with hooks that were built before, a folder for each version of torch; its manifests name this as the compiler.
PACKAGE, PREBUILT = "commwatch_hooks", "prebuilt"
FAILURE = "failure.json"
#: The command that builds the hook for this Python, with the commwatch of any environment.
BUILD = f"commwatch native build --python {shlex.quote(sys.executable or 'python')}"
#: Bytes read of a manifest, or of a library (half a megabyte); the checksum of a larger one is wrong.
_MOST_BYTES = 64 << 20
#: Values of ``torch/version.py`` that decide whether a library built for one torch works with another.
_FACTS = ("__version__", "git_version", "cuda", "hip", "debug")


class NotAvailable(Exception):
    """There is no native hook to load; the message gives the reason."""


class NoTorch(NotAvailable):
    """This Python has no torch, for which a hook could be built."""


def torch_facts() -> dict[str, Any]:
    """Return the facts of the torch that this interpreter would import, without importing it.

    Raises:
        NoTorch: there is no torch.
        NotAvailable: its version cannot be read.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoTorch(f"{sys.executable or 'this Python'} has no torch")
    version = Path(spec.origin).with_name("version.py")
    try:
        facts = runpy.run_path(str(version))
    except OSError as error:
        raise NotAvailable(f"cannot read {version}: {error.strerror}") from None
    return {name.strip("_"): facts.get(name) for name in _FACTS}


#: Constants that the C++ sources take from Python, by their name there: layout of the ring, flags, codes, rules of the governor.
_NUMBERS = {
    "kRecordSize": events.RECORD_SIZE,
    "kCountersAt": ring.COUNTERS_AT,
    "kInFlightAt": ring.IN_FLIGHT_AT,
    "kRecordsAt": ring.RECORDS_AT,
    "kInFlightSlots": ring.IN_FLIGHT_SLOTS,
    "kStartAt": ring.START_AT,
    "kFlagsAt": ring.FLAGS_AT,
    "kCursor": ring.CURSOR,
    "kHeartbeat": ring.HEARTBEAT,
    "kDropped": ring.DROPPED,
    "kProbeNs": ring.PROBE_NS,
    "kInFlightOverflow": ring.IN_FLIGHT_OVERFLOW,
    "kClosed": ring.CLOSED,
    "kOpsStarted": ring.OPS_STARTED,
    "kMode": ring.MODE,
    "kModeSinceNs": ring.MODE_SINCE_NS,
    "kSplits": ring.SPLITS,
    "kSplitsCalls": splits.CALLS,
    "kSplitsEntryBytes": splits.ENTRY_BYTES,
    "kSplitsAreaBytes": splits.AREA_BYTES,
    "kMostMembers": splits.MOST_MEMBERS,
    "kStepMark": events.STEP_MARK,
    "kChecksum": events.CHECKSUM,
    "kAllReduce": events.OP_CODE["all_reduce"],
    "kAllGather": events.OP_CODE["all_gather"],
    "kAllToAll": events.OP_CODE["all_to_all"],
    "kBroadcast": events.OP_CODE["broadcast"],
    "kNoGroup": events.NO_GROUP,
    "kTags": events.TAGS,
    "kMostPeers": events.MOST_PEERS,
    "kAsync": events.ASYNC,
    "kFailed": events.FAILED,
    "kNoSize": events.NO_SIZE,
    "kUntimed": events.UNTIMED,
    "kUnaligned": events.UNALIGNED,
    "kExposed": events.EXPOSED,
    "kWaitSeen": events.WAIT_SEEN,
    "kBlocked": events.BLOCKED,
    "kBeside": events.BESIDE,
    "kOnDevice": events.ON_DEVICE,
    "kByNone": events.BY_NONE,
    "kByFuture": events.BY_FUTURE,
    "kByPoll": events.BY_POLL,
    "kByWait": events.BY_WAIT,
    "kByCall": events.BY_CALL,
    "kByEvents": events.BY_EVENTS,
    "kByNccl": events.BY_NCCL,
    "kCounted": events.COUNTED,
    "kCostSample": governor.COST_SAMPLE,
    "kCostNs": governor.COST_NS,
    "kCostBound": governor.COST_BOUND,
    "kCostRemembered": governor.COST_REMEMBERED,
    "kCostRare": governor.COST_RARE,
    "kPatience": governor.PATIENCE,
    "kFirstTrial": governor.FIRST_TRIAL,
    "kLastTrial": governor.LAST_TRIAL,
    "kRunBits": governor.RUN_BITS,
    "kSampleBits": modes.SAMPLE_BITS,
    "kMostKept": governor.MOST_KEPT,
}


def format_header() -> str:
    """Return the C++ header with the constants that Python defines: layout of the ring, flags, codes."""
    constants = "".join(f"constexpr int {name} = {value};\n" for name, value in _NUMBERS.items())
    names = ", ".join(f"k{mode.capitalize()}" for mode in modes.MODES)
    ops = ", ".join(f'"{name}"' for name in events.OPS)
    measures = ", ".join(f"k{measure.name.capitalize()} = {measure}" for measure in Measure)
    return (
        "// Made from events.py, ring.py, splits.py, modes.py and c10d_table.py of collectors/commwatch/wire, and from probe/governor.py.\n#pragma once\n"
        f"namespace commwatch::format {{\n{constants}constexpr unsigned kSpread = {governor.SPREAD}u, kEnough = {governor.ENOUGH};\n"
        f"constexpr unsigned long long kLookNs = {governor.LOOK_NS}, kLongestNs = {governor.LONGEST_NS};\n"
        f"constexpr const char* kOps[] = {{{ops}}};\nenum class Measure {{ {measures} }};\nenum class Mode {{ {names} }};\n}}\n"
    )


def sources() -> dict[str, str]:
    """Return all sources of the hook and of the NCCL plugin, by file name."""
    files = sorted(
        path for folder in (HERE, PLUGIN) for path in folder.iterdir() if path.suffix in (".c", ".cpp", ".h")
    )
    return {**{path.name: path.read_text(encoding="utf-8") for path in files}, "format.h": format_header()}


def source_key() -> str:
    """Return a hash of the sources, which a library has in it."""
    return hashlib.sha256(json.dumps(sources(), sort_keys=True).encode()).hexdigest()[:16]


def key(facts: Mapping[str, Any]) -> str:
    """Return a hash of what a library is built from and for."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    made_of = [facts, platform.machine(), libc, source_key()]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def cache_dir(env: Mapping[str, str]) -> Path:
    """Return the folder of built hooks: ``commwatch/native`` in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises:
        NotAvailable: the user has no home.
    """
    home = env.get("XDG_CACHE_HOME") or (env["HOME"] + "/.cache" if env.get("HOME") else "")
    if not home:
        raise NotAvailable("no cache directory: neither XDG_CACHE_HOME nor HOME is set")
    return Path(home) / "commwatch" / "native"


def folder(env: Mapping[str, str], facts: Mapping[str, Any]) -> Path:
    """Return the folder of the hook for this torch, whether it exists or not."""
    return cache_dir(env) / f"torch-{facts['version']}-{key(facts)}"


def find(env: Mapping[str, str], facts: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the library for this torch and its manifest, checked.

    Raises:
        NotAvailable: it is not built, not ours, or does not match its manifest.
    """
    where = folder(env, facts)
    try:
        return _checked(where)
    except FileNotFoundError:
        found = prebuilt(facts)
        if found is not None:
            return found
        raise NotAvailable(f"{why_missing(facts)}; run: {BUILD}") from None
    except OSError as error:
        raise NotAvailable(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise NotAvailable(f"{where / MANIFEST} is damaged; run: {BUILD} --force") from None


def _checked(where: Path) -> tuple[Path, dict[str, Any]]:
    """Return the library in a folder and its manifest.

    Raises:
        NotAvailable: it is not ours, or does not match its manifest.
        OSError, ValueError, KeyError, TypeError: the manifest cannot be read.
    """
    manifest: dict[str, Any] = json.loads(_trusted(where / MANIFEST))
    library = where / str(manifest["library"])
    if library.parent != where or hashlib.sha256(_trusted(library)).hexdigest() != manifest["sha256"]:
        raise NotAvailable(f"{library} is damaged; run: {BUILD} --force")
    return library, manifest


def prebuilt(facts: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Return the library of the package ``commwatch_hooks`` for this torch and its manifest, checked; ``None`` if it has none that fits.

    It fits a torch of the same version and commit, with or without CUDA, if it was built from these sources.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    version = str(facts["version"]).partition("+")[0]
    for where in (Path(place, f"torch-{version}") for place in places):
        try:
            library, manifest = _checked(where)
            made_for = (manifest["git_version"], manifest["machine"], manifest["sources"])
        except (OSError, ValueError, KeyError, TypeError, NotAvailable):
            continue
        if made_for == (facts["git_version"], platform.machine(), source_key()):
            return library, manifest
    return None


def why_missing(facts: Mapping[str, Any]) -> str:
    """Return why there is no hook: it has not been built, or the package ``commwatch_hooks`` is installed, but has none that works here."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"it has not been built for torch {facts['version']}"
    return (
        f"the installed commwatch-hooks has none that works with torch {facts['version']} and this version of commwatch"
    )


def plugin_beside(library: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Return the NCCL plugin that was built with a library, checked; ``None`` if there is none, or it does not match the manifest."""
    try:
        path = library.with_name(str(manifest["plugin"]))
        right = (
            path.parent == library.parent and hashlib.sha256(_trusted(path)).hexdigest() == manifest["plugin_sha256"]
        )
    except (OSError, KeyError, ValueError, NotAvailable) as error:
        if raised_by_handler(error):
            raise
        return None
    return path if right else None


def _trusted(path: Path) -> bytes:
    """Return the content of a file that only this user and root can have written: it runs inside the training.

    Raises:
        NotAvailable: others can have written it.
        OSError: it cannot be read.
    """
    try:
        return crossing.read(path, _MOST_BYTES, crossing.operator())
    except crossing.Refused as error:
        raise NotAvailable(f"{path}: {error.strerror}") from None


def load(env: Mapping[str, str]) -> Library:
    """Find, check and load the hook for the torch of this process.

    Raises:
        NotAvailable: there is none; the message gives the reason.
    """
    facts = torch_facts()
    path, manifest = find(env, facts)
    loaded = Library(path, source_key())
    loaded.nccl_plugin = plugin_beside(path, manifest)
    return loaded


#: Callbacks from C++ for what needs Python, each in a thread that C++ makes; ctypes takes the GIL for them.
OPEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
ADD_GROUP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
ADD_NAME = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


class Library:
    """The loaded hook: its C functions with their types.

    Raises:
        NotAvailable: it cannot be loaded, or was built from other sources.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        #: The NCCL plugin that was built with it.
        self.nccl_plugin: Path | None = None
        try:
            # ``slow`` is for calls that may take long, ``quick`` for short ones that keep the GIL.
            slow, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
            quick.cw_key.restype = ctypes.c_char_p
            found = quick.cw_key()
        except (OSError, AttributeError) as error:
            raise NotAvailable(f"cannot load {path}: {error}") from None
        if found != key.encode():
            raise NotAvailable(f"{path} was built from other sources; run: {BUILD} --force")
        self.hook = quick.cw_hook
        self.hook.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_int] * 8]
        self.unhook = quick.cw_unhook
        self.standard_error = quick.cw_standard_error
        self.standard_error.argtypes = [ctypes.c_uint64] * 5
        self.install = quick.cw_install
        self.install.argtypes = [OPEN, ADD_GROUP, ADD_NAME, ADD_NAME, ctypes.c_int, ctypes.c_double]
        self.install.restype = ctypes.c_void_p
        self.use_nccl_plugin = quick.cw_use_nccl_plugin
        self.use_nccl_plugin.argtypes = [ctypes.c_char_p]
        self.time_devices = quick.cw_time_devices
        self.time_devices.argtypes = [ctypes.c_int]
        self.over = quick.cw_over
        self.over.argtypes = [ctypes.c_void_p]
        self.attach = quick.cw_attach
        self.attach.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        self.describe_group = quick.cw_describe_group
        self.describe_group.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int,
        ]
        self.forget_group = quick.cw_forget_group
        self.forget_group.argtypes = [ctypes.c_char_p]
        self.replayed = quick.cw_replayed
        graphs = quick.cw_capture_begins, quick.cw_capture_ends, quick.cw_replay, quick.cw_forget_graph
        for function in graphs:
            function.argtypes = [ctypes.c_uint64]
        self.capture_begins, self.capture_ends, self.replay, self.forget_graph = graphs
        self.mark = quick.cw_mark
        self.mark.argtypes = [ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8]
        self.checksum = quick.cw_checksum
        self.checksum.argtypes = [ctypes.c_uint16, *[ctypes.c_int] * 2, *[ctypes.c_uint32] * 2, *[ctypes.c_uint64] * 3]
        self.check_collectives = quick.cw_check_collectives
        self.check_collectives.argtypes = [ctypes.c_uint32, ctypes.c_double]
        self.switch_off = quick.cw_switch_off
        self.uninstall = slow.cw_uninstall
