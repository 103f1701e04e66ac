"""Where things live: a room imports only rooms before it, what loads in the trainer only its own, and no module imports itself by way of others."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
#: Folder of each package.
PACKAGES = {
    "commwatch": TREE / "collectors" / "commwatch",
    "commwatch_collectors": TREE / "collectors" / "commwatch_collectors",
    "commwatch_agent": TREE / "agent" / "commwatch_agent",
    "commwatch_alerts": TREE / "alerts" / "commwatch_alerts",
    "commwatch_dashboards": TREE / "dashboards" / "commwatch_dashboards",
}
#: Rooms of the agent, and the modules beside them, in their order: each may import those before it, and its own room.
ORDER = (
    ("text",), ("model",), ("reference",), ("history",), ("ingest",), ("analysis",), ("job",), ("incidents",), ("whatif",),
    ("prometheus",), ("report",), ("compare",),
    ("config", "config_checks", "config_sources"), ("runtime",),
    ("sources",), ("notify",), ("questions",), ("otlp",), ("deploy",), ("commands",), ("proof",), ("web",), ("daemon",), ("cli",), ("__main__",),
)  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
#: What each of the other packages may import of ours.
MAY_IMPORT = {
    "commwatch": ("commwatch",),
    "commwatch_collectors": ("commwatch_collectors", "commwatch.wire"),
    "commwatch_alerts": ("commwatch_alerts", "commwatch.wire"),
    "commwatch_dashboards": ("commwatch_dashboards", "commwatch_alerts", "commwatch.wire"),
}
#: Hands over to the agent, or prints what is missing.
HANDS_OVER = "commwatch.__main__"
#: What the rooms of ``commwatch`` may import besides the standard library; users bring the packages of the last two.
TRAINER = {
    "wire": ("commwatch.wire",),
    "probe": ("commwatch.wire", "commwatch.probe", "torch"),
    "nccl_plugin": ("commwatch.wire", "commwatch.nccl_plugin"),
    "api": ("commwatch.wire", "commwatch.probe", "commwatch.api", "pandas", "pyarrow"),
    "integrations": ("commwatch", "lightning", "pytorch_lightning", "transformers", "accelerate", "torch"),
}
MOST_FILES, MOST_AT_THE_ROOT = 25, 6


def _module(package: str, file: Path) -> str:
    """``agent/commwatch_agent/model/views.py``: ``commwatch_agent.model.views``; a package is named without its ``__init__``."""
    parts = file.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


MODULES = {
    _module(package, file): file for package, folder in PACKAGES.items() for file in sorted(folder.rglob("*.py"))
}


@cache
def _imports(file: Path) -> frozenset[str]:
    """Full names of all that a file imports, wherever in it, also what only type checkers see."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _ours(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    names = (name if name in MODULES else name.rpartition(".")[0] for name in _imports(MODULES[module]))
    return {name for name in names if name in MODULES} - {module}


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _of_ours(file: Path) -> Iterator[str]:
    return (name for name in _imports(file) if name.split(".")[0] in PACKAGES)


def test_rooms_in_order() -> None:
    """A room of the agent imports nothing from a room after it, not even for types."""
    rooms = {module: module.split(".")[1] for module in MODULES if module.startswith("commwatch_agent.")}
    assert set(rooms.values()) == set(RANK)
    wrong = [
        f"{module} imports {other}"
        for module, room in rooms.items()
        for other in _ours(module)
        if other in rooms and RANK[rooms[other]] > RANK[room]
    ]
    assert wrong == []


def test_no_cycles() -> None:
    """No module imports itself by way of others, also counting imports for types and inside functions."""
    graph = {module: _ours(module) for module in MODULES if module != HANDS_OVER}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_beside_the_agent(package: str) -> None:
    """What loads in the trainer, collectors, alerts and dashboards import nothing of the agent."""
    files = {module: file for module, file in MODULES.items() if _within(module, (package,)) and module != HANDS_OVER}
    assert len(files) > 3
    names = [(module, name) for module, file in files.items() for name in _of_ours(file)]
    assert [pair for pair in names if not _within(pair[1], MAY_IMPORT[package])] == []


def test_only_builders_import_grafanas_sdk() -> None:
    """Exporting dashboards needs no package but ours."""
    export = MODULES["commwatch_dashboards.export"]
    assert not any(_within(name, ("grafana_foundation_sdk",)) for name in _imports(export))


@pytest.mark.parametrize("room", TRAINER)
def test_trainer_needs_only_torch(room: str) -> None:
    """What loads in the trainer imports the standard library, torch and its own rooms; a user's package only where it is met."""
    allowed = (*sys.stdlib_module_names, *TRAINER[room])
    files = sorted((PACKAGES["commwatch"] / room).rglob("*.py"))
    assert len(files) > 1
    wrong = {file.name: [name for name in _imports(file) if not _within(name, allowed)] for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_entry_needs_only_its_rooms() -> None:
    """The modules at the top of the package import only its rooms and the standard library."""
    top = [file for file in PACKAGES["commwatch"].glob("*.py") if file.stem != "__main__"]
    assert {file.stem for file in top} == {"__init__", "torch_entry"}
    allowed = (*sys.stdlib_module_names, *(f"commwatch.{room}" for room in TRAINER))
    assert {name for file in top for name in _imports(file) if not _within(name, allowed)} == set()


def test_rooms_are_small() -> None:
    """No folder has too many files for a reader, and the agent's root has the fewest."""
    counted = Counter(file.parent.relative_to(TREE) for file in MODULES.values() if file.name != "__init__.py")
    assert counted.pop(Path("agent", "commwatch_agent")) <= MOST_AT_THE_ROOT
    assert {str(folder): count for folder, count in counted.items() if count > MOST_FILES} == {}
