"""Checks of warnings: which are the reason of a failure, and which only follow from one.

A warning is the reason of a failure if a failed call of the same thread or an exception of PyTorch follows it, whatever its words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside.hardware import fails_by_fault
from commwatch_collectors.nccl.checks.evidence import Check, Hit, Log, many, some, who
from commwatch_collectors.nccl.classes import CONSEQUENCE, OTHER
from commwatch_collectors.nccl.lives import QUOTED, Seen, Warned
from commwatch_collectors.nccl.vocabulary.known import words_for
from commwatch_collectors.nccl.vocabulary.places import subsystem
from commwatch_collectors.nccl.vocabulary.words import KINDS, Words

#: A peer's own end, seen from here.
_PEER = re.compile(r"Connection closed by remote peer|Call to (?:recv|send)\b|socket progress error|Socket recv failed")
_FAILED_OPERATION = r"\[Proxy Service \d+\] Failed to execute operation "
_ERROR_OF_SERVICE = r" Error .{0,40}=(?:Init|SharedInit|Setup|Connect)\b"
#: The proxy thread reports what it could not do for a rank: the reason is a warning before it, or a peer.
_PROXY = re.compile(
    rf"{_FAILED_OPERATION}(?!Close)|Proxy Call to rank \d+ failed|while polling for opId|\[Service thread\]{_ERROR_OF_SERVICE}"
)
_PROXY_OF_PEER = re.compile(rf"{_FAILED_OPERATION}(?!Close)\w+ from rank \d+, retcode 6")
TEARDOWN = re.compile(
    rf"\[Service thread\](?! Accept failed Too many|{_ERROR_OF_SERVICE})|{_FAILED_OPERATION}Close|driver shutting down"
)
SHARP = re.compile(r"SHARP coll init error|Cannot initialize CollNet")
DEVICE = re.compile(r"Unable to open device (\S+)|Call to ibv_open_device failed")
_HINT = re.compile(r'Missing "iommu=pt"|lib wrapper not initialized|MSCCL|Could not find real path')
#: Hints that NCCL prints at a fixed place of each init: a failed call next to one does not follow from it.
_AT_START = re.compile(r'Missing "iommu=pt"|MSCCL\+\+')
#: No verbs library: the check ``sockets`` reports it where it matters.
_NO_VERBS = re.compile(r"Failed to open libibverbs")
#: Warnings that other checks report, whatever their class, as hints and closed connections.
_EXPLAINED = (TEARDOWN, _PROXY_OF_PEER, SHARP, DEVICE, _NO_VERBS)
#: Parts that vary between repeated lines: addresses with their ports, pointers, numbers.
_VARIES = re.compile(r"\S*<\d+>|(?:[0-9a-f]*:){2,}[0-9a-f:.]+|0x[0-9a-f]+|\d+")
_ADDRESS = re.compile(r"(?:[0-9A-Za-z.:_-]{1,100}[0-9A-Za-z])?<\d{1,5}>")
_SETTING = re.compile(r"\b(?:NCCL|RCCL|FI|OFI|TORCH|UCX)_[A-Z0-9_]+\b")
_RANK = re.compile(r"^rank(\d+)$")
#: Where the plug-in for EFA names the peer.
_PEER_HOST = re.compile(r"Peer host id: ([\w-]{1,64})")
#: Variants of a text that are shown.
_MOST_VARIANTS = 4
_FAILED = "A call failed after this warning, which is harmless elsewhere."
_VERSIONS = re.compile(r"rank (\d+) version (\d+) rank (\d+) version (\d+)")


def words_of(warned: Warned) -> Words | None:
    """Return the entry of the vocabulary for a warning: by the files whose calls failed then, else by the one that warned."""
    above = words_for(warned.text, f"{'mnnvl.cc ' * warned.between_nodes}{warned.failed}")
    return above if above is not None and above.file else words_for(warned.text, warned.origin)


def is_explained(warned: Warned) -> bool:
    """Return whether another check reports the warning."""
    return is_hint(warned) or follows(warned) or any(pattern.search(warned.text) for pattern in _EXPLAINED)


def is_remark(warned: Warned) -> bool:
    """Return whether the warning is never the reason of the failed call next to it; an exception may quote a hint, but no change of a port."""
    return _is_change(warned) or (warned.quoted_by is None and _AT_START.search(warned.text) is not None)


def _is_change(warned: Warned) -> bool:
    words = words_of(warned)
    return words is not None and (words.kind, words.alone) == ("ib_async_event", "info")


def hints_that_failed(log: Log) -> list[Warned]:
    """Return the hints, closed devices and words of an end that are the reason of a failure, because no other warning is.

    An exception quotes them, or a call failed at once. SHARP, and services at an end, fail calls in a job in good order as well.
    """
    if log.failed_hints is None:
        log.failed_hints = _hints_that_failed(log)
    return log.failed_hints


def _hints_that_failed(log: Log) -> list[Warned]:
    found = [w for w in log.warnings if (w.near or w.failed == QUOTED) and _is_weak(w)]
    found = [w for w in found if w.failed == QUOTED or not is_remark(w)]
    found = [w for w in found if w.failed == QUOTED or not _needs_exception(w) or _raises_later(log, w)]
    if not found or has_reason(log):
        return []
    latest: dict[object, Warned] = {}
    for warned in sorted(found, key=lambda w: w.seen.number):
        latest[warned.process or warned.quoted_by] = warned
    return list(latest.values())


def _is_weak(warned: Warned) -> bool:
    texts = (_HINT, TEARDOWN, SHARP, DEVICE, _NO_VERBS)
    return any(pattern.search(warned.text) for pattern in texts) and not follows(warned)


def _needs_exception(warned: Warned) -> bool:
    return TEARDOWN.search(warned.text) is not None or SHARP.search(warned.text) is not None


def _raises_later(log: Log, warned: Warned) -> bool:
    errors = log.account.of(f.TorchError)
    return any(seen.source == warned.seen.source and seen.number > warned.seen.number for _, _, seen in errors)


def follows(warned: Warned) -> bool:
    """Return whether the warning follows from an earlier failure: of a peer, or of this process."""
    words = words_of(warned)
    return words is not None and words.kind == CONSEQUENCE


def is_hint(warned: Warned) -> bool:
    """Return whether the warning is advice."""
    return _HINT.search(warned.text) is not None


def severity(log: Log, warned: Warned) -> str:
    """Return ``error``, ``warning`` or ``info``, by what follows the warning, else by its words."""
    words = words_of(warned)
    alone = "warning" if words is None else words.alone
    return "error" if warned.failed or (alone == "warning" and _is_before_exception(log, warned)) else alone


def _is_before_exception(log: Log, warned: Warned) -> bool:
    """Return whether an exception for a failed call of NCCL follows, of which no other line gives the reason.

    At ``NCCL_DEBUG=WARN`` the failed calls are not printed, and PyTorch before 1.13 does not quote the last error.
    """
    return any(
        seen.source != warned.seen.source or seen.number > warned.seen.number for seen in log.exceptions_without_reason
    )


def errors_of(log: Log, kind: str) -> list[Warned]:
    """Return the warnings of a class that are errors, except those that other checks report."""
    found = [w for w in log.warned(kind) if is_reason(log, w) and not _repeats(w)]
    found += [w for w in hints_that_failed(log) if w.kind == kind]
    # A proxy thread that failed for a rank follows from another reason, if there is one.
    causes = [w for w in found if not _PROXY.search(w.text)]
    return causes if len(causes) == len(found) or has_reason(log) else found


def _repeats(warned: Warned) -> bool:
    """Return whether an earlier warning of the same failure has the reason: of the same kind, or of known words where this one's are not."""
    after = warned.after
    return (
        after is not None
        and words_of(after) is not None
        and warned.kind in (after.kind, OTHER)
        and not is_explained(after)
    )


def is_reason(log: Log, warned: Warned) -> bool:
    """Return whether the warning is an error that no other check reports."""
    return severity(log, warned) == "error" and not is_explained(warned)


def has_reason(log: Log) -> bool:
    """Return whether some warning or exception gives the reason of a failure."""
    return any(is_reason(log, w) and not _PROXY.search(w.text) for w in log.warnings)


def of_kind(kind: str) -> Check:
    """Return the check for the errors of one known class."""

    def check(log: Log) -> Iterator[Hit]:
        for hit in by_words(log, errors_of(log, kind)):
            by_fault = kind == "cuda_error" and fails_by_fault(log, hit.says, hit.evidence)
            yield hit._replace(follows=by_fault or hit.follows)

    return check


def unknown(log: Log) -> Iterator[Hit]:
    """Warnings of unknown words that are the reason of a failure; not those that follow a known one of the same failure."""
    for hit_of, found in _by_place(log):
        hits = by_words(log, found)
        yield from (hit._replace(says=f"{hit_of[0]}: {hit.says}", do=hit_of[1]) for hit in hits)


def _by_place(log: Log) -> Iterable[tuple[tuple[str, str], list[Warned]]]:
    found: dict[tuple[str, str], list[Warned]] = {}
    for warned in errors_of(log, "other"):
        place = warned.text if warned.quoted_by is not None else warned.origin or warned.failed
        found.setdefault(subsystem(place), []).append(warned)
    return found.items()


def unknown_alone(log: Log) -> Iterator[Hit]:
    """Warnings of unknown words, without a failure."""
    yield from by_words(log, [w for w in log.warned("other") if severity(log, w) == "warning" and not is_explained(w)])


def known_alone(log: Log) -> Iterator[Hit]:
    """Warnings of known words that are no errors."""
    kinds = [kind for kind in KINDS if kind != "other"]
    yield from by_words(log, [w for w in log.warned(*kinds) if severity(log, w) == "warning" and not is_explained(w)])


def hints(log: Log) -> Iterator[Hit]:
    """Warnings that are advice."""
    reasons = {id(w) for w in hints_that_failed(log)}
    found = [w for w in log.warnings if id(w) not in reasons and (is_hint(w) or _is_info(log, w))]
    harmless: dict[Words, list[Warned]] = {}
    others = []
    for warned in found:
        words = words_of(warned)
        if words is not None and words.is_harmless:
            harmless.setdefault(words, []).append(warned)
        else:
            others.append(warned)
    yield from by_words(log, others)
    for words, every in harmless.items():
        same = once(every)
        more = f" and {many(len(same) - 1, 'other text')}" if len(same) > 1 else ""
        says = f"{same[0].text}{more}{_seen_by(every)}: {words.means.rstrip('.')}"
        yield Hit(says, [warning.seen for warning in same], words.means, words.do)


def _is_info(log: Log, warned: Warned) -> bool:
    return severity(log, warned) == "info" and not warned.failed and not is_explained(warned) and not _is_change(warned)


def by_words(log: Log, warned: Iterable[Warned]) -> Iterator[Hit]:
    """Yield one hit for each text, ignoring its numbers, with the remedy of its words, and the settings that this names."""
    alike: dict[tuple[Words | None, str], list[Warned]] = {}
    for warning in warned:
        alike.setdefault((words_of(warning), _VARIES.sub("#", warning.text)), []).append(warning)
    for (words, _), every in alike.items():
        same = once(every)
        times = sum(warning.seen.lines for warning in same)
        more = f" ({times} times{', in variants' if len(same) > 1 else ''})" if times > 1 else ""
        means, do = ("", "") if words is None else (words.means, words.do)
        if words is not None and words.is_harmless and severity(log, same[0]) == "error":
            means, do = _FAILED, subsystem(same[0].origin or same[0].failed)[1]
        also = _also(same) if words is not None and words.kind == "duplicate_gpu" else ""
        peer = _PEER_HOST.search(same[0].text)
        about = f"{also or more}{f'; the peer is on {peer[1]}' if peer else ''}{_seen_by(every)}"
        says = f"{_versions(same[0].text)}{about}{_settings(log, means + do + same[0].text)}"
        yield Hit(says, [warning.seen for warning in same], means, do, words is not None and words.is_consequence)


def _also(warned: list[Warned]) -> str:
    """Return what the other variants of a text name; two ranks in the other order are no variant."""
    by_names: dict[tuple[str, ...], str] = {}
    for each in warned:
        named = each.text.rpartition(" : ")[2]
        by_names.setdefault(tuple(sorted(named.split())), named)
    others = list(by_names.values())[1:]
    return f"; also {some(others, _MOST_VARIANTS)}" if others else ""


def once(warned: Iterable[Warned]) -> list[Warned]:
    """Return each text once, with the lines of all processes that printed it."""
    by_text: dict[str, Warned] = {}
    for each in warned:
        same = by_text.get(each.text)
        if same is None:
            seen = Seen(each.seen.source, each.seen.number, each.seen.line)
            seen.lines = each.seen.lines
            by_text[each.text] = replace(each, seen=seen)
        elif each.quoted_by is None:  # an exception quotes a warning that may be in the log
            same.seen.lines += each.seen.lines
    return list(by_text.values())


def _seen_by(warned: Iterable[Warned], on: str = "on", raised: str = "raised by") -> str:
    """Return the processes that printed warnings, or the ranks that raised their text; empty if they are not known."""
    found = list(warned)
    processes = [each.process for each in found if each.process is not None]
    if processes:
        return f"; {on} {who(processes)}"
    marks = sorted({each.quoted_by for each in found if each.quoted_by})
    one = _RANK.sub(r"rank \1", marks[0]) if marks else ""
    return f"; {raised} {one if len(marks) == 1 else many(len(marks), 'rank')}" if marks else ""


def _settings(log: Log, text: str) -> str:
    """Return the settings of the log that a text names."""
    named = [name for name in dict.fromkeys(_SETTING.findall(text)) if name in log.env]
    found = [f"{name}={'|'.join(log.env[name])}" for name in named]
    return f"; the log has {', '.join(found)}" if found else ""


def _versions(text: str) -> str:
    """Return the text with the versions of a mismatch as NCCL names them: 22707 is 2.27.7."""
    found = _VERSIONS.search(text)
    if found is None:
        return text
    rank, version, other, others = found.groups()
    return f"{text}: rank {rank} has {_version(int(version))}, rank {other} has {_version(int(others))}"


def _version(code: int) -> str:
    """Return a version number as text; from 2.9 on it is 10000 times the major one, before 1000 times.

    >>> _version(22707), _version(2804)
    ('2.27.7', '2.8.4')
    """
    unit = 10_000 if code >= 10_000 else 1_000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"


# -- what only follows ----------------------------------------------------------------------------


def _of_peers(log: Log) -> list[Warned]:
    return [w for w in log.warnings if (follows(w) and _PEER.search(w.text)) or _PROXY_OF_PEER.search(w.text)]


def _of_others(log: Log) -> list[Warned]:
    return [w for w in log.warnings if follows(w) and not _PEER.search(w.text) and not TEARDOWN.search(w.text)]


def _has_failed(log: Log, warned: Iterable[Warned]) -> bool:
    return any(w.failed or _is_before_exception(log, w) for w in warned)


def peers_lost(log: Log) -> Iterator[Hit]:
    """Calls that failed because peers had closed their connections or ended, with the addresses of these."""
    found = _of_peers(log)
    if _has_failed(log, found):
        peers = list(dict.fromkeys(address for w in found for address in _ADDRESS.findall(w.text)))
        whom = f"the process at {peers[0]}" if len(peers) == 1 else f"{len(peers)} peers ({some(peers)})"
        seen_by = _seen_by(found, "seen by", "seen by")
        says = f"{whom if peers else 'a peer'} closed the connection or ended first{seen_by}"
        yield Hit(says, [w.seen for w in once(found)])


def peers_closed(log: Log) -> Iterator[Hit]:
    """A peer closed its connection, which failed no call."""
    found = _of_peers(log)
    if not _has_failed(log, found):
        yield from by_words(log, found)


def earlier_failures(log: Log) -> Iterator[Hit]:
    """Calls that failed because this process had failed before."""
    found = _of_others(log)
    if _has_failed(log, found):
        yield from by_words(log, found)


def clean_ups(log: Log) -> Iterator[Hit]:
    """Warnings at the end of a process, with no failed call."""
    found = _of_others(log)
    if not _has_failed(log, found):
        yield from by_words(log, found)
