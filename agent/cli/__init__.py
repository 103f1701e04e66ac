"""The command line: parsing, one file a command."""

from commwatch.cli.command_line import main

__all__ = ["main"]
