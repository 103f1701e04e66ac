"""``commwatch probe install``: the probe in a folder for ``PYTHONPATH``, where commwatch cannot be installed.

Its small ``commwatch/__init__.py`` refers to a second folder, which has the rest and is named after a hash of its content.
Installing another version replaces only that file, so an import finds either the old probe or the new one, complete.
Folders of earlier versions stay, because running trainers still import from them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath

import commwatch
from commwatch import __version__, collectors
from commwatch.core.errors import CommwatchError

#: Parts of ``commwatch.collectors`` that the trainer loads, or that build its native hook with the trainer's Python.
_ROOMS, _ENTRY = ("wire", "probe", "nccl_plugin"), ("__init__.py", "torch_entry.py")
_SUFFIXES = (".py", ".c", ".cpp", ".h")
_PACKAGE = Path(commwatch.__file__).parent
#: The Python API, and what it uses.
_API = (
    "api/*.py",
    "core/__init__.py",
    "core/addresses.py",
    "core/errors.py",
    "runtime/__init__.py",
    *(f"runtime/{name}.py" for name in ("client", "client_tls", "concurrency", "tokens")),
)
#: Other files of ``commwatch``, by path in the folder. ``cli`` is a stub for commands run with this ``PYTHONPATH``.
_INSTEAD = {"__main__.py": _PACKAGE / "__main__.py", "cli.py": Path(__file__).with_name("probe_stub.py")}
_FRONT = Path("commwatch") / "__init__.py"
_MARK = "# Put here by `commwatch probe install`: the rest of this version lies in"
_ENTRY_POINTS = "[torch.backends]\ncommwatch = commwatch.collectors.torch_entry:autoload\n"
_METADATA = f"Metadata-Version: 2.1\nName: commwatch\nVersion: {__version__}\nSummary: The probe of commwatch, without its agent\n"
#: Its name has no version, so that installing another version replaces it.
_ABOUT = Path("commwatch.dist-info")


class CannotInstall(CommwatchError):
    """The probe cannot be installed; the message gives the reason and what to do."""


def parts() -> dict[PurePath, bytes]:
    """Return the contents of the probe's files, by path in the package."""
    root = Path(collectors.__file__).parent
    rooms = [path for room in _ROOMS for path in sorted((root / room).rglob("*")) if path.suffix in _SUFFIXES]
    found = [*(root / name for name in _ENTRY), *rooms]
    here = {PurePath(name): path.read_bytes() for name, path in _INSTEAD.items()}
    api = {
        PurePath(path.relative_to(_PACKAGE)): path.read_bytes() for part in _API for path in sorted(_PACKAGE.glob(part))
    }
    return here | api | {PurePath("collectors", path.relative_to(root)): path.read_bytes() for path in found}


def version_of(files: Mapping[PurePath, bytes]) -> str:
    """Return 16 hexadecimal digits that identify the contents of ``files`` and the version."""
    made_of = hashlib.sha256(__version__.encode())
    for path in sorted(files):
        made_of.update(f"\0{path}\0{len(files[path])}\0".encode() + files[path])
    return made_of.hexdigest()[:16]


def install(directory: Path) -> Path:
    """Install the probe into ``directory``, which is created if it is missing; readable for all users.

    Repeating it changes nothing. Another version may be installed while trainers import.

    Returns:
        The directory as an absolute path, for ``PYTHONPATH``.

    Raises:
        CannotInstall: the folder cannot be written, or has a commwatch that was installed in another way.
    """
    directory = directory.absolute()
    if os.pathsep in str(directory):
        raise CannotInstall(f"{directory}: PYTHONPATH cannot name a folder with '{os.pathsep}' in it; choose another")
    try:
        _refuse_others(directory)
        _make(directory)
        files = parts()
        key = f".commwatch-{version_of(files)}"
        _put_whole(directory, key, files)
        _replace(directory / _ABOUT / "METADATA", _METADATA)
        _replace(directory / _ABOUT / "entry_points.txt", _ENTRY_POINTS)
        # Python reuses compiled code while a file's size and mtime (in s) are equal, so every version has its own.
        _replace(directory / _FRONT, _front(key), int(key[-7:], 16))
    except OSError as error:
        raise CannotInstall(
            f"cannot write {error.filename or directory}: {error.strerror}; choose another folder"
        ) from None
    return directory


def _refuse_others(directory: Path) -> None:
    package = directory / _FRONT.parent
    if package.exists() and _MARK not in (directory / _FRONT).read_text(encoding="utf-8", errors="replace"):
        raise CannotInstall(f"{package} was not installed by `probe install`; choose another folder")


def _front(key: str) -> str:
    ours = (_PACKAGE / "__init__.py").read_text(encoding="utf-8")
    where = f'__path__ = [__import__("os").path.join(__path__[0], "..", "{key}")]'
    return f"{ours}\n\n{_MARK} {key}\n{where}\n"


def _put_whole(directory: Path, key: str, files: Mapping[PurePath, bytes]) -> None:
    """Create the folder ``key`` under another name, then rename it, so that it is always complete."""
    if (directory / key).is_dir():
        return
    hidden = Path(tempfile.mkdtemp(prefix=".commwatch-new-", dir=directory))
    try:
        for path, content in files.items():
            (hidden / path).parent.mkdir(parents=True, exist_ok=True)
            (hidden / path).write_bytes(content)
        for folder, _, names in os.walk(hidden):
            for name in names:
                Path(folder, name).chmod(0o644)
            Path(folder).chmod(0o755)
        try:
            hidden.rename(directory / key)
        except OSError:
            if not (directory / key).is_dir():  # unless another install was faster
                raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _replace(path: Path, text: str, changed_s: int | None = None) -> None:
    """Write a file atomically, unless it has this text already.

    Args:
        changed_s: the file's mtime in Unix seconds; ``None``: now.
    """
    _make(path.parent)
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
        return
    handle, hidden = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        if changed_s is not None:
            os.utime(hidden, (changed_s, changed_s))
        Path(hidden).rename(path)
    except BaseException:
        Path(hidden).unlink()
        raise


def _make(directory: Path) -> None:
    """Create a folder that all users may read; an existing folder keeps its mode."""
    if not directory.is_dir():
        directory.mkdir(parents=True)
        directory.chmod(0o755)
