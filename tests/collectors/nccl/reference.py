"""A slow, plain reading of logs: every form is tried on every message, and nothing is remembered between lines."""

from __future__ import annotations

from typing import Any

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.input.lines import MOST_BYTES
from commwatch_collectors.nccl.labels import labels
from commwatch_collectors.nccl.lives import Facts, Warned
from commwatch_collectors.nccl.quiet import is_quiet
from commwatch_collectors.nccl.search import SEARCHED
from commwatch_collectors.nccl.text import Message, clean, has_own_time, parse_line


def lines_of(data: bytes) -> list[tuple[int, str]]:
    """Return the lines of ``data``, each decoded by itself."""
    pieces = [
        (number, line[at : at + MOST_BYTES])
        for number, line in enumerate(data.replace(b"\0", b"").split(b"\n"), 1)
        for at in range(0, len(line) or 1, MOST_BYTES)
    ]
    if not pieces[-1][1]:
        pieces.pop()
    return [(number, piece.decode("utf-8", "replace")) for number, piece in pieces]


def facts_of(text: str) -> list[f.Fact]:
    """Return the facts in ``text``: every pattern is tried, until one matches the whole text."""
    found: list[f.Fact] = []
    for form in SEARCHED:
        for match in form.pattern.finditer(text):
            try:
                fact = form.make(match)
            except ValueError:
                continue
            if fact is not None:
                found.append(fact)
                if match.start() == 0 and match.end() >= len(text.rstrip()):
                    return found
    return found


class PlainAccount(Account):
    """An account that parses every message anew."""

    def add(self, line: str, source: str, number: int) -> list[Warned]:
        """Add one line, as ``Account.add``."""
        self.n_lines += number != self._number or source != self._source
        self.n_crlf += line.endswith("\r")
        line = clean(line)
        self._source, self._number, self._line = source, number, line
        self.firsts.setdefault(source, number)
        self.lasts[source] = number
        if " NCCL INFO " not in line:
            self._hear_exception(number, line)
        messages = parse_line(line, self._hosts) if line else []
        self.n_crowded += sum(message.level in ("INFO", "WARN", "CALL") for message in messages) > 1
        self.n_timestamped += has_own_time(line)
        warned: list[Warned] = []
        for message in messages:
            self._take_plain(message, warned)
        return warned

    def _take_plain(self, message: Message, warned: list[Warned]) -> None:
        facts = tuple(facts_of(message.text))
        self._length = len(message.text)
        life = None
        if message.level:
            life = self._count(message, bool(facts) or message.level == "WARN" or is_quiet(message.text))
        if message.level == "WARN":
            warned.append(self._warn(message, life))
        if life is None:
            self._take_loose(facts, message, warned.append)
            return
        for fact in facts:
            self._take(life, fact, message.head.tid)


def contents(account: Account) -> list[Any]:
    """Return everything that an account holds, as comparable values."""
    return [
        labels(account),
        (account.n_lines, account.n_crlf, account.n_timestamped, account.n_crowded),
        (account.torn, account.unknown, account.overflow, account.counts),
        [(seen.line, seen.number) for seen in (*account.samples, *account.torn_samples)],
        _listed(account.loose),
        [(w.text, w.kind, w.process, w.seen.line, w.seen.lines) for w in account.warnings.values()],
        [
            (
                process,
                life.messages,
                life.says_start,
                _listed(life.facts),
                [(m.tid, m.init, m.complete, m.ended, _listed(m.facts)) for m in life.members],
                {tid: _listed(facts) for tid, facts in life.pending.items()},
            )
            for process, life in account.lives.items()
        ],
    ]


def _listed(facts: Facts) -> dict[str, list[Any]]:
    return {
        kind.__name__: [(fact, seen.line, seen.lines, seen.number, seen.source) for fact, seen in found.items()]
        for kind, found in facts.items()
    }
