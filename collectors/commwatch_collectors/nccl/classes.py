"""Classes of warnings, by which ``commwatch_nccl_messages_total`` counts: those of the vocabulary."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.known import words_for
from commwatch_collectors.nccl.vocabulary.words import KINDS

OTHER = "other"
#: What follows from an earlier failure, as that a peer closed its connection, is counted with the others.
CONSEQUENCE = "consequence"
CLASSES: tuple[str, ...] = tuple(kind for kind in KINDS if kind not in (OTHER, CONSEQUENCE))


def warning_class(text: str, origin: str = "") -> str:
    """Return the class of the warning ``text``, ``other`` if its words are not known."""
    words = words_for(text, origin)
    return OTHER if words is None or words.kind == CONSEQUENCE else words.kind
