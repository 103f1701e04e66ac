"""Errors of NCCL in the words of other frameworks than PyTorch: their line forms. Rules for patterns: ``forms.py``."""

from __future__ import annotations

import re

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside.form import Form, made, who

_BEFORE = (
    r"(?:\b(?:NCCL|RCCL|Nccl)(?: ?[Ee]rror\b| [Ff]ailure\b|:)(?! in:)[^\n]{0,200}?"  # vLLM, Paddle, CuPy, nccl-tests
    r"|\bnccl[A-Z]\w{2,40} failed: ?"  # Horovod
    r"|\bnccl[A-Z]\w{2,40}\([^\n]{0,200}?\) failed: ?"  # XLA
    r"|\bNCCL operation [^\n]{1,200}? failed: ?)"
)
#: Results as NCCL names them. Each is also the needle of its form.
_RESULTS = (
    "unhandled cuda error", "unhandled hip error", "unhandled system error", "internal error", "invalid argument", "invalid usage",
    "remote process exited or there was a network error",
)  # fmt: skip
#: Advice that names an error; exceptions of torchcomms, which have a form of their own; and a call that is made again.
_ADVISES = re.compile(r"(?i)\b(?:if|when|in case|like|such as|avoids?|fix(?:es|ed)?|e\.g\.)\b[^\n]{0,80}\Z")
_TORCHCOMMS = re.compile(r"\b[Ee]xception\b")
_AGAIN = re.compile(r"(?i)\bretry(?:ing)?\b")
#: Characters beside an error that are searched for them.
_NEAR = 120


def _error(match: re.Match[str]) -> f.Fact | None:
    text, start, end = match.string, match.start(), match.end()
    before = text[max(0, start - _NEAR) : start]
    if _ADVISES.search(before) or (_TORCHCOMMS.search(before) and text.startswith("NCCL error: " + match[1], start)):
        return None
    if _AGAIN.search(before) or _AGAIN.search(text, end, end + _NEAR):
        return None
    return f.TorchError(match[1], who(text) or "a process")


def _of(result: str) -> Form:
    return made(result, rf"{_BEFORE}({result})(?=[ ,.;:'\")]|\Z)", _error)


FORMS: tuple[Form, ...] = (
    *(_of(result) for result in _RESULTS),
    made(
        "Unable to load NCCL",
        r"(?:\) failed: |Error: )(Unable to load NCCL library)",
        lambda m: f.TorchError(m[1], who(m.string) or "a process"),
    ),
)
