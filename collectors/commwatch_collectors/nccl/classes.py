"""Classes of warnings, by which ``commwatch_nccl_messages_total`` counts. The first match wins."""

from __future__ import annotations

import re
from functools import lru_cache

#: Class -> pattern of its warnings.
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
#: Characters that are matched: NCCL's own buffer is shorter, so later text is not NCCL's.
_MOST_TEXT = 4096


def warning_class(text: str) -> str:
    """Return the class of the warning ``text``, ``other`` if none matches."""
    return _class(text[:_MOST_TEXT])


@lru_cache(maxsize=4096)
def _class(text: str) -> str:
    return next((name for name, pattern in CLASSES.items() if pattern.search(text)), OTHER)
