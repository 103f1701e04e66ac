"""Files for the user that are whole: another file becomes the named one when it is complete."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from commwatch.wire.errors import CommwatchError

#: Of the compression with gzip: a higher one takes twice the time for a timeline, and saves a tenth.
LEVEL = 4


@contextmanager
def writing(path: Path) -> Iterator[IO[str]]:
    """Yield a text file that becomes ``path`` when it is complete, compressed if the name ends in ``.gz``; a pipe or a device is written as it is.

    Raises:
        OSError: the file cannot be written, or is a folder. A file that was there is unchanged.
    """
    try:
        target = path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    is_new = target.is_file() or not target.exists()
    # In a folder that others may write, a link with a name that can be guessed would lead to another file.
    written = target.with_name(f".{secrets.token_hex(6)}.new") if is_new else target
    try:
        with (
            gzip.open(written, "xt" if is_new else "wt", LEVEL, encoding="utf-8")
            if path.suffix == ".gz"
            else written.open("x" if is_new else "w", encoding="utf-8") as out
        ):
            yield out
        if is_new:
            written.replace(target)
    finally:
        if is_new:
            written.unlink(missing_ok=True)


def write(path: Path, text: str, error_type: type[CommwatchError] = CommwatchError) -> None:
    """Write a text file; raise ``error_type`` if that fails."""
    try:
        with writing(path) as out:
            out.write(text)
    except OSError as error:
        raise error_type(f"cannot write {path}: {error.strerror}") from None
