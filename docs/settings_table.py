"""The table of ``settings.md``, from the declarations of the settings. ``make settings`` writes it: ``python -m docs.settings_table``."""

from __future__ import annotations

import re
from dataclasses import MISSING
from pathlib import Path

from commwatch_agent.config import SETTINGS, Setting

PAGE = Path(__file__).with_name("settings.md")
_HEAD = "| key | default | flag | reload | |\n|---|---|---|---|---|\n"


def table() -> str:
    """Return the table."""
    return _HEAD + "".join(f"| {' | '.join(_cells(each))} |\n" for each in SETTINGS.values())


def _cells(setting: Setting) -> tuple[str, ...]:
    flag = f"`--{setting.key.replace('_', '-')}`" if setting.flag else ""
    return f"`{setting.key}`", _default(setting), flag, "yes" if setting.reload else "restart", setting.text


def _default(setting: Setting) -> str:
    if setting.shown is not None:
        return f"`{setting.shown}`"
    if setting.default is None:
        return "not set"
    if setting.default in (MISSING, ()):
        return "none"
    return f"`{str(setting.default).lower() if isinstance(setting.default, bool) else setting.default}`"


def main() -> None:
    """Write the table into the page."""
    page = re.sub(r"^\| key \|.*?(?=^\n)", lambda _: table(), PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
