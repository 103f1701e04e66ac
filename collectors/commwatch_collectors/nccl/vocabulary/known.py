"""The words of a warning: which entry of the tables it is."""

from __future__ import annotations

import re
from functools import cache, lru_cache

from commwatch_collectors.nccl.vocabulary.calls import CALLS
from commwatch_collectors.nccl.vocabulary.infiniband import INFINIBAND
from commwatch_collectors.nccl.vocabulary.internal import INTERNAL
from commwatch_collectors.nccl.vocabulary.machine import MACHINE
from commwatch_collectors.nccl.vocabulary.memory import MEMORY
from commwatch_collectors.nccl.vocabulary.network import NETWORK
from commwatch_collectors.nccl.vocabulary.plugins import PLUGINS
from commwatch_collectors.nccl.vocabulary.words import Words

#: All entries, the first match wins.
WORDS: tuple[Words, ...] = (*PLUGINS, *MEMORY, *INFINIBAND, *NETWORK, *CALLS, *MACHINE, *INTERNAL)
#: Characters that are matched: the words of a warning are at its beginning.
_MOST_TEXT = 1024
#: Pointers and counters, by which many warnings of one kind differ.
_VARIES = re.compile(r"0x[0-9a-f]{1,32}|\d{4,32}")


def words_for(text: str, origin: str) -> Words | None:
    """Return the entry of the warning ``text``, ``None`` if its words are not known.

    Args:
        text: the warning, without its head.
        origin: the file or function that printed it; empty if that is not known.
    """
    return _words_for(_VARIES.sub("0000", text[:_MOST_TEXT]), origin[:_MOST_TEXT])


@cache
def _compiled() -> list[tuple[Words, re.Pattern[str], re.Pattern[str]]]:
    """Return the entries with their patterns: compiled at the first warning, not at the import."""
    return [(words, re.compile(words.pattern), re.compile(words.file)) for words in WORDS]


@lru_cache(maxsize=4096)
def _words_for(text: str, origin: str) -> Words | None:
    return next((words for words, pattern, file in _compiled() if file.search(origin) and pattern.search(text)), None)
