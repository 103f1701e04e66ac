"""Parse untrusted JSON with a limit on its values: three bytes of text can create an object of 100 bytes. Pure."""

from __future__ import annotations

import json
from typing import Any


def load(text: bytes | bytearray | str, most_values: int, most_containers: int | None = None) -> Any:
    """Return the value of a JSON text.

    Args:
        most_containers: most lists and objects among the values; ``None``: as many as values.

    Raises:
        ValueError: it is not JSON, or has more values, counted by commas and brackets before parsing.
        RecursionError: it is nested too deeply.
    """
    commas, lists, objects = (
        text.count(sign) if isinstance(text, str) else text.count(sign.encode()) for sign in ",[{"
    )
    if commas + lists + objects > most_values:
        raise ValueError(f"more than {most_values} values in it")
    if most_containers is not None and lists + objects > most_containers:
        raise ValueError(f"more than {most_containers} lists and objects in it")
    return json.loads(text)
