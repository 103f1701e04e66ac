"""JSON of others, within bounds: three bytes of it can make a container of a hundred. Pure."""

from __future__ import annotations

import json
from typing import Any


def load(text: bytes | bytearray | str, most_values: int) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or holds more values than ``most_values``, counted by its commas and brackets before any is made.
        RecursionError: it is nested too deeply.
    """
    values = sum(text.count(sign) if isinstance(text, str) else text.count(sign.encode()) for sign in ",[{")
    if values > most_values:
        raise ValueError(f"more than {most_values} values in it")
    return json.loads(text)
