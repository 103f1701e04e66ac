"""The probe in a folder for ``PYTHONPATH``: the package ``commwatch``, its entry point, and ``commwatch_hooks`` if that is installed here.

``commwatch run`` puts the folder in front of the job's path, so that probe and agent have one version, whatever the job's environment has.
``commwatch probe install`` puts it where commwatch cannot be installed. Each version lies in a folder that is named after a hash of its
content and never changes, because running trainers import from it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path, PurePath

import commwatch
from commwatch import __version__
from commwatch.probe.native import library
from commwatch.wire import crossing
from commwatch.wire.errors import CommwatchError
from commwatch_agent.runtime.python_path import folders_of_job

_SUFFIXES = (".py", ".c", ".cpp", ".h", ".typed")
_PACKAGE, _HOOKS = Path("commwatch"), Path(library.PACKAGE)
_FRONT = _PACKAGE / "__init__.py"
_MARK = "# Put here by `commwatch probe install`: the rest of this version lies in"
#: Their folder has no version in its name, so that installing another version replaces them.
_ABOUT = {
    Path(
        "commwatch-0.dist-info/METADATA"
    ): f"Metadata-Version: 2.1\nName: commwatch\nVersion: {__version__}\nSummary: The probe of commwatch\n",
    Path("commwatch-0.dist-info/entry_points.txt"): "[torch.backends]\ncommwatch = commwatch.torch_entry:autoload\n",
}


class CannotInstall(CommwatchError):
    """The probe cannot be installed; the message gives the reason and what to do."""


def parts() -> dict[PurePath, bytes]:
    """Return the contents of the folder, by path."""
    ours = Path(str(commwatch.__file__)).parent
    found = {_PACKAGE / path.relative_to(ours): path for path in ours.rglob("*") if path.suffix in _SUFFIXES}
    for place in _hooks():
        found |= {_HOOKS / path.relative_to(place): path for path in place.rglob("*.*") if path.suffix != ".pyc"}
    return {
        **{PurePath(name): text.encode() for name, text in _ABOUT.items()},
        **{PurePath(name): path.read_bytes() for name, path in sorted(found.items()) if path.is_file()},
    }


def _hooks() -> list[Path]:
    """Return the folder of ``commwatch_hooks`` that is installed with this agent, if it is: not one that a job's path names."""
    of_job = folders_of_job()
    spec = PathFinder.find_spec(library.PACKAGE, [path for path in sys.path if path not in of_job])
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


def version_of(files: Mapping[PurePath, bytes]) -> str:
    """Return 16 hexadecimal digits that identify the contents of ``files``."""
    made_of = hashlib.sha256()
    for path in sorted(files):
        made_of.update(f"\0{path}\0{len(files[path])}\0".encode() + files[path])
    return made_of.hexdigest()[:16]


def of_user(env: Mapping[str, str]) -> Path:
    """Return the folder for this user's jobs; it is made in the user's cache if it is missing.

    Raises:
        CannotInstall: there is no cache that only this user can write.
    """
    try:
        home = library.cache_dir(env).with_name("probe").absolute()
        _check_path(home)
        _make_private(home)
        with crossing.folder(home, crossing.operator()):
            return in_folder(home)
    except library.NotAvailable as error:
        raise CannotInstall(str(error)) from None
    except OSError as error:
        raise CannotInstall(f"{error.filename}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours") from None


def in_folder(directory: Path) -> Path:
    """Return the folder for jobs, made in ``directory`` if it is missing; raise ``OSError`` if it cannot be made."""
    files = parts()
    return _put_whole(directory / f"{__version__}-{version_of(files)}", files)


def in_front(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes Python look into the folder first, and then where ``env`` says."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))}


def on_path(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with the folder of this user in front of the path; without a cache unchanged, for a Python that has commwatch."""
    try:
        return {**env, **in_front(of_user(env), env)}
    except CannotInstall:
        return dict(env)


def _check_path(directory: Path) -> None:
    if os.pathsep in str(directory):
        raise CannotInstall(f"{directory}: PYTHONPATH cannot name a folder with '{os.pathsep}' in it; choose another")


def _make_private(directory: Path) -> None:
    """Create a folder, and those above it, as if no other user existed: a umask may let a group write."""
    for folder in reversed((directory, *directory.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def install(directory: Path) -> Path:
    """Install the probe into ``directory``, which is created if it is missing; readable for all users.

    Repeating it changes nothing. Another version may be installed while trainers import: ``commwatch/__init__.py``, which refers to
    the folder of its version, is replaced at once.

    Returns:
        The directory as an absolute path, for ``PYTHONPATH``.

    Raises:
        CannotInstall: the folder cannot be written, or has a commwatch that was installed in another way.
    """
    directory = directory.absolute()
    _check_path(directory)
    try:
        _refuse_others(directory)
        _make(directory)
        files = parts()
        key = f".commwatch-{version_of(files)}"
        _put_whole(directory / key, files)
        for name, text in _ABOUT.items():
            _replace(directory / name, text.encode())
        shutil.rmtree(
            directory / "commwatch.dist-info", ignore_errors=True
        )  # of earlier states: Python 3.10 would find both
        _link_hooks(directory, key)
        # Python reuses compiled code while a file's size and mtime (in s) are equal, so every version has its own.
        _replace(directory / _FRONT, _front(files, key).encode(), int(key[-7:], 16))
    except OSError as error:
        raise CannotInstall(
            f"cannot write {error.filename or directory}: {error.strerror}; choose another folder"
        ) from None
    return directory


def _refuse_others(directory: Path) -> None:
    package = directory / _PACKAGE
    if package.exists() and _MARK not in (directory / _FRONT).read_text(encoding="utf-8", errors="replace"):
        raise CannotInstall(f"{package} was not installed by `probe install`; choose another folder")


def _front(files: Mapping[PurePath, bytes], key: str) -> str:
    where = f'__path__ = [__import__("os").path.join(__path__[0], "..", "{key}", "commwatch")]'
    return f"{files[PurePath(_FRONT)].decode()}\n\n{_MARK} {key}\n{where}\n"


def _link_hooks(directory: Path, key: str) -> None:
    """Have ``commwatch_hooks`` of this version in the folder, if it has them."""
    link, hooks = directory / _HOOKS, Path(key) / _HOOKS
    if not (directory / hooks).is_dir():
        link.unlink(missing_ok=True)
    elif not link.is_symlink() or link.readlink() != hooks:
        hidden = directory / f".{_HOOKS}-{os.getpid()}"
        hidden.unlink(missing_ok=True)
        hidden.symlink_to(hooks)
        hidden.rename(link)


def _put_whole(whole: Path, files: Mapping[PurePath, bytes]) -> Path:
    """Return the folder ``whole`` with these files; it is made under another name, then renamed, so that it is always complete."""
    if whole.is_dir():
        for path, content in files.items():  # some are missing, or empty, if a cache was cleaned or the machine crashed
            if not (whole / path).is_file() or (whole / path).stat().st_size != len(content):
                _replace(whole / path, content)
        return whole
    hidden = Path(tempfile.mkdtemp(prefix=".commwatch-new-", dir=whole.parent))
    try:
        for path, content in files.items():
            (hidden / path).parent.mkdir(parents=True, exist_ok=True)
            (hidden / path).write_bytes(content)
        for folder, _, names in os.walk(hidden):
            for name in names:
                Path(folder, name).chmod(0o644)
            Path(folder).chmod(0o755)
        try:
            hidden.rename(whole)
        except OSError:
            if not whole.is_dir():  # unless another install was faster
                raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return whole


def _replace(path: Path, content: bytes, changed_s: int | None = None) -> None:
    """Write a file atomically, unless it has this content already.

    Args:
        changed_s: the file's mtime in Unix seconds; ``None``: now.
    """
    _make(path.parent)
    if path.is_file() and path.read_bytes() == content:
        return
    handle, hidden = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
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
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
