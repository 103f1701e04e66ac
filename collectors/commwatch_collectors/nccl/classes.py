"""Classes of warnings, by which ``commwatch_nccl_messages_total`` counts: those of the vocabulary."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.known import words_for
from commwatch_collectors.nccl.vocabulary.words import KINDS

OTHER = "other"
#: That a peer closed its connection is a symptom, and has no class of its own.
PEER_CLOSED = "peer_closed"
CLASSES: tuple[str, ...] = tuple(kind for kind in KINDS if kind not in (OTHER, PEER_CLOSED))


def warning_class(text: str, origin: str = "") -> str:
    """Return the class of the warning ``text``, ``other`` if its words are not known."""
    words = words_for(text, origin)
    return OTHER if words is None or words.kind == PEER_CLOSED else words.kind
