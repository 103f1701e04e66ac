"""``commwatch probe install``: what a trainer needs, in a folder for its ``PYTHONPATH``, where commwatch cannot be installed.

The folder holds one small ``commwatch/__init__.py``, which says in what folder beside it the rest lies, and that folder's
name says what is in it. To put another version there is to replace that one file, so whoever imports sees the old probe or
the new one, whole. Folders of versions before stay, for trainers that still run import from them.
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

#: Of ``commwatch.collectors``: what loads in the trainer, and what builds its native hook with the trainer's Python.
_ROOMS, _ENTRY = ("wire", "probe"), ("__init__.py", "torch_entry.py")
_SUFFIXES = (".py", ".cpp", ".h")
_PACKAGE = Path(commwatch.__file__).parent
#: The rest of ``commwatch`` in the folder, by path there. ``cli`` is a stub: a command with the folder on its ``PYTHONPATH`` finds it.
_INSTEAD = {"__main__.py": _PACKAGE / "__main__.py", "cli.py": Path(__file__).with_name("probe_stub.py")}
_FRONT = Path("commwatch") / "__init__.py"
_MARK = "# Put here by `commwatch probe install`: the rest of this version lies in"
_ENTRY_POINTS = "[torch.backends]\ncommwatch = commwatch.collectors.torch_entry:autoload\n"
_METADATA = f"Metadata-Version: 2.1\nName: commwatch\nVersion: {__version__}\nSummary: The probe of commwatch, without its agent\n"
#: Without a version in its name, so that there is one, whatever version comes after this.
_ABOUT = Path("commwatch.dist-info")


class CannotInstall(Exception):
    """The probe cannot be put there; the message says why and what to do."""


def parts() -> dict[PurePath, bytes]:
    """The files of the probe, by their path in the package."""
    root = Path(collectors.__file__).parent
    rooms = [path for room in _ROOMS for path in sorted((root / room).rglob("*")) if path.suffix in _SUFFIXES]
    found = [*(root / name for name in _ENTRY), *rooms]
    here = {PurePath(name): path.read_bytes() for name, path in _INSTEAD.items()}
    return here | {PurePath("collectors", path.relative_to(root)): path.read_bytes() for path in found}


def version_of(files: Mapping[PurePath, bytes]) -> str:
    """Names what is in ``files``."""
    made_of = hashlib.sha256(__version__.encode())
    for path in sorted(files):
        made_of.update(f"\0{path}\0{len(files[path])}\0".encode() + files[path])
    return made_of.hexdigest()[:16]


def install(directory: Path) -> Path:
    """Put the probe into ``directory``, which is made if it is not there; readable for all users.

    Twice the same changes nothing, and another version may come or go while trainers import.

    Returns:
        The directory, absolute: what ``PYTHONPATH`` has to name.

    Raises:
        CannotInstall: it cannot be written, or holds a commwatch that was installed otherwise.
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
        # Python keeps what it compiled as long as size and second stay the same: so every version has a second of its own.
        _replace(directory / _FRONT, _front(key), int(key[-7:], 16))
    except OSError as error:
        raise CannotInstall(
            f"cannot write {error.filename or directory}: {error.strerror}; choose another folder"
        ) from None
    return directory


def _refuse_others(directory: Path) -> None:
    package = directory / _FRONT.parent
    if package.exists() and _MARK not in (directory / _FRONT).read_text(encoding="utf-8", errors="replace"):
        raise CannotInstall(f"{package} was not put there by `probe install`; choose another folder")


def _front(key: str) -> str:
    ours = (_PACKAGE / "__init__.py").read_text(encoding="utf-8")
    where = f'__path__ = [__import__("os").path.join(__path__[0], "..", "{key}")]'
    return f"{ours}\n\n{_MARK} {key}\n{where}\n"


def _put_whole(directory: Path, key: str, files: Mapping[PurePath, bytes]) -> None:
    """The folder ``key``, made beside its place and renamed; one that is there is whole."""
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
            if not (directory / key).is_dir():  # else somebody else was faster
                raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _replace(path: Path, text: str, changed_s: int | None = None) -> None:
    """A file, whole; one that is right already is left alone.

    Args:
        changed_s: the Unix time at which it is said to have been written; ``None``: the truth.
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
    """A folder that others may read; one that is there keeps its rights."""
    if not directory.is_dir():
        directory.mkdir(parents=True)
        directory.chmod(0o755)
