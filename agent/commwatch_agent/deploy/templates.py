"""The templates that are shipped beside this module."""

from __future__ import annotations

from importlib import resources


def template(file: str) -> str:
    """Return the text of a template, by the name of its file."""
    return resources.files("commwatch_agent.deploy").joinpath(file).read_text(encoding="utf-8")
