"""Errors for the user: all have one base, whose classes know exit code and HTTP status."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

TREE = Path(__file__).parents[3]
#: The agent, and what it shares with the Python API.
SHARED = TREE / "collectors" / "commwatch"
FILES = (
    *(TREE / "agent").rglob("*.py"),
    *(SHARED / "api").rglob("*.py"),
    *(SHARED / "wire" / f"{name}.py" for name in ("addresses", "errors", "tokens")),
)
#: Caught where they are raised or one call up, and never shown as they are.
INTERNAL = {
    "AllTaken",
    "BadProfile",
    "BadTrace",
    "CannotBuild",
    "JobFailed",
    "Stopped",
    "TooManyOfOne",
    "UnknownLink",
    "WorkerFault",
    "_NoText",
}


def test_one_base() -> None:
    """Exceptions of the agent derive from ``CommwatchError``, except those that never reach a user."""
    classes = (
        node
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    of_python = {
        name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)
    }
    found = {each.name for each in classes if of_python & set(map(ast.unparse, each.bases))}
    assert found == {"CommwatchError", *INTERNAL}
