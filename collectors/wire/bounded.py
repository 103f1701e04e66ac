"""Parse untrusted JSON with a limit on its values: three bytes of text can create an object of 100 bytes. Pure."""

from __future__ import annotations

import json
from typing import Any


def load(text: bytes | bytearray | str, most_values: int) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or has more than ``most_values`` values, counted by commas and brackets before parsing.
        RecursionError: it is nested too deeply.
    """
    values = sum(text.count(sign) if isinstance(text, str) else text.count(sign.encode()) for sign in ",[{")
    if values > most_values:
        raise ValueError(f"more than {most_values} values in it")
    return json.loads(text)
