"""What is shipped: wheel and sdist of a clean copy of the tree, installed where neither the tree nor torch is."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from commwatch import __version__
from commwatch_agent.__main__ import NEEDED
from commwatch_agent.deploy import hooks_wheel
from tests.helpers import PATIENCE_S, clean_env, wait_for

TREE = Path(__file__).parents[1]
#: Folder of the tree -> the packages in it.
PACKAGES = {
    "collectors": ("commwatch", "commwatch_collectors"),
    "agent": ("commwatch_agent",),
    "alerts": ("commwatch_alerts",),
    "dashboards": ("commwatch_dashboards",),
}


def run(*command: str | Path, cwd: Path) -> str:
    """A command's standard output; fails with all of its output if the command fails."""
    env = clean_env(PIP_DISABLE_PIP_VERSION_CHECK="1")
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def listed() -> list[str]:
    """The files that are tracked by git."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=TREE, capture_output=True, text=True, check=True).stdout
    return [name for name in names.split("\0") if name and (TREE / name).is_file()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without anything git does not know."""
    copy = tmp_path_factory.mktemp("tree")
    for name in listed():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sdist, and the wheel made from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, cwd=copy)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def environment(directory: Path, *install: str | Path) -> Path:
    """The Python of a fresh virtual environment with something installed in it, which is compiled where it is imported."""
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    python = directory / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    run(*pip, *install, cwd=directory.parent)
    return python


def linked(directory: Path, source: Path) -> Path:
    """The Python of such an environment with commwatch, and with links to the packages here that this requires."""
    python = environment(directory, "--no-deps", source)
    (site,) = directory.glob("lib/python*/site-packages")
    (ours,) = importlib.metadata.distributions(name="commwatch", path=[str(site)])
    for each in required(ours):
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(each.locate_file(top)))
    return python


def required(by: Distribution) -> list[Distribution]:
    """The packages that one requires, at any remove; not those of its extras."""
    waiting, found = [by], dict[str, Distribution]()
    while waiting:
        for need in map(Requirement, waiting.pop().requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                each = importlib.metadata.distribution(need.name)
                if each.name not in found:
                    found[each.name] = each
                    waiting.append(each)
    return list(found.values())


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it depends on."""
    return linked(tmp_path_factory.mktemp("wheel") / "venv", built[1])


@pytest.mark.long
def test_dependencies_can_be_installed(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The wheel is installed with all that it requires."""
    python = environment(tmp_path / "venv", built[1])
    run(sys.executable, "-m", "pip", "--python", python, "check", cwd=tmp_path)
    assert run(python, "-m", "commwatch", "config", "show", cwd=tmp_path)


def test_wheel_has_every_file(built: tuple[Path, Path]) -> None:
    """Every file of the packages is in the wheel under the name that it is imported by, and nothing beside them."""
    inside = set(zipfile.ZipFile(built[1]).namelist())
    split = (name.partition("/") for name in listed())
    expected = {rest for folder, _, rest in split if rest.partition("/")[0] in PACKAGES.get(folder, ())}
    assert len(expected) > 400
    assert {name for name in inside if ".dist-info/" not in name} == expected
    assert {name.partition("/")[0] for name in expected if name.endswith("/py.typed")} == set().union(
        *PACKAGES.values()
    )
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)


def test_extra_with_hooks(built: tuple[Path, Path]) -> None:
    """The extra `hooks` requires the wheel of hooks in the version of commwatch: a hook works with the sources that it was built from."""
    with zipfile.ZipFile(built[1]) as archive:
        about = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(about).decode().splitlines()
    (found,) = (Requirement(line.partition(": ")[2]) for line in lines if "extra == 'hooks'" in line)
    assert found.name == hooks_wheel.NAME
    assert str(found.specifier) == f"=={__version__}"


def test_sdist_has_what_a_build_needs(built: tuple[Path, Path]) -> None:
    """The sdist holds the tests, examples and documents too, and nothing git does not know."""
    with tarfile.open(built[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames() if name.count("/")}
    known = set(listed())
    assert {name for name in known if name.startswith((*PACKAGES, "tests/", "docs/", "examples/", "deploy/"))} <= inside
    assert inside - known == {"PKG-INFO"}


def test_agent_runs_without_torch(installed: Path, tmp_path: Path) -> None:
    """Where only the wheel is installed, `commwatch agent` runs and answers; there is no torch, and nothing is ours beside commwatch."""
    modules = json.loads(
        run(
            installed,
            "-c",
            "import importlib.util, json; print(json.dumps({name: importlib.util.find_spec(name) is not None "
            "for name in ('torch', 'numpy', 'agent', 'collectors', 'alerts', 'dashboards', 'tests', 'bench', 'commwatch')}))",
            cwd=tmp_path,
        )
    )
    assert [name for name, found in modules.items() if found] == ["numpy", "commwatch"]
    command = [str(installed.with_name("commwatch")), "agent", "--dir", str(tmp_path / "run"), "--port", "0"]
    env = clean_env()
    env.pop("PYTHONPATH", None)
    process = subprocess.Popen(command, cwd=tmp_path, env=env)
    try:
        wait_for((tmp_path / "run" / "agent.json").exists, "the agent")
        url = json.loads((tmp_path / "run" / "agent.json").read_text())["url"]
        for path, expected in (("/healthz", "ok"), ("/docs", "/api/v1/summary"), ("/metrics", "commwatch_build_info")):
            with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as response:
                assert expected in response.read().decode()
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert run(installed, "-m", "commwatch", "--version", cwd=tmp_path).startswith("commwatch ")


def test_install_says_that_torch_is_missing(installed: Path, tmp_path: Path) -> None:
    """Without torch `commwatch.install()` raises ImportError, and `commwatch.step()` does nothing."""
    code = (
        "import commwatch; commwatch.step()\ntry: commwatch.install()\nexcept ImportError as error: print(error.name)"
    )
    assert run(installed, "-c", code, cwd=tmp_path) == "torch\n"


def test_import_is_light() -> None:
    """`import commwatch` brings in no web framework, no numpy, no torch, no driver's library, no drawing on terminals."""
    heavy = "amdsmi fastapi isal numpy prometheus_client promql_parser psutil pydantic pynvml rich starlette torch uvicorn yaml"
    code = f"import sys, commwatch; print(sorted(set({heavy!r}.split()) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@cache
def loaded() -> frozenset[str]:
    """The packages in a new Python that has imported an agent and what runs around a job."""
    code = "import sys, commwatch_agent.commands.run, commwatch_agent.daemon; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return frozenset(name.partition(".")[0] for name in done.stdout.split())


def test_idle_agent_is_light() -> None:
    """An agent that has read no records pays no memory for numpy, and one whose runbook is not read none for Markdown."""
    assert "commwatch_agent" in loaded()
    assert {"numpy", "markdown_it"} & loaded() == set()


def test_counting_imports_no_masked_arrays(tmp_path: Path) -> None:
    """Joining what comes in several reads does not load numpy's masked arrays, as some functions of numpy do at their first call."""
    code = f"""if True:
        import sys, threading, time
        from pathlib import Path
        from bench.synthetic import Rank
        from commwatch_agent.history.store import Writer
        from commwatch_agent.ingest.intake import Intake
        from commwatch_agent.ingest.jobs import JobTable
        at, directory = time.monotonic_ns(), Path({str(tmp_path)!r})
        ranks = [Rank(directory / "rings", rank, at, 2000) for rank in range(8)]
        intake = Intake(directory / "rings", JobTable(), Writer(directory / "history.sqlite"), threading.RLock())
        for until in range(1, 9):
            for rank in ranks:
                rank.write_until(at + 10_000_000 * until)
                intake.tick(at + 10_000_000 * until, time.time_ns())
        assert intake.read, "no records were read"
        print("numpy" in sys.modules, "numpy.ma" in sys.modules)
    """
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=TREE).stdout == "True False\n"


def test_only_top_imports_rich() -> None:
    """What runs beside a job, and the help, do not pay for the import of rich."""
    command = [sys.executable, "-X", "importtime", "-m", "commwatch", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "commwatch" in imported
    assert "rich" not in imported
    assert "rich" not in loaded()


def test_settings_are_light() -> None:
    """Reading settings brings in no pydantic, not even for receivers, so commands that need none start quickly."""
    code = "import sys, commwatch_agent.config_sources as c; c.load({'HOME': '/', 'COMMWATCH_RECEIVERS': '[]'}); print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_run_is_light() -> None:
    """`commwatch run` begins without pydantic, so that the job starts quickly."""
    code = "import sys, commwatch_agent.cli, commwatch_agent.commands.run; print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.long
def test_editable_install(copy: Path, tmp_path: Path) -> None:
    """A new module of each package is imported at once in an editable environment, and an edit is seen."""
    python = environment(tmp_path / "venv", "--no-deps", "--editable", copy)
    folders = {package: copy / folder / package for folder, packages in PACKAGES.items() for package in packages}
    for folder in folders.values():
        (folder / "new_module.py").write_text("WHERE = __file__\n")
        with (folder / "__init__.py").open("a") as file:
            file.write("\nEDITED = True\n")
    try:
        for package, folder in folders.items():
            code = f"import {package}, {package}.new_module as new; print({package}.EDITED, new.WHERE)"
            assert run(python, "-c", code, cwd=tmp_path) == f"True {folder / 'new_module.py'}\n"
    finally:
        for folder in folders.values():
            (folder / "new_module.py").unlink()
    (path,) = (tmp_path / "venv").glob("lib/python*/site-packages/*commwatch*.pth")
    assert sorted(path.read_text().split()) == sorted(str(copy / folder) for folder in PACKAGES)


def test_import_without_anything(installed: Path, tmp_path: Path) -> None:
    """Where there is nothing but Python, `import commwatch` and its queries import the standard library and themselves."""
    run(installed, "-m", "commwatch", "probe", "install", tmp_path / "probe", cwd=tmp_path)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare", cwd=tmp_path)
    code = f"""if True:
        import sys
        before = set(sys.modules)
        sys.path.insert(0, {str(tmp_path / "probe")!r})
        import commwatch
        light = set(sys.modules) - before
        commwatch.summary(), commwatch.Client("node:1")
        print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)))
        print(*sorted(name for name in light if name not in sys.stdlib_module_names))
    """
    assert run(tmp_path / "bare" / "bin" / "python", "-c", code, cwd=tmp_path) == "commwatch\ncommwatch\n"


def test_every_dependency_has_the_remedy() -> None:
    """Each package that the agent needs is one without which its commands print that only the probe is installed."""
    needs = (Requirement(text) for text in importlib.metadata.requires("commwatch") or ())
    names = {need.name.lower() for need in needs if "extra" not in str(need.marker)}
    modules: dict[str, list[str]] = {}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for name in distributions:
            modules.setdefault(name.lower(), []).append(module)
    found = {name: modules[name] for name in names & modules.keys()}
    assert len(found) >= 11
    assert {name: made for name, made in found.items() if not set(made) & set(NEEDED)} == {}
