"""Build the native hook with this interpreter's torch: ``python -m commwatch.probe.native.build VERB``.

Does not run in the trainer. One process at a time builds in a folder of its own, tests the library, and only then
renames it to its final name. The compiler's output of a failed build is kept for ``status``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from commwatch.probe.native import beside, library
from commwatch.probe.native.library import NotAvailable
from commwatch.wire import crossing
from commwatch.wire.identity import make_private_dir

COMPILERS = ("c++", "g++", "clang++")
_BUILD_S, _TRIAL_S = 900.0, 120.0
#: Printed for a job whose hook is missing.
_LATER = "this job has the Python hook; the native one, which costs less, is being built beside it for later jobs"
#: Exit codes: the hook is available, it is not, or Ctrl-C ended the build.
AVAILABLE, MISSING, INTERRUPTED = 0, 1, 130
#: Signals by which a user or the system ends the processes of a session. SIGKILL may be for lack of memory, as it would be again.
_ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class BuildFailed(NotAvailable):
    """The build failed; ``output`` is that of the compiler, or of the trial."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class BuildEnded(NotAvailable):
    """A signal ended the build, so that it is not known whether it fails."""


def compiler(env: Mapping[str, str]) -> list[str]:
    """Return the C++ compiler: ``CXX``, else the first usual one on ``PATH``.

    Raises:
        BuildFailed: there is none.
    """
    configured = shlex.split(env.get("CXX", ""))
    for command in [configured] if configured else [[name] for name in COMPILERS]:
        if shutil.which(command[0], path=env.get("PATH")):
            return command
    what = f"CXX={env['CXX']}" if configured else f"no C++ compiler on PATH ({', '.join(COMPILERS)})"
    raise BuildFailed(f"{what}: not found" if configured else what)


def recipe(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a build would use: compiler, its version, and the user's own flags."""
    command = compiler(env)
    version_text = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    return {
        "compiler": shlex.join(command),
        "version": version_text.partition("\n")[0],
        "flags": env.get("CXXFLAGS", ""),
    }


def command_line(recipe: Mapping[str, str], torch: Path, cxx11_abi: bool, key: str, output: Path) -> list[str]:
    """Return the call of the compiler, to run in the folder with the sources."""
    include = torch / "include"
    return [
        *shlex.split(recipe["compiler"]),
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}",
        f'-DCOMMWATCH_KEY="{key}"',
        # System headers: their warnings are not ours.
        *("-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")),
        *shlex.split(recipe["flags"]),
        *("hook.cpp", "-o", str(output), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-Wl,-z,defs", "-Wl,-s"),
    ]


def plugin_command_line(recipe: Mapping[str, str], output: Path) -> list[str]:
    """Return the call of the compiler that makes the NCCL plugin: C, needs only libc, and is never unloaded."""
    flags = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
    command = [*shlex.split(recipe["compiler"]), *flags, *shlex.split(recipe["flags"]), "plugin.c", "-o", str(output)]
    return [*command, "-ldl", "-Wl,-z,defs", "-Wl,-z,nodelete", "-Wl,-s"]


def ensure(env: Mapping[str, str], force: bool = False, patient: bool = True) -> Path:
    """Return the built hook for this interpreter's torch; build it if it is missing, or was built differently.

    Args:
        force: build in any case.
        patient: repeat a build that failed before with this compiler.

    Raises:
        NotAvailable: there is none; the message gives the reason.
    """
    facts = library.torch_facts()
    where = library.folder(env, facts)
    if not force and (found := _without_compiler(env, facts)):
        return found
    made = recipe(env)
    with _alone(where.parent, env):
        if not force and (found := _usable(env, facts)):
            return found  # built by the process that we waited for
        if not patient and not force:
            _check_failure(where, made)
        try:
            return _build(where, facts, made, env)
        except BuildFailed as failed:
            with contextlib.suppress(OSError):  # without it, the next process tries again
                _write(where / library.FAILURE, {"recipe": made, "message": str(failed), "output": failed.output})
            raise
        except OSError as error:
            raise BuildFailed(f"cannot write {error.filename or where}: {error.strerror}") from None


def ensure_later(env: Mapping[str, str]) -> Path | None:
    """Return the hook for this interpreter's torch if that needs no compiler; else start to build it beside the caller, for later jobs.

    Returns:
        ``None`` if it is being built.

    Raises:
        NotAvailable: there is none, and it cannot be built beside a job; the message gives the reason.
    """
    facts = library.torch_facts()
    if found := _without_compiler(env, facts):
        return found
    _check_failure(library.folder(env, facts), recipe(env))
    free = beside.available()
    if free is not None and free < beside.ENOUGH:
        have = f"{free / 1e9:.1f} GB of memory are free, and building it beside a job takes {beside.ENOUGH / 1e9:.1f}"
        raise NotAvailable(f"{have}; before the next job: {library.BUILD}")
    try:
        beside.start(env)
    except OSError as error:
        raise NotAvailable(f"the builder cannot be started: {error.strerror or error}") from None
    return None


def _without_compiler(env: Mapping[str, str], facts: Mapping[str, Any]) -> Path | None:
    """Return the hook that is there already, or was built before and fits; ``None`` if it has to be built."""
    return _usable(env, facts) or _take_prebuilt(library.folder(env, facts), facts, env)


def _check_failure(where: Path, made: Mapping[str, str]) -> None:
    """Raise ``BuildFailed`` if the last build was made in this way and failed."""
    failure = read_failure(where)
    if failure is not None and failure["recipe"] == made:
        raise BuildFailed(failure["message"], failure["output"])


def _usable(env: Mapping[str, str], facts: Mapping[str, Any]) -> Path | None:
    """Return the existing hook if this compiler would build it alike; a machine without a compiler accepts any."""
    try:
        path, manifest = library.find(env, facts)
    except NotAvailable:
        return None
    if manifest.get("recipe", {}).get("compiler") == library.PREBUILT:  # tried when it was put here
        return path if path.parent == library.folder(env, facts) else None
    try:
        return path if manifest.get("recipe") == recipe(env) else None
    except BuildFailed:
        return path


@contextlib.contextmanager
def _alone(cache: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Hold the cache directory's lock; waits for another builder."""
    try:
        # Not shared with COMMWATCH_GROUP: what others may write is never loaded.
        make_private_dir(cache, {})
        lock = crossing.lock_file(cache / "lock", 0o600)
    except OSError as error:
        raise BuildFailed(f"cannot write {error.filename or cache}: {error.strerror or error}") from None
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: two builders cost time, nothing else
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _build(where: Path, facts: Mapping[str, Any], made: dict[str, str], env: Mapping[str, str]) -> Path:
    import torch

    print(
        f"commwatch: building the native hook for torch {facts['version']} (once, half a minute of a core)",
        file=sys.stderr,
        flush=True,
    )
    began = time.monotonic()
    where.mkdir(mode=0o700, exist_ok=True)
    for left in where.glob(".build-*"):  # by a builder that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=where) as name:
        scratch = Path(name)
        for file, text in library.sources().items():
            (scratch / file).write_text(text, encoding="utf-8")
        built, expected = scratch / "hook.so", library.source_key()
        abi = bool(torch._C._GLIBCXX_USE_CXX11_ABI)
        _call(
            "the compiler",
            command_line(made, Path(torch.__file__).parent, abi, expected, built),
            scratch,
            env,
            _BUILD_S,
        )
        _try_out(built, scratch, env)
        plugin = _build_plugin(scratch, where, made, env)
        path, checksum = _keep(built, where, "hook")
    about = {
        "recipe": made,
        "built_s": round(time.monotonic() - began, 1),
        "built_at": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    _finish(where, {"library": path.name, "sha256": checksum, **plugin, "torch": dict(facts), **about})
    return path


def _take_prebuilt(where: Path, facts: Mapping[str, Any], env: Mapping[str, str]) -> Path | None:
    """Copy the hook of the package ``commwatch_hooks`` to the user's cache, once it has been tried; ``None`` if there is none that works."""
    found = library.prebuilt(facts)
    if found is None:
        return None
    library_file, manifest = found
    with contextlib.suppress(BuildFailed, OSError), _alone(where.parent, env):
        where.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=where) as name:
            scratch = Path(name)
            hook = Path(shutil.copy(library_file, scratch / "hook.so"))
            _try_out(hook, scratch, env)
            plugin = library.plugin_beside(library_file, manifest)
            copied = (
                {}
                if plugin is None
                else _try_plugin(Path(shutil.copy(plugin, scratch / "nccl.so")), scratch, where, env)
            )
            path, checksum = _keep(hook, where, "hook")
        about = {name: manifest[name] for name in ("recipe", "built_s", "built_at")}
        _finish(where, {"library": path.name, "sha256": checksum, **copied, "torch": dict(facts), **about})
        return path
    return None


def _try_out(built: Path, scratch: Path, env: Mapping[str, str]) -> None:
    """Record a small job with a library, in another process; raise ``BuildFailed`` if it does not work."""
    trial = [sys.executable, "-m", "commwatch.probe.native.trial", str(built), library.source_key()]
    _call("the test of the built library", trial, scratch, {**env, "COMMWATCH_DIR": str(scratch / "run")}, _TRIAL_S)


def _finish(where: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, after which the hook is there; remove what an earlier build left."""
    _write(where / library.MANIFEST, manifest)
    for old in where.iterdir():
        kept = (manifest["library"], manifest.get("plugin"), library.MANIFEST)
        if old.name not in kept and not old.name.startswith(".build-"):
            old.unlink()


def _build_plugin(scratch: Path, where: Path, made: dict[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Build NCCL's plugin beside the hook; return its entries of the manifest: name and checksum, or why there is none."""
    built = scratch / "nccl.so"
    try:
        _call("the compiler", plugin_command_line(made, built), scratch, env, _BUILD_S)
    except BuildFailed as failed:  # the hook does not need it
        return {"plugin_missing": str(failed)}
    return _try_plugin(built, scratch, where, env)


def _try_plugin(built: Path, scratch: Path, where: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Try NCCL's plugin out and give it its final name; return its entries of the manifest: name and checksum, or why there is none."""
    trial = [sys.executable, "-m", "commwatch.nccl_plugin.trial", str(built)]
    try:
        _call("the test of the built NCCL plugin", trial, scratch, env, _TRIAL_S)
    except BuildFailed as failed:
        return {"plugin_missing": str(failed)}
    plugin, checksum = _keep(built, where, "nccl")
    return {"plugin": plugin.name, "plugin_sha256": checksum}


def _keep(built: Path, where: Path, name: str) -> tuple[Path, str]:
    """Give a library its final name, which has a part of its checksum; return both."""
    checksum = hashlib.sha256(built.read_bytes()).hexdigest()
    path = where / f"{name}-{checksum[:12]}.so"
    built.chmod(0o700)
    built.rename(path)
    return path, checksum


def _call(who: str, command: list[str], cwd: Path, env: Mapping[str, str], limit_s: float) -> None:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{who} took longer than {limit_s:.0f} s") from None
    except OSError as error:
        raise BuildFailed(f"{who} cannot be run: {error.strerror}") from None
    if -done.returncode in _ENDS:
        raise BuildEnded(f"{signal.Signals(-done.returncode).name} ended {who}; the next job tries again")
    if done.returncode != 0:
        output = f"$ {shlex.join(command)}\n{done.stderr}{done.stdout}"
        raise BuildFailed(f"{who} failed (exit code {done.returncode})", output)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` as JSON, atomically; raise ``OSError`` if that fails."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.chmod(0o600)
    new.rename(path)


def read_failure(where: Path) -> dict[str, Any] | None:
    """Return recipe, message and output of the last build, if it failed."""
    try:
        failure: dict[str, Any] = json.loads((where / library.FAILURE).read_text(encoding="utf-8"))
        return failure if {"recipe", "message", "output"} <= failure.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def status(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the hook for this interpreter's torch with its build, or why there is none."""
    found: dict[str, Any] = {"available": False, "reason": None, "python": sys.executable}
    try:
        facts = library.torch_facts()
        found["torch"] = facts["version"]
        where = library.folder(env, facts)
        failure = read_failure(where)
        found["failure"] = None if failure is None else {name: failure[name] for name in ("message", "output")}
        path, manifest = library.find(env, facts)
    except NotAvailable as error:
        return {**found, "reason": f"{error}{_other_python(error, 'status')}", "obstacle": _obstacle(env)}
    return {
        **found,
        "available": True,
        "library": str(path),
        **{k: manifest[k] for k in ("recipe", "built_at", "built_s")},
        "plugin_missing": manifest.get("plugin_missing"),
    }


def _other_python(error: NotAvailable, verb: str) -> str:
    """Return the remedy if this interpreter has no torch, as that of the agent; else nothing."""
    remedy = f"; name the Python of your training jobs: commwatch native {verb} --python PATH"
    return remedy if isinstance(error, library.NoTorch) else ""


def _obstacle(env: Mapping[str, str]) -> str | None:
    try:
        compiler(env)
    except BuildFailed as error:
        return str(error)
    return None


def _print_status(found: dict[str, Any]) -> None:
    if found["available"]:
        made = found["recipe"]
        flags = f" {made['flags']}" if made["flags"] else ""
        print(f"native hook for torch {found['torch']}: built {found['built_at']} in {found['built_s']} s")
        print(f"  library   {found['library']}\n  compiler  {made['version'] or made['compiler']}{flags}")
        if found["plugin_missing"]:
            print(f"  no NCCL plugin: {found['plugin_missing']}")
        return
    print(f"no native hook: {found['reason']}\n  the Python hook is used instead")
    if found["obstacle"]:
        print(f"  it cannot be built: {found['obstacle']}")
    if found.get("failure"):
        print(f"the last build failed: {found['failure']['message']}\n{found['failure']['output'].rstrip()}")


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="commwatch native")
    parser.add_argument("verb", choices=("build", "ensure", "later", "status", "clean"))
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nice", type=int)
    arguments = parser.parse_args(argv)
    if arguments.nice is not None:
        beside.give_way(arguments.nice)
    try:
        if arguments.verb == "status":
            found = status(os.environ)
            if arguments.json:
                print(json.dumps(found))
            else:
                _print_status(found)
            return AVAILABLE if found["available"] else MISSING
        if arguments.verb == "clean":
            shutil.rmtree(library.cache_dir(os.environ), ignore_errors=True)
            return AVAILABLE
        later = arguments.verb == "later"
        path = ensure_later(os.environ) if later else ensure(os.environ, arguments.force, arguments.verb == "build")
    except NotAvailable as error:
        shown = isinstance(error, BuildFailed) and error.output
        hint = f"; `commwatch native status --python {sys.executable}` shows its output" if shown else ""
        if arguments.verb == "build":
            hint = hint or _other_python(error, "build")
        falls_back = arguments.verb in ("ensure", "later") and os.environ.get("COMMWATCH_HOOK") != "native"
        instead = ", using the Python one" if falls_back else ""
        print(f"commwatch: no native hook{instead}: {error}{hint}", file=sys.stderr)
        return MISSING
    except KeyboardInterrupt:
        return INTERRUPTED
    if arguments.verb == "build":
        print(path)
    if path is None:
        print(f"commwatch: {_LATER} ({library.why_missing(library.torch_facts())})", file=sys.stderr)
    return MISSING if path is None else AVAILABLE


if __name__ == "__main__":
    sys.exit(main())
