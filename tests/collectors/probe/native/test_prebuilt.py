"""Hooks that come in a wheel: made as ``make hooks`` makes it, installed, checked, and used without a compiler.

The wheel is packed from the hook that the session has built, so that nothing is compiled here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commwatch.probe.native import build, library
from commwatch.probe.native.library import NotAvailable
from commwatch_agent.deploy import hooks_wheel
from commwatch_agent.deploy.hooks_wheel import glibc_of, packed, write
from tests.e2e.torchjob import read_rings
from tests.helpers import clean_env, free_port

TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""
RECIPE = {"compiler": "g++", "version": "g++ 1", "flags": ""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, native: Path) -> Path:
    """The wheel for this torch."""
    plugin = next(native.parent.glob("nccl-*.so"))
    files = packed(Path(torch.__file__).parent, native.read_bytes(), plugin.read_bytes(), RECIPE, 1.0)
    return write(files, glibc_of([native, plugin]), tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def by_pip(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pip has installed the wheel, to copy."""
    site = tmp_path_factory.mktemp("pip") / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, env=clean_env(PIP_DISABLE_PIP_VERSION_CHECK="1"))
    return site


@pytest.fixture
def installed(by_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel, installed in a folder of the path; returns the folder of this torch."""
    site = tmp_path / "site"
    shutil.copytree(by_pip, site)
    monkeypatch.syspath_prepend(str(site))
    (found,) = (site / library.PACKAGE).glob("torch-*")
    return found


def bare_env(tmp_path: Path, **more: str) -> dict[str, str]:
    """No compiler, an empty cache, and the wheel."""
    return clean_env(
        PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path / "site"),
        COMMWATCH_DIR=str(tmp_path / "run"), **more,
    )  # fmt: skip


def test_used_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    """A job in an environment without a compiler records with the hook of the wheel, and status names it."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = bare_env(tmp_path, COMMWATCH="1", COMMWATCH_HOOK="native", COMMWATCH_JOB="job", **rank)
    ran = subprocess.run([sys.executable, "-c", TRAIN], env=env, cwd="/", capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    (rank_records,) = read_rings(tmp_path / "run")
    assert rank_records.identity["hook"] == "native"
    assert [rank_records.op(record) for record in rank_records.operations] == ["all_reduce"]
    status = [sys.executable, "-m", "commwatch", "native", "status"]
    said = subprocess.run(status, env=bare_env(tmp_path), cwd="/", capture_output=True, text=True, check=False)
    assert said.returncode == 0
    assert str(Path("commwatch_hooks", installed.name, "hook.so")) in said.stdout
    assert not library.cache_dir(bare_env(tmp_path)).exists()


def test_tried_before_a_job(installed: Path, tmp_path: Path) -> None:
    """`native build` tries it in a process of its own and keeps a copy, so that it is tried once; one that fails is not used."""
    env = {**os.environ, **bare_env(tmp_path)}
    path = build.ensure(env)
    assert path.parent == library.folder(env, library.torch_facts())
    assert path.read_bytes() == (installed / "hook.so").read_bytes()
    assert library.plugin_beside(*library.find(env, library.torch_facts())) is not None
    (installed / "hook.so").unlink()
    assert build.ensure(env) == path


@pytest.mark.long  # test_build has that of a hook that was built here
def test_one_that_does_not_work(installed: Path, tmp_path: Path) -> None:
    """A hook that fails its trial is not used, though its checksum is right: the compiler is needed."""
    env = {**os.environ, **bare_env(tmp_path)}
    (installed / "hook.so").write_bytes(b"not a library")
    changed(installed, sha256=hashlib.sha256(b"not a library").hexdigest())
    with pytest.raises(NotAvailable, match="no C\\+\\+ compiler"):
        build.ensure(env)


def changed(where: Path, **entries: str) -> None:
    """Change the manifest."""
    manifest = json.loads((where / library.MANIFEST).read_text())
    (where / library.MANIFEST).write_text(json.dumps({**manifest, **entries}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda where: changed(where, git_version="0" * 40),
        lambda where: changed(where, sources="0" * 16),
        lambda where: changed(where, machine="riscv64"),
        lambda where: changed(where, sha256="0" * 64),
        lambda where: (where / library.MANIFEST).write_text("{"),
        lambda where: (where / library.MANIFEST).unlink(),
        lambda where: (where / "hook.so").chmod(0o666),
        lambda where: where.rename(where.with_name("torch-1.0.0")),
    ],
    ids=["torch", "sources", "machine", "damaged", "manifest", "no_manifest", "writable", "version"],
)
def test_not_used(spoil: Callable[[Path], object], installed: Path, tmp_path: Path) -> None:
    """A hook for another torch, machine or commwatch, a damaged one, and one that others can change are not used, which the reason says."""
    facts: dict[str, Any] = library.torch_facts()
    assert library.prebuilt(facts) is not None
    spoil(installed)
    assert library.prebuilt(facts) is None
    with pytest.raises(NotAvailable, match="the installed commwatch-hooks has none that works with torch"):
        library.find(bare_env(tmp_path), facts)


def test_for_an_installed_torch(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of an installed torch, given from the working directory, is built for as it is, and nothing is downloaded."""
    torch_folder, plugin = Path(torch.__file__).parent, next(native.parent.glob("nccl-*.so"))

    def build(folder: Path, where: Path) -> dict[str, bytes]:
        assert folder == torch_folder
        for library_file, name in ((native, "hook.so"), (plugin, "nccl.so")):
            shutil.copy(library_file, where / name)
        return packed(folder, native.read_bytes(), plugin.read_bytes(), RECIPE, 1.0)

    monkeypatch.setattr(hooks_wheel, "build", build)
    monkeypatch.setattr(hooks_wheel, "unpacked", None)
    monkeypatch.chdir(torch_folder.parent)
    monkeypatch.setattr(sys, "argv", ["hooks_wheel", "--out", str(tmp_path), torch_folder.name])
    with pytest.raises(SystemExit) as ended:
        hooks_wheel.main()
    assert ended.value.code == 0
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        assert any(name.endswith(f"{torch.__version__.partition('+')[0]}/hook.so") for name in archive.namelist())


def test_wheel(wheel: Path, tmp_path: Path) -> None:
    """The wheel does not need the agent; it says which machine it is for, and a C library that is no newer than the one here."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (about,) = tmp_path.glob("*.dist-info")
    metadata = importlib.metadata.PathDistribution(about)
    assert metadata.requires is None
    recorded = {str(file): file.hash for file in metadata.files or ()}
    assert {name for name in recorded if name.endswith(".so")} == {
        f"{library.PACKAGE}/torch-{torch.__version__.partition('+')[0]}/{name}.so" for name in ("hook", "nccl")
    }
    tag = wheel.stem.rpartition("-")[2]
    here = tuple(int(part) for part in os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))  # type: ignore[union-attr]
    needed = tuple(int(part) for part in tag.split("_")[1:3])
    assert (2, 17) <= needed <= here
    assert shutil.which("objdump") is not None
