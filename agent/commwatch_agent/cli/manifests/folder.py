"""Writes the files of a manifest into a folder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from commwatch.wire.errors import CommwatchError, UsageError
from commwatch_agent.runtime.whole_files import write


def add_force(command: argparse.ArgumentParser) -> None:
    """Add the flag by which files with another content are replaced."""
    command.add_argument("--force", action="store_true", help="also replace files there that have another content")


def write_into(folder: Path, texts: Mapping[str, str], *, force: bool, choose: str, mode: int | None = None) -> None:
    """Write files, by their names.

    Args:
        force: also over files with another content.
        choose: what on the command line chooses a file, for the error.
        mode: of the files.

    Raises:
        UsageError: a file has another content, perhaps a user's.
        CommwatchError: the folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        edited = [folder / name for name, text in texts.items() if _has_other(folder / name, text)]
        if edited and not force:
            raise UsageError(
                f"already there, with another content: {', '.join(map(str, edited))}; --force replaces them, {choose} writes only one file"
            )
        for name, text in texts.items():
            write(folder / name, text)
            if mode is not None:
                (folder / name).chmod(mode)
    except OSError as error:
        raise CommwatchError(f"cannot write {error.filename}: {error.strerror}") from None


def _has_other(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() != text.encode()
