"""The native hook's way from source to trainer: built once, whole or not at all, and checked before it is loaded.

The compiler here is a script that copies the hook the session has built, and keeps a diary. The builder runs in this process, which
has imported torch, or in a fork of one that has, and its trial of the hook is left out where a test is not about it.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from commwatch.probe.native import build, library, trial
from commwatch.probe.native.library import NotAvailable
from tests import prefork
from tests.helpers import PATIENCE_S, clean_env, needs, wait_for

#: A build compiles the hook, and then the NCCL plugin; the diary has the first.
WORKS = """case "$1" in --version) echo "diligent 1.0"; exit;; esac
case "$*" in *plugin.c*) from={plugin};; *) from={hook}; echo built >> {diary};; esac
while [ "$1" != -o ]; do shift; done
cp $from "$2"
"""
FAILS = """case "$1" in --version) echo "hopeless 1.0"; exit;; esac
echo tried >> {diary}
echo "hook.cpp:7: error: cannot make sense of this" >&2
exit 4
"""
#: A library that loads, but is not the hook.
CRASHES = """case "$1" in --version) echo "sloppy 1.0"; exit;; esac
echo built >> {diary}
while [ "$1" != -o ]; do shift; done
echo "not a library" > "$2"
"""


class Cache:
    """A user's cache directory, and a compiler of our making."""

    def __init__(self, directory: Path, hook: Path) -> None:
        self._directory, self._hook = directory, hook
        self.diary = directory / "diary"
        self.diary.touch()

    def env(self, script: str | None = WORKS, **more: str) -> dict[str, str]:
        """With that compiler; ``None``: with none at all."""
        path = self._directory / "bin"
        path.mkdir(exist_ok=True)
        if script is not None:
            (path / "c++").write_text(
                "#!/bin/sh\n"
                + script.format(diary=self.diary, hook=self._hook, plugin=next(self._hook.parent.glob("nccl-*.so")))
            )
            (path / "c++").chmod(0o755)
        for tool in ("sh", "cp"):
            if not (path / tool).exists():
                (path / tool).symlink_to(str(shutil.which(tool)))
        env = clean_env(XDG_CACHE_HOME=str(self._directory / "cache"), PATH=str(path), **more)
        return {name: value for name, value in env.items() if name not in ("CXX", "CXXFLAGS") or name in more}

    def start(self, *arguments: str, **env: Any) -> subprocess.Popen[str]:
        """The builder, in the background."""
        command = prefork.command(Path(build.__file__), *arguments)
        return subprocess.Popen(
            command, env=self.env(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
        )

    def call(self, *arguments: str, **env: Any) -> tuple[int, str, str]:
        """The builder, to its end, in this process: exit code, output, errors."""
        with (
            patch.dict(os.environ, self.env(**env), clear=True),
            redirect_stdout(io.StringIO()) as out,
            redirect_stderr(io.StringIO()) as err,
        ):
            code = build.main(list(arguments))
        return code, out.getvalue(), err.getvalue()

    @property
    def builds(self) -> int:
        """How often the compiler was called."""
        return len(self.diary.read_text().splitlines())

    @property
    def folder(self) -> Path:
        """Where the hook lies."""
        return library.folder(self.env(), library.torch_facts())

    def find(self) -> Path:
        """What a trainer would load."""
        return library.find(self.env(), library.torch_facts())[0]


@pytest.fixture
def cache(tmp_path: Path, native: Path) -> Cache:
    """An empty cache."""
    return Cache(tmp_path, native)


@contextmanager
def untried(what: str = "") -> Iterator[None]:
    """What is built in this process, or a part of it, is not tried."""
    call = build._call

    def called(who: str, *arguments: Any) -> None:
        if not who.startswith(f"the test of {what}"):
            call(who, *arguments)

    with patch.object(build, "_call", called):
        yield


@pytest.fixture
def no_trial() -> Iterator[None]:
    """What is built is not tried."""
    with untried():
        yield


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory, native: Path) -> Path:
    """A cache directory with a hook in it, to copy."""
    cache = Cache(tmp_path_factory.mktemp("built"), native)
    with untried():
        assert cache.call("build")[0] == 0
    return cache.folder.parents[2]


@pytest.fixture
def built(cache: Cache, built_once: Path) -> Cache:
    """A cache with a hook in it."""
    shutil.copytree(built_once, cache.folder.parents[2])
    return cache


def test_built_once(cache: Cache) -> None:
    """The first call builds and prints that; the next finds the library and prints nothing; status names it."""
    builder = cache.start("build")
    out, err = builder.communicate(timeout=PATIENCE_S)
    assert (builder.returncode, Path(out.strip())) == (0, cache.find())
    assert err.startswith("commwatch: building the native hook for torch ")
    assert cache.call("ensure") == (0, "", "")
    assert cache.builds == 1
    found = json.loads(cache.call("status", "--json")[1])
    assert found["available"]
    assert found["recipe"]["version"] == "diligent 1.0"
    assert "diligent 1.0" in cache.call("status")[1]


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        ([], {"CXXFLAGS": "-O3"}),
        ([], {"script": WORKS.replace("diligent 1.0", "diligent 2.0")}),
        (["--force"], {}),
    ],
)
@pytest.mark.usefixtures("no_trial")
def test_built_anew(flags: list[str], env: dict[str, str], built: Cache) -> None:
    """Other flags or another compiler make another hook; so does --force; the one before is gone."""
    assert built.call("ensure", *flags, **env)[0] == 0
    assert built.builds == 1
    assert sorted(path.name.partition("-")[0] for path in built.folder.iterdir()) == ["hook", "manifest.json", "nccl"]


def test_one_builder_at_a_time(cache: Cache) -> None:
    """Four at once: one builds, the others wait for it and take what it made."""
    slow = WORKS.replace("echo built", "sleep 1; echo built")
    (Path(cache.env()["PATH"]) / "sleep").symlink_to(str(shutil.which("sleep")))
    builders = [cache.start("ensure", script=slow) for _ in range(4)]
    errors = [builder.communicate(timeout=PATIENCE_S)[1] for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 4
    assert cache.builds == 1
    assert sorted("building" in error for error in errors) == [False] * 3 + [True]


def test_no_compiler(cache: Cache) -> None:
    """Without a compiler nothing is built, which one line says; what was built before is taken as it is."""
    code, out, err = cache.call("build", script=None)
    assert (code, out) == (1, "")
    assert err == "commwatch: no native hook: no C++ compiler on PATH (c++, g++, clang++)\n"
    assert "it cannot be built: no C++ compiler" in cache.call("status", script=None)[1]
    code, _, err = cache.call("build", script=None, CXX="/no/such/c++")
    assert (code, "CXX=/no/such/c++: not found" in err) == (1, True)


def test_no_torch(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this Python has no torch, as that of the agent, `build` and `status` name the remedy; `ensure`, for a job, does not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    says = f"no native hook: {sys.executable} has no torch; name the Python of your training jobs: commwatch native"
    assert cache.call("build") == (1, "", f"commwatch: {says} build --python PATH\n")
    assert cache.call("status")[1].startswith(f"{says} status --python PATH\n")
    assert cache.call("ensure")[2].endswith(f"{sys.executable} has no torch\n")


def test_no_compiler_any_more(built: Cache) -> None:
    """On a machine without a compiler, what was built before is taken as it is."""
    assert built.call("ensure", script=None)[0] == 0
    assert built.builds == 0


@pytest.mark.usefixtures("no_trial")
def test_build_fails(cache: Cache) -> None:
    """A failure is printed in one line, its output is kept for status, and only `build` tries the same again."""
    for _ in range(2):
        code, out, err = cache.call("ensure", script=FAILS)
        assert (code, out) == (1, "")
        assert err.splitlines()[-1].startswith("commwatch: no native hook, using the Python one: the compiler failed")
        assert f"`commwatch native status --python {sys.executable}` shows its output" in err
    assert cache.builds == 1
    code, out, _ = cache.call("status", script=FAILS)
    assert code == 1
    assert "hook.cpp:7: error: cannot make sense of this" in out
    assert cache.call("build", script=FAILS)[0] == 1
    assert cache.builds == 2
    assert cache.call("ensure")[0] == 0  # another compiler
    assert "hopeless" not in cache.call("status")[1]


@pytest.mark.usefixtures("no_trial")
def test_build_that_a_signal_ends(cache: Cache) -> None:
    """A build that ends with its session is no failure of the compiler: the next job tries again."""
    script = FAILS.replace("exit 4", "kill -TERM $$")
    assert script != FAILS
    for builds in (1, 2):
        _, _, err = cache.call("ensure", script=script)
        assert err.splitlines()[-1].endswith("SIGTERM ended the compiler; the next job tries again")
        assert cache.builds == builds


def test_failure_that_cannot_be_noted(cache: Cache) -> None:
    """If the failure of a build cannot be stored either, one line says that there is no native hook."""
    (cache.folder / "failure.json").mkdir(parents=True)
    code, out, err = cache.call("ensure", script=FAILS)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("commwatch: no native hook, using the Python one: the compiler failed")
    assert "Traceback" not in err


def test_what_does_not_work_is_not_used(cache: Cache) -> None:
    """A library that was compiled but does not work is tried in a separate process, and never gets its name."""
    code, _, err = cache.call("build", script=CRASHES)
    assert code == 1
    assert "the test of the built library failed" in err
    with pytest.raises(NotAvailable, match="it has not been built"):
        cache.find()
    assert [path.name for path in cache.folder.iterdir()] == ["failure.json"]


def test_plugin_that_does_not_work(cache: Cache) -> None:
    """A NCCL plugin that was compiled but does not work, which a separate process finds out, is left out, and status gives the reason."""
    script = WORKS.replace("from={plugin}", "from={hook}")
    with untried("the built library"):
        assert cache.call("build", script=script)[0] == 0
    assert [path.suffix for path in sorted(cache.folder.iterdir())] == [".so", ".json"]
    assert library.plugin_beside(*library.find(cache.env(), library.torch_facts())) is None
    assert "no NCCL plugin: the test of the built NCCL plugin failed" in cache.call("status", script=script)[1]


@pytest.mark.usefixtures("no_trial")
def test_interrupted_builder(cache: Cache) -> None:
    """Ctrl-C ends a build with exit code 130, without a traceback, and nothing of it is left."""
    slow = 'case "$1" in --version) exit;; esac\necho built >> {diary}\nread forever < {diary}.pipe\n'
    os.mkfifo(f"{cache.diary}.pipe")
    builder = cache.start("build", script=slow)
    wait_for(lambda: cache.builds, "the compiler to be called")
    builder.send_signal(signal.SIGINT)
    out, err = builder.communicate(timeout=PATIENCE_S)
    assert (builder.returncode, out, "Traceback" in err) == (130, "", False)
    assert list(cache.folder.iterdir()) == []


@pytest.mark.usefixtures("no_trial")
def test_killed_builder(cache: Cache) -> None:
    """A builder that is killed leaves nothing that a trainer would take, and the next one builds."""
    slow = WORKS.replace("echo built", "echo begun >> {diary}.begun; exec sleep 1000")
    (Path(cache.env()["PATH"]) / "sleep").symlink_to(str(shutil.which("sleep")))
    builder = cache.start("build", script=slow)
    begun = Path(f"{cache.diary}.begun")
    wait_for(begun.exists, "the compiler to be called")
    builder.kill()
    builder.communicate()
    with pytest.raises(NotAvailable):
        cache.find()
    assert cache.call("ensure")[0] == 0
    assert cache.find().exists()


def _other_content(folder: Path) -> None:
    (library_file,) = folder.glob("hook-*.so")
    library_file.write_bytes(library_file.read_bytes() + b"\0")


def _writable(folder: Path) -> None:
    (library_file,) = folder.glob("hook-*.so")
    library_file.chmod(0o777)


def _linked(folder: Path) -> None:
    (library_file,) = folder.glob("hook-*.so")
    library_file.rename(folder.parent / "elsewhere.so")
    library_file.symlink_to(folder.parent / "elsewhere.so")
    os.chown(library_file, 12345, -1, follow_symlinks=False)


def _points_out(folder: Path) -> None:
    manifest = json.loads((folder / library.MANIFEST).read_text())
    (folder / library.MANIFEST).write_text(json.dumps({**manifest, "library": "../../evil.so"}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_other_content, "is damaged"),
        (_writable, "others may write to it"),
        (_linked, "symbolic links"),
        (_points_out, "damaged|it has not been built"),
        (lambda folder: (folder / library.MANIFEST).write_text("{"), "manifest.json is damaged"),
        (lambda folder: (folder / library.MANIFEST).write_text("[]"), "manifest.json is damaged"),
        (lambda folder: folder.chmod(0o777), "others may write to its folder"),
        (lambda folder: next(folder.glob("hook-*.so")).unlink(), "it has not been built"),
    ],
)
def test_not_trusted(spoil: Callable[[Path], object], says: str, built: Cache) -> None:
    """What is damaged, or could be another's work, is not loaded: the trainer says why, and takes the Python hook."""
    spoil(built.folder)
    with pytest.raises(NotAvailable, match=says):
        built.find()


def test_another_users_work(built: Cache) -> None:
    """What belongs to another user is not loaded."""
    needs(os.geteuid() == 0, "root, to give files away")
    os.chown(built.find(), 12345, -1)
    with pytest.raises(NotAvailable, match="belongs to uid 12345"):
        built.find()


@pytest.mark.parametrize(
    ("path", "says"), [(None, "was built from other sources"), ("/no/such/hook.so", "cannot load /no/such/hook.so")]
)
def test_of_other_sources(path: str | None, says: str, native: Path) -> None:
    """A library with another key than its place says, or one that cannot be loaded, is refused by name."""
    tried = prefork.command(Path(trial.__file__), path or str(native), "0123456789abcdef")
    env = clean_env(COMMWATCH_DIR="/no/such/directory")
    done = subprocess.run(tried, env=env, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]


def test_clean(built: Cache) -> None:
    """`clean` leaves nothing behind, and there is nothing to fear from cleaning twice."""
    assert built.call("clean")[0] == built.call("clean")[0] == 0
    assert not built.folder.parent.exists()


@pytest.mark.parametrize(
    ("home", "says"), [({"XDG_CACHE_HOME": "/proc"}, "cannot write /proc/commwatch"), ({}, "no cache directory")]
)
def test_nowhere_to_put_it(home: dict[str, str], says: str, cache: Cache) -> None:
    """A home that cannot be written to, or that does not exist, is reported in one line."""
    env = {**{k: v for k, v in cache.env().items() if k not in ("HOME", "XDG_CACHE_HOME")}, **home}
    command = [sys.executable, "-m", "commwatch.probe.native.build", "build"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def spoil_content(path: Path) -> None:
    path.write_bytes(b"other")


def spoil_rights(path: Path) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize("spoil", [spoil_content, spoil_rights, Path.unlink])
def test_plugin_not_trusted(spoil: Callable[[Path], object], built: Cache) -> None:
    """The NCCL plugin lies beside the hook. If it was changed, can be written by others, or is gone, the hook goes without it."""
    path, manifest = library.find(built.env(), library.torch_facts())
    plugin = library.plugin_beside(path, manifest)
    assert plugin is not None
    assert plugin.parent == built.folder
    spoil(plugin)
    assert library.plugin_beside(*library.find(built.env(), library.torch_facts())) is None
