"""Where things live: a room imports only rooms before it, and what loads in the trainer only its own."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from commwatch.deploy.probe_bundle import parts

TREE = Path(__file__).parents[1]
FOLDERS = {
    "commwatch.collectors": "collectors",
    "commwatch.alerts": "alerts",
    "commwatch.dashboards": "dashboards",
    "commwatch": "agent",
}
#: Rooms of ``agent/``, and the modules beside them, in their order: each may import those before it, and its own room.
ORDER = (
    ("core",), ("reference",), ("history",), ("ingest",), ("analysis",), ("nodes",), ("whatif",), ("prometheus",), ("report",), ("comparison",),
    ("config", "config_checks", "reload"), ("runtime",), ("api",), ("integrations",),
    ("watchers",), ("alerting",), ("otlp",), ("deploy",), ("commands",), ("server",), ("daemon",), ("cli",), ("__main__",),
)  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
#: What each of the other packages may import of ours.
MAY_IMPORT = {
    "commwatch.collectors": ("commwatch.collectors",),
    "commwatch.alerts": ("commwatch.alerts", "commwatch.collectors"),
    "commwatch.dashboards": ("commwatch.dashboards", "commwatch.alerts"),
}
MOST_FILES, MOST_AT_THE_ROOT = 25, 6


def _module(file: Path) -> str:
    """``agent/core/views.py``: ``commwatch.core.views``; a package is named without its ``__init__``."""
    package, folder = next(item for item in FOLDERS.items() if file.is_relative_to(TREE / item[1]))
    parts = file.relative_to(TREE / folder).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


MODULES = {_module(file): file for folder in FOLDERS.values() for file in sorted((TREE / folder).rglob("*.py"))}


def _imports(file: Path) -> Iterator[str]:
    """Full names of all that a file imports, wherever in it: in functions and for type checkers, too, which a reader follows as well."""
    for each in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(each, ast.Import):
            yield from (alias.name for alias in each.names)
        elif isinstance(each, ast.ImportFrom):
            assert each.level == 0, f"{each.module}: relative import"
            yield from (f"{each.module}.{alias.name}" for alias in each.names)


def _ours(file: Path) -> set[str]:
    """The modules of ours that a file imports."""
    names = (name if name in MODULES else name.rpartition(".")[0] for name in _imports(file))
    return {name for name in names if name in MODULES and name != "commwatch"}


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _rank(module: str) -> int | None:
    """Place in the order; ``None`` for what belongs to no room of the agent."""
    return RANK.get(module.split(".")[1]) if module != "commwatch" and not _within(module, tuple(MAY_IMPORT)) else None


def test_rooms_in_order() -> None:
    """A room of the agent imports nothing from a room after it."""
    ranks = {module: _rank(module) for module in MODULES}
    assert {module for module, rank in ranks.items() if rank is None and not _within(module, tuple(MAY_IMPORT))} == {
        "commwatch"
    }
    wrong = [
        f"{module} imports {other}"
        for module, rank in ranks.items()
        for other in _ours(MODULES[module])
        if rank is not None and (ranks[other] or 0) > rank
    ]
    assert wrong == []


def test_no_cycles() -> None:
    """No module imports itself by way of others, be it later, in a function, or for its types."""
    TopologicalSorter({module: _ours(file) - {module} for module, file in MODULES.items()}).prepare()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_beside_the_agent(package: str) -> None:
    """Collectors, alerts and dashboards import nothing of the agent."""
    files = [file for module, file in MODULES.items() if _within(module, (package,))]
    names = [(file.name, name) for file in files for name in _imports(file) if _within(name, ("commwatch",))]
    assert [pair for pair in names if not _within(pair[1], MAY_IMPORT[package])] == []


def test_only_builders_import_grafanas_sdk() -> None:
    """Exporting dashboards needs no package but ours."""
    assert not any(_within(name, ("grafana_foundation_sdk",)) for name in _imports(TREE / "dashboards" / "export.py"))


@pytest.mark.parametrize(("room", "may"), [("wire", ()), ("probe", ("torch",))])
def test_trainer_needs_only_torch(room: str, may: tuple[str, ...]) -> None:
    """What loads in the trainer imports the standard library and its own two rooms; the probe, torch, too."""
    rooms = ("commwatch.collectors.wire", "commwatch.collectors.probe")[: 1 if room == "wire" else 2]
    allowed = (*sys.stdlib_module_names, *may, *rooms)
    entry = [TREE / "collectors" / "torch_entry.py"] if room == "probe" else []
    files = [*(TREE / "collectors" / room).rglob("*.py"), *entry]
    assert len(files) >= 9
    assert {
        file.name: wrong for file in files if (wrong := [n for n in _imports(file) if not _within(n, allowed)])
    } == {}


def test_rooms_are_small() -> None:
    """No folder has too many files for a reader, and the agent's root has the fewest."""
    files = chain.from_iterable((TREE / folder).rglob("*.py") for folder in FOLDERS.values())
    counted = Counter(file.parent.relative_to(TREE) for file in files if file.name != "__init__.py")
    assert counted.pop(Path("agent")) <= MOST_AT_THE_ROOT
    assert {str(folder): count for folder, count in counted.items() if count > MOST_FILES} == {}


def test_api_needs_only_the_bundle() -> None:
    """The Python API imports the standard library and what the probe-only installation has; pandas and pyarrow where users ask for them."""
    names = {".".join(("commwatch", *file.with_suffix("").parts)).removesuffix(".__init__") for file in parts()}
    api = {
        name: MODULES[name] for name in names if _within(name, ("commwatch.api", "commwatch.core", "commwatch.runtime"))
    }
    assert "commwatch.api.training" in api
    allowed = (*sys.stdlib_module_names, "pandas", "pyarrow", *(name for name in names if name.count(".") > 1))
    wrong = {name: [each for each in _imports(file) if not _within(each, allowed)] for name, file in api.items()}
    assert {name: found for name, found in wrong.items() if found and found != ["commwatch"]} == {}
