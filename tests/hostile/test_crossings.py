"""The inventory of places that open, list, remove or execute files: those of other users only through the gate, each with its trust."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.hostile.crossings import DIRECT, GATE, NATIVE

TREE = Path(__file__).parents[2]
FOLDERS = ("agent", "collectors", "alerts", "dashboards")
#: Calls that reach a file, a folder or a socket by its name, or a library. ``replace`` counts with one argument, as of a path.
_NAMES = """
open open_code fdopen read_text read_bytes write_text write_bytes touch iterdir glob iglob rglob scandir listdir walk connect
create_connection bind urlopen run_path CDLL rmtree copy2 copyfile copyfileobj copytree move mkfifo mknod link symlink symlink_to
hardlink_to unlink rename replace rmdir truncate chown chmod TemporaryFile NamedTemporaryFile TemporaryDirectory mkdtemp mkstemp
load_cert_chain load_verify_locations create_default_context GzipFile memmap fromfile posix_spawn Popen run
"""
NAMES = frozenset(_NAMES.split())
#: Of these names only the ones of a module or of a path: others are methods of ours.
OF_MODULES = {
    "open": ("", "os", "gzip", "io", "path", "self.path", "self._path", "written", "file"),
    "connect": ("sqlite3", "way", "server", "super()"),
    "run": ("subprocess",),
    "walk": ("os",),
    "link": ("os",),
    "copy": ("shutil",),
    "truncate": ("os",),
    "move": ("shutil",),
}
_TRUST = re.compile(r"ANYBODY|(?i:trust)|crossing\.(operator|own|trainers|user)\(")
GATE_CALLS = (
    "open_file",
    "look",
    "read",
    "folder",
    "open_folder",
    "KeptFolder",
    "create",
    "make",
    "write",
    "lock_file",
)


def _calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a file, with the text before the name, the name, and the call."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield f"{ast.unparse(node.func.value)}.{node.func.attr}", node
            elif isinstance(node.func, ast.Name):
                yield f".{node.func.id}", node


def _direct(file: Path) -> list[str]:
    """The names of the calls that reach files without the gate."""
    found = []
    for name, call in _calls(file):
        base, _, last = name.rpartition(".")
        if (
            last not in NAMES
            or base in ("crossing", "dataclasses")
            or (last == "replace" and (len(call.args) != 1 or not base))
        ):
            continue
        if last in OF_MODULES and base not in OF_MODULES[last]:
            continue
        found.append(last)
    return sorted(found)


def _through_the_gate(file: Path) -> list[str]:
    """The calls of the gate in a file, with the trust that they name."""
    found = []
    for name, call in _calls(file):
        base, _, last = name.rpartition(".")
        words = [ast.unparse(each) for each in (*call.args, *(word.value for word in call.keywords))]
        trust = next((word for word in words if _TRUST.search(word)), "").replace("crossing.", "").removesuffix("()")
        # A ``Folder`` of the gate has methods of the same names.
        in_folder = base != "crossing" and last in ("open_file", "read") and trust
        if in_folder or (base == "crossing" and last in GATE_CALLS):
            found.append(f"{last}({trust})")
    return sorted(found)


def _tree() -> dict[str, Path]:
    files = {str(file.relative_to(TREE)): file for folder in FOLDERS for file in sorted((TREE / folder).rglob("*.py"))}
    return {name: file for name, file in files.items() if name != str(Path("collectors/commwatch/wire/crossing.py"))}


def test_direct_calls_are_listed() -> None:
    """Each call that reaches a file without the gate is in the list, with the reason why no other user can have a hand in it."""
    found = {name: calls for name, file in _tree().items() if (calls := _direct(file))}
    listed = {name: sorted(call for call, reasons in calls.items() for _ in reasons) for name, calls in DIRECT.items()}
    assert {name: found.get(name) for name in found.keys() | listed.keys()} == {
        name: listed.get(name) for name in found.keys() | listed.keys()
    }


def test_crossings_are_listed() -> None:
    """Each call of the gate is in the list, and names its trust, but for folders and new files, whose owner is this process."""
    found = {name: calls for name, file in _tree().items() if (calls := _through_the_gate(file))}
    assert {name: found.get(name) for name in found.keys() | GATE.keys()} == {
        name: GATE.get(name) for name in found.keys() | GATE.keys()
    }
    unnamed = {call for calls in found.values() for call in calls if call.endswith("()")}
    assert unnamed <= {"folder()", "KeptFolder()", "create()", "make()", "write()", "lock_file()"}


def test_native_code_opens_nothing() -> None:
    """The native hook and the plugin open no file; the libraries that they load are listed."""
    found = {}
    for folder in ("collectors/commwatch/probe/native", "collectors/commwatch/nccl_plugin"):
        for file in sorted((TREE / folder).iterdir()):
            if file.suffix in (".c", ".cpp", ".h"):
                text = re.sub(r"//[^\n]*|/\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
                calls = re.findall(
                    r"(?<![\w.>:])(fopen|openat2?|::open|opendir|dlopen|mkfifo|creat|ofstream|ifstream)\s*\(", text
                )
                if calls:
                    found[str(file.relative_to(TREE))] = calls
    assert found == NATIVE
