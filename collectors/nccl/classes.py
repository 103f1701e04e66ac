"""Classes of warnings: what ``commwatch_nccl_messages_total`` counts by. First match wins."""

from __future__ import annotations

import re
from functools import lru_cache

#: Class -> what its warnings say.
CLASSES: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "version_mismatch": r"Mismatched NCCL version|version mismatch",
        "connection_refused": r"(?:^|: )(?:Connect to |connect to |connect returned )|Call to connect returned",
        "ib_completion_error": r"Got completion",
        "ib_async_event": r"Got .{0,80}event|async fatal event|GID table changed",
        "cuda_error": r"(?i:cuda failure|hip failure)",
        "duplicate_gpu": r"Duplicate GPU detected",
        "mismatch": r"Mismatched collective|collective mismatch|message truncated|mismatch in rank count|mismatch with rank",
        "system_error": r"Call to (?!recv\b|send\b)\S+ failed|Unable to open device|\[Service thread\]|\[Proxy Service|SHARP coll init error",
        "timeout": r"(?i:timeout|timed out)",
    }.items()
}
OTHER = "other"
#: NCCL's own buffer is shorter; what follows is not its text.
_MOST_TEXT = 4096


def warning_class(text: str) -> str:
    """Class of the warning ``text``, ``other`` where none fits."""
    return _class(text[:_MOST_TEXT])


@lru_cache(maxsize=4096)
def _class(text: str) -> str:
    return next((name for name, pattern in CLASSES.items() if pattern.search(text)), OTHER)
