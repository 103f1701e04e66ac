"""Parsing of the command line, with a file for each larger command."""

from commwatch.cli.command_line import main

__all__ = ["main"]
