"""``commwatch probe install``: a trainer without commwatch is watched, and whoever imports while it changes sees it whole."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

import pytest

from commwatch import __version__
from commwatch_agent.deploy import probe_folder
from commwatch_agent.deploy.probe_folder import CannotInstall, install
from tests.bare import bare_python
from tests.e2e.torchjob import read_rings
from tests.helpers import clean_env, commwatch, free_port
from tests.test_packaging import TREE

#: One operation of one rank.
TRAIN = "import torch.distributed as dist, torch; dist.init_process_group('gloo'); dist.all_reduce(torch.ones(4)); dist.destroy_process_group()"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a trainer."""
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


def trainer_env(directory: Path, **more: str) -> dict[str, str]:
    """What a trainer has in its environment, according to what the command says, as the one rank of a job."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return clean_env(PYTHONPATH=str(directory), COMMWATCH="1", COMMWATCH_JOB="job", **rank, **more)


def front(directory: Path) -> str:
    """The file that says which version counts."""
    return (directory / "commwatch" / "__init__.py").read_text()


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and when it was written."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on another version is installed: one with a module that shows which it is."""
    parts = probe_folder.parts()
    changed = PurePath("commwatch/wire/c10d_table.py")
    marked = {changed: parts[changed] + b"\nNEW = True\n"}
    monkeypatch.setattr(probe_folder, "parts", lambda: {**parts, **marked})


def test_trainer_without_commwatch(python: Path, tmp_path: Path) -> None:
    """With the folder on PYTHONPATH and COMMWATCH=1 a bare Python records, and without the folder it has no commwatch."""
    done = commwatch("probe", "install", tmp_path / "probe")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert f"PYTHONPATH={tmp_path / 'probe'} COMMWATCH=1" in done.stdout
    env = trainer_env(tmp_path / "probe", COMMWATCH_DIR=str(tmp_path / "run"), COMMWATCH_HOOK="python")
    ran = subprocess.run([python, "-c", TRAIN], env=env, cwd="/", capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    (rank,) = read_rings(tmp_path / "run")
    assert [rank.op(record) for record in rank.operations] == ["all_reduce"]
    without = subprocess.run(
        [python, "-c", "import commwatch"], env=clean_env(), cwd="/", capture_output=True, check=False
    )
    assert b"No module named 'commwatch'" in without.stderr


def test_python_api(python: Path, tmp_path: Path) -> None:
    """The Python API comes along: without an agent, it has no figures and raises nothing."""
    install(tmp_path / "probe")
    code = "import commwatch as c; print(c.metrics(), list(c.summary()), c.last_step(), c.Client('node:1').url)"
    env = clean_env(PYTHONPATH=str(tmp_path / "probe"), COMMWATCH_DIR=str(tmp_path))
    ran = subprocess.run([python, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("{} [] None http://node:1\n", "")


@pytest.mark.parametrize("version", [__version__, "0.0.1"])
def test_commands_beside_it(version: str, tmp_path: Path) -> None:
    """A command that finds the probe of any version first on its path uses its own modules."""
    install(tmp_path / "probe")
    front = tmp_path / "probe" / "commwatch" / "__init__.py"
    front.write_text(front.read_text().replace(__version__, version))
    env = clean_env(PYTHONPATH=str(tmp_path / "probe"))
    assert _version([sys.executable, "-c", "import commwatch; print(commwatch.__version__)"], env) == version
    program = str(Path(sys.executable).with_name("commwatch"))
    for command in ([program], [sys.executable, "-m", "commwatch"], [sys.executable, "-m", "commwatch_agent"]):
        assert _version([*command, "--version"], env) == f"commwatch {__version__}"


def _version(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=True).stdout.strip()


def test_another_commwatch_first(tmp_path: Path) -> None:
    """The commands do not even run what another package of the name has, such as one in the current folder."""
    (tmp_path / "commwatch").mkdir()
    (tmp_path / "commwatch" / "__init__.py").write_text("raise SystemExit('theirs')")
    env = clean_env(PYTHONPATH=str(tmp_path))
    for command in ([str(Path(sys.executable).with_name("commwatch"))], [sys.executable, "-m", "commwatch_agent"]):
        assert _version([*command, "--version"], env) == f"commwatch {__version__}"


def test_another_version_in_use(tmp_path: Path) -> None:
    """The agent begins in a process that uses the probe if that is a copy of its own, and otherwise gives the remedy in one line."""
    install(tmp_path / "probe")
    code = "import commwatch.wire.ring\ntry: import commwatch_agent; print('begun')\nexcept ImportError as error: print(error)"
    env = clean_env(PYTHONPATH=str(tmp_path / "probe"))
    assert _version([sys.executable, "-c", code], env) == "begun"
    (changed,) = (tmp_path / "probe").glob(".commwatch-*/commwatch/wire/variables.py")
    changed.write_text(f"{changed.read_text()}\n")
    said = _version([sys.executable, "-c", code], env)
    assert str(tmp_path / "probe") in said
    assert "PYTHONPATH" in said
    assert "\n" not in said


def test_native_hook(python: Path, tmp_path: Path) -> None:
    """The sources of the native hook come along: the bare Python looks for a built one under the same name as a whole commwatch."""
    install(tmp_path / "probe")
    code = "from commwatch.probe.native import library as l; print(l.folder({'HOME': '/h'}, l.torch_facts()))"
    found = [
        subprocess.run([at, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=True).stdout
        for at, env in ((str(python), clean_env(PYTHONPATH=str(tmp_path / "probe"))), (sys.executable, clean_env()))
    ]
    assert found[0] == found[1] != ""
    status = [str(python), "-m", "commwatch.probe.native.build", "status", "--json"]
    said = subprocess.run(
        status, env=clean_env(PYTHONPATH=str(tmp_path / "probe")), cwd="/", capture_output=True, text=True, check=False
    )
    assert json.loads(said.stdout)["torch"], said.stderr


def test_every_module_of_the_trainer() -> None:
    """The whole package `commwatch` comes along, with the sources of what is built there, and nothing of the agent."""
    here = [path for path in (TREE / "collectors" / "commwatch").rglob("*.*") if path.suffix != ".pyc"]
    assert len(here) > 80
    assert {path.relative_to("commwatch") for path in probe_folder.parts() if path.parts[0] == "commwatch"} == {
        PurePath(path.relative_to(TREE / "collectors" / "commwatch")) for path in here
    }
    assert {path.parts[0] for path in probe_folder.parts()} <= {"commwatch", "commwatch-0.dist-info", "commwatch_hooks"}


def test_twice_changes_nothing(tmp_path: Path) -> None:
    """A second run writes no file and leaves nothing else behind."""
    install(tmp_path)
    before = tree(tmp_path)
    assert install(tmp_path) == tmp_path
    assert tree(tmp_path) == before


def test_readable_for_others(tmp_path: Path) -> None:
    """Whatever the umask, other users may read all of it, and write none."""
    old = os.umask(0o077)
    try:
        install(tmp_path / "new" / "probe")
    finally:
        os.umask(old)
    for path in (tmp_path / "new" / "probe").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
    assert stat.S_IMODE((tmp_path / "new" / "probe").stat().st_mode) == 0o755


def test_upgrade_under_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has begun to import goes on with the old version, though another has come; who begins afterwards has the new one."""
    install(tmp_path)
    code = "import commwatch, sys; print('begun', flush=True); sys.stdin.readline(); import commwatch.wire.c10d_table as t; print(hasattr(t, 'NEW'))"
    begun = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert begun.stdout is not None
    assert begun.stdout.readline() == "begun\n"
    other_version(monkeypatch)
    install(tmp_path)
    assert begun.communicate("go\n", timeout=60)[0] == "False\n"
    fresh = [sys.executable, "-S", "-c", "import commwatch.wire.c10d_table as t; print(hasattr(t, 'NEW'))"]
    done = subprocess.run(fresh, env={"PYTHONPATH": str(tmp_path)}, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_many_at_once(tmp_path: Path) -> None:
    """Several that install at the same time leave one whole probe, and nothing of their own."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: commwatch("probe", "install", tmp_path), range(8)))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".commwatch-")) == [
        "commwatch",
        "commwatch-0.dist-info",
    ]
    (whole,) = tmp_path.glob(".commwatch-*")
    assert {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()} == {
        path.as_posix() for path in probe_folder.parts()
    }
    assert [path.name for path in (tmp_path / "commwatch").iterdir()] == ["__init__.py"]


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks off in the middle leaves the version before in force."""
    install(tmp_path)
    before = tree(tmp_path)
    other_version(monkeypatch)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CannotInstall, match="No space left"):
        install(tmp_path)
    assert tree(tmp_path) == before


def test_one_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever versions were there, Python finds one distribution, with our version and the entry point that torch looks for."""
    install(tmp_path)
    newer = {name: text.replace(__version__, "9.9.9") for name, text in probe_folder._ABOUT.items()}
    monkeypatch.setattr(probe_folder, "_ABOUT", newer)
    install(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("commwatch", "9.9.9")
    ((group, value),) = [(each.group, each.value) for each in found.entry_points]
    assert (group, value) == ("torch.backends", "commwatch.torch_entry:autoload")
    pyproject = (TREE / "pyproject.toml").read_text()
    assert f'[project.entry-points."{group}"]\ncommwatch = "{value}"' in pyproject


def test_refused(tmp_path: Path) -> None:
    """One line refuses a directory with another commwatch, a path that cannot be written, and a colon, which PYTHONPATH cannot contain."""
    theirs = tmp_path / "site" / "commwatch"
    theirs.mkdir(parents=True)
    shutil.copy(TREE / "collectors" / "commwatch" / "__init__.py", theirs)
    (tmp_path / "file").touch()
    for place, says in (
        (tmp_path / "site", "choose another"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path / "a:b", "':'"),
    ):
        done = commwatch("probe", "install", place)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert says in done.stderr
    assert front(tmp_path / "site") == (TREE / "collectors" / "commwatch" / "__init__.py").read_text()


def test_folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`commwatch run` makes the folder once for each version; it is complete again if files of it were removed."""
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = probe_folder.of_user(env)
    before = tree(tmp_path)
    assert probe_folder.of_user(env) == folder
    assert tree(tmp_path) == before
    assert {PurePath(name) for name in tree(folder)} == set(probe_folder.parts())
    (folder / "commwatch" / "wire" / "ring.py").unlink()
    (folder / "commwatch" / "wire" / "events.py").write_bytes(b"")
    kept = (folder / "commwatch" / "wire" / "mapping.py").stat().st_ino
    assert {name: text for name, (_, text) in tree(probe_folder.of_user(env)).items()} == {
        str(name): text for name, text in probe_folder.parts().items()
    }
    assert (folder / "commwatch" / "wire" / "mapping.py").stat().st_ino == kept  # a trainer may use it
    other_version(monkeypatch)
    assert probe_folder.of_user(env) != folder
    assert folder.is_dir()


def test_umask_of_a_group(tmp_path: Path) -> None:
    """The folders that are made for it let no group write, whatever the umask; otherwise the next run would refuse them."""
    old = os.umask(0o002)
    try:
        folder = probe_folder.of_user({"XDG_CACHE_HOME": str(tmp_path / "home" / "cache")})
        assert probe_folder.of_user({"XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}) == folder
    finally:
        os.umask(old)
    for made in folder.parents[: folder.parents.index(tmp_path)]:
        assert not made.stat().st_mode & 0o022, made


def test_relative_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job may change its folder: the path is absolute."""
    monkeypatch.chdir(tmp_path)
    assert probe_folder.of_user({"XDG_CACHE_HOME": "cache"}).is_relative_to(tmp_path)


def test_no_folder_of_a_user(tmp_path: Path) -> None:
    """A cache that is missing, cannot be written, or that others can write to is refused in one line."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others").chmod(0o777)
    wrong: tuple[dict[str, str], ...] = (
        {},
        *({"XDG_CACHE_HOME": name} for name in ("/proc/1", str(tmp_path / "others"), f"{tmp_path}:b")),
    )
    for env in wrong:
        with pytest.raises(CannotInstall) as refused:
            probe_folder.of_user(env)
        assert "\n" not in str(refused.value)
        assert probe_folder.on_path({**env, "PYTHONPATH": "/mine"}) == {**env, "PYTHONPATH": "/mine"}


def test_hooks_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prebuilt hooks that are installed beside the agent are found with the folder on the path; another version replaces them."""
    hooks = tmp_path / "site" / "commwatch_hooks" / "torch-1.0"
    hooks.mkdir(parents=True)
    (hooks.parent / "__init__.py").touch()
    (tmp_path / "job" / "commwatch_hooks").mkdir(parents=True)  # of another version, on the path of a job
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "job"))
    for place in ("site", "job"):
        monkeypatch.syspath_prepend(str(tmp_path / place))
    code = "import commwatch_hooks; print(open(commwatch_hooks.__path__[0] + '/torch-1.0/hook.so').read())"
    for content in ("first", "second"):
        (hooks / "hook.so").write_text(content)
        for folder in (install(tmp_path / "probe"), probe_folder.of_user({"XDG_CACHE_HOME": str(tmp_path / "cache")})):
            assert _version([sys.executable, "-c", code], {"PYTHONPATH": str(folder)}) == content
        assert not list((tmp_path / "probe").glob(".commwatch_hooks-*"))
