"""Parsing of the command line, with a file for each larger command."""

from commwatch_agent.cli.command_line import main

__all__ = ["main"]
