"""The texts in the files that a command line names: plain, compressed, in archives and folders."""

from __future__ import annotations

import bz2
import contextlib
import errno
import glob
import io
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple, cast

from commwatch.wire.errors import UsageError
from commwatch_agent.model.unpacking import Limit, Limited, Unpacking, UnpacksToMore
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.input.lines import lines_of

#: Bytes by which the kind of a file is known; archives within archives that are opened.
_BEGIN, _MOST_NESTED = 1 << 16, 3
_UNPACK: tuple[tuple[re.Pattern[bytes], Callable[[IO[bytes]], Unpacking]], ...] = (
    (re.compile(rb"\x1f\x8b"), Unpacking),
    (re.compile(rb"BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)"), lambda file: Unpacking(file, unpack=bz2.BZ2File)),
    (re.compile(rb"\xfd7zXZ\0"), lambda file: Unpacking(file, unpack=lzma.LZMAFile)),
)
#: Files that are no text, by their first bytes, and what to do about them.
_OTHERS = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first: zstd -d",
    b"\x04\x22\x4d\x18": "compressed with lz4; unpack it first: lz4 -d",
    b"\x1f\x9d": "compressed with compress; unpack it first: uncompress",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive; unpack it first: 7z x",
    b"\x7fELF": "a program or a core dump (ELF), not a log",
    b"SQLite format 3\0": "a database (SQLite), not a log",
    b"\x80\x02": "a pickle of Python, not a log",
    b"\x80\x03": "a pickle of Python, not a log",
    b"\x80\x04": "a pickle of Python, not a log",
    b"\x80\x05": "a pickle of Python, not a log",
}
_ZIP, _TAR, _TAR_AT = (b"PK\x03\x04", b"PK\x05\x06"), b"ustar", 257
#: Text has none of these; zeros are of a file that is still written, or of UTF-16.
_CONTROL = bytes([*range(1, 7), *range(14, 27), *range(28, 32)])
#: Share of the bytes that are control characters, above which a file is no text. Random bytes have 0.09.
_MOST_CONTROL = 0.03
_DAMAGES = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)


class UnreadableLog(UsageError):
    """A log cannot be read; the message names it and gives the reason."""


class _NoText(Exception):
    """A file is no text; the message gives the reason."""


class Files(NamedTuple):
    """The files that patterns name."""

    names: list[str]
    #: Those of a folder or a glob: what is no text among them is left out.
    found: frozenset[str]


class Read(NamedTuple):
    """What was read."""

    #: Names of the texts; those of an archive's files begin with that of the archive.
    names: list[str]
    #: On damaged files, which are read up to the damage, and files that are left out.
    remarks: list[str]


def expand(patterns: Iterable[str]) -> Files:
    """Return the files that ``patterns`` name, each once; those of a folder are all files in it. ``-`` is standard input.

    Raises:
        UnreadableLog: a pattern matches no file.
    """
    names: dict[str, None] = {}
    named: set[str] = set()
    for pattern in patterns:
        is_path = pattern == "-" or os.path.exists(pattern)  # noqa: PTH110 - False where the folder may not be entered
        matching = [pattern] if is_path else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute patterns, too
        if not matching:
            raise UnreadableLog(f"{pattern}: {_why_not(pattern)}")
        for name in matching:
            if name != "-" and os.path.isdir(name):  # noqa: PTH112 - as above
                names.update(dict.fromkeys(_in_folder(name)))
            else:
                names[name] = None
                named.update([name] if is_path else [])
        if not names:
            raise UnreadableLog(f"{pattern}: a folder without files")
    return Files(list(names), frozenset(names.keys() - named))


def _in_folder(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise UnreadableLog(f"{error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)  # noqa: PTH118 - names may be any bytes
            if os.path.isfile(path):  # noqa: PTH113 - as above
                yield path


def _why_not(path: str) -> str:
    """Return why there is no file with this name."""
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as error:
        if error.errno != errno.ENOENT and error.strerror is not None:
            return error.strerror
    return "no such file"


def read(names: Iterable[str], account: Account, found: frozenset[str] = frozenset()) -> Read:
    """Read the logs into ``account``.

    Args:
        found: those that are left out if they are no text.

    Raises:
        UnreadableLog: a log cannot be read, or none is a text.
    """
    done = Read([], [])
    for name in names:
        try:
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(open(0 if name == "-" else name, "rb", 0, closefd=name != "-"))
                for source, stream in _texts(name, _buffered(file), done.remarks):
                    done.names.append(source)
                    account.add_lines(lines_of(stream), source)
        except _NoText as error:
            if name not in found:
                raise UnreadableLog(f"{name}: {error}") from None
            done.remarks.append(f"{name}: {error}; left out")
        except UnpacksToMore as error:
            done.remarks.append(f"{name}: {error}; read up to there")
        except _DAMAGES as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise UnreadableLog(f"{name}: {error.strerror or error}") from None
            done.remarks.append(f"{name}: a damaged {_kind(error)} file; read as far as it goes")
    if not done.names and done.remarks:
        raise UnreadableLog("; ".join(done.remarks))
    return done


def _kind(error: Exception) -> str:
    """Return the kind of a file that is damaged."""
    if isinstance(error, tarfile.TarError):
        return "tar"
    return "zip" if isinstance(error, zipfile.BadZipFile) else "compressed"


def _texts(
    name: str, file: io.BufferedReader, remarks: list[str], nested: int = 0
) -> Iterator[tuple[str, io.BufferedReader]]:
    """Yield the texts in a file, with their names; raise ``_NoText`` if it has none."""
    begin = file.peek(_BEGIN)
    unpack = next((unpack for magic, unpack in _UNPACK if magic.match(begin)), None)
    is_tar, is_zip = begin[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR, begin.startswith(_ZIP)
    if nested == _MOST_NESTED and (unpack is not None or is_tar or is_zip):
        raise _NoText("an archive deep in other archives; unpack these first")
    if unpack is not None:
        yield from _texts(name, _buffered(unpack(file)), remarks, nested + 1)
    elif is_tar:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            yield from _of_archive(name, _tar_files(tar), remarks, nested)
    elif is_zip:
        if not file.seekable():
            raise _NoText("a zip archive that is not a file; unpack it first")
        with zipfile.ZipFile(file) as archive:
            yield from _of_archive(name, _zip_files(archive, file), remarks, nested)
    elif why := _why_no_text(begin):
        raise _NoText(why)
    else:
        yield name, file


def _of_archive(
    name: str, files: Iterable[tuple[str, io.BufferedReader]], remarks: list[str], nested: int
) -> Iterator[tuple[str, io.BufferedReader]]:
    """Yield the texts in the files of an archive; leave the others out with a remark."""
    has_texts = False
    for member, file in files:
        try:
            for text in _texts(f"{name}/{member}", file, remarks, nested + 1):
                has_texts = True
                yield text
        except _NoText as error:
            remarks.append(f"{name}/{member}: {error}; left out")
    if not has_texts:
        raise _NoText("an archive without a text")


def _tar_files(tar: tarfile.TarFile) -> Iterator[tuple[str, io.BufferedReader]]:
    for member in tar:
        # The holes of a sparse file have no bytes in the archive, and no bound.
        if member.isreg() and not member.issparse() and (file := tar.extractfile(member)) is not None:
            yield member.name, _buffered(file)


def _zip_files(archive: zipfile.ZipFile, file: io.BufferedReader) -> Iterator[tuple[str, io.BufferedReader]]:
    size = file.seek(0, io.SEEK_END)
    limit = Limit(lambda: size)  # of all its files together: they may share their bytes
    for member in archive.infolist():
        if not member.is_dir():
            try:
                plain = archive.open(member)
            except RuntimeError as error:  # encrypted, or packed in a way that is not known
                raise zipfile.BadZipFile(str(error)) from None
            with plain:
                yield member.filename, _buffered(Limited(cast("io.BufferedIOBase", plain), limit))


def _buffered(file: object) -> io.BufferedReader:
    return io.BufferedReader(file, _BEGIN)  # type: ignore[arg-type]  # anything with readinto


def _why_no_text(begin: bytes) -> str | None:
    """Return what a file is that begins with these bytes; ``None`` for a text, which may have some that are none."""
    for magic, what in _OTHERS.items():
        if begin.startswith(magic):
            return what
    some = begin.replace(b"\0", b"")
    control = len(some) - len(some.translate(None, _CONTROL))
    return "a binary file, not a log" if control > _MOST_CONTROL * len(some) and b"NCCL" not in some else None
