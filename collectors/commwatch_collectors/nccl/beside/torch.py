"""Line forms of PyTorch, torchcomms and Gloo, 1.12 to 2.15. ``forms.py`` has those of NCCL, and the rules for patterns."""

from __future__ import annotations

import re

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside.form import Form, form, integer, made, who

_WORK = re.compile(r"\b(\w+)(?:\(ms\))?=(\[[^\]]*\]|\w+)", re.ASCII)


def _watchdog(match: re.Match[str]) -> f.Fact | None:
    work = dict(_WORK.findall(match[2]))
    if "OpType" not in work:
        return None
    seq, numel_in, numel_out, timeout = (
        _count(work.get(key, "")) for key in ("SeqNum", "NumelIn", "NumelOut", "Timeout")
    )
    where = _where(match.string)
    return f.Watchdog(integer(match[1]), seq, work["OpType"], numel_in, numel_out, timeout, integer(match[3]), where)


def _count(digits: str) -> int | None:
    """Return a count; ``None`` if there is none: coalesced operations print -1 without its sign."""
    return int(digits) if digits.isdecimal() and len(digits) < 19 else None


_MARK = re.compile(r"\[rank(\d+)\]:", re.ASCII)
_SCOPE = re.compile(r"\[PG (?:ID )?(\d+)(?:\s*PG GUID ([^\s(\]]+))?(?: ?\(([^()\]]{0,200})\))?", re.ASCII)


def _where(text: str) -> f.Where:
    """Return what marks and scopes show, where a text has one of them: it may hold several lines that were glued."""
    marks, scopes = set(_MARK.findall(text)), set(_SCOPE.findall(text))
    return f.Where(integer(marks.pop()) if len(marks) == 1 else None, *(scopes.pop() if len(scopes) == 1 else ()))


_FAILED_AT = re.compile(r"(Timeout at [A-Z]{3,8}|detected by watchdog at) work(?: sequence id)?: (\d+)", re.ASCII)
_SIGNAL = re.compile(r"dump signal due to a collective timeout from (?: ?rank (\d+)|this local rank)", re.ASCII)


def _progress(match: re.Match[str]) -> f.Fact:
    before, work, source, why = match[2], None, None, ""
    if at := _FAILED_AT.search(before):
        why, work = "time-out" if at[1][0] == "T" else "failure", integer(at[2])
    elif signal := _SIGNAL.search(before):
        why, source = "dump", integer(signal[1]) if signal[1] else None
    counts = integer(match[1]), integer(match[3]), integer(match[4])
    return f.Progress(*counts, _where(match.string), why, work, source)


_RANK = re.compile(r"\[Rank (\d{1,9})\]", re.ASCII)


def _gave_up(match: re.Match[str]) -> f.Fact:
    rank = _RANK.search(match.string)
    number = match[1] if match.re.groups else rank[1] if rank else None
    return f.GaveUp(None if number is None else integer(number), _where(match.string))


def _stuck(needle: str, words: str, gil: bool = False) -> Form:
    return made(
        needle,
        rf"Rank (\d+)\].{{0,200}}?{words}",
        lambda m: f.Stuck(integer(m[1]), integer(m[2]) if m[2] else None, gil, _where(m.string)),
    )


def _comm_timeout(match: re.Match[str]) -> f.Fact:
    where = _where(match.string)._replace(name=match[2] or "")
    return f.CommTimeout(integer(match[1]), integer(match[3]) if match[3] else None, where)


_SIDE = re.compile(
    r"(?:\A|, but )Rank (\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\(", re.ASCII
)
_FIELDS = {
    "as number": re.compile(r"SequenceNumber=(\d+)", re.ASCII),
    "calls": re.compile(r"OpType=(\w+)", re.ASCII),
    "with shape": re.compile(r"TensorShape=\[([^\]]{0,1000})\]", re.ASCII),
    "of": re.compile(r"TensorDtypes=(\w+)", re.ASCII),
}


#: The other side, where a report does not have it.
OTHERS = "other ranks make another call"


def _mismatch(match: re.Match[str]) -> f.Fact:
    """Return both sides as one sentence: what they call, and what differs."""
    sides = list(_SIDE.finditer(match[1]))
    if not sides or (len(sides) == 1 and ", but Rank " in match[1]):
        return f.Desync(f"Detected mismatch between collectives on ranks. {match[1]}".strip())
    ends = [side.start() for side in sides[1:]] + [len(match[1])]
    found = []
    for side, end in zip(sides, ends, strict=True):
        body = match[1][side.end() : end]
        values = {name: value[1] for name, pattern in _FIELDS.items() if (value := pattern.search(body))}
        found.append((side[1], values))
    called = [_called(rank, values) for rank, values in found]
    return f.Desync("; ".join(called if len(called) > 1 else [*called, OTHERS]))


def _called(rank: str, values: dict[str, str]) -> str:
    parts = [f"rank {rank} calls {values.get('calls', 'a collective')}"]
    parts += [f"with shape [{values['with shape']}]"] if "with shape" in values else []
    parts += [f"{name} {values[name]}" for name in ("of", "as number") if name in values]
    return " ".join(parts)


def _barrier(match: re.Match[str]) -> f.Fact:
    return f.Barrier(tuple(integer(rank) for rank in re.findall(r"\d+", match[1])), integer(match[2]))


_GLOO = r"gloo/[\w./-]{1,200}:\d{1,6}\]? (?:\w[\w ]{0,40} )?"
_PEER = r"\[(?P<host>[^\]]{1,80})\](?P<port>:\d{1,5})?"


def _gloo(kind: str, needle: str, pattern: str) -> Form:
    """Return a form of Gloo, with the groups ``text``, and ``host`` and ``port`` of the peer."""

    def make(match: re.Match[str]) -> f.Fact:
        found = match.groupdict()
        return f.Gloo(kind, found["text"], f"{found.get('host') or ''}{found.get('port') or ''}", who(match.string))

    return made(needle, pattern, make)


def _store(kind: str, needle: str, pattern: str) -> Form:
    """Return a form of TCPStore: its text is the whole match. Warnings are no failures: PyTorch tries again, or ends."""
    return made(
        needle,
        pattern,
        lambda m: None if _WARNS.search(m.string, 0, m.start()) else f.Store(kind, m[0].strip(" ."), who(m.string)),
    )


_WARNS = re.compile(r"\[W[\d ]")

FORMS: tuple[Form, ...] = (
    made(
        "Watchdog",
        r"Rank (\d+)\] Watchdog caught collective operation timeout: Work[A-Z]{3,8}\(([^()]{0,1000}(?:\(ms\)=\d+)?[^()]{0,200})\) ran for (\d+) milliseconds",
        _watchdog,
    ),
    made(
        "ast enqueued",
        r"Rank (\d+)\](.{0,600}?)[Ll]ast enqueued(?: [A-Z]{3,8})? work: (-?\d+), last completed(?: [A-Z]{3,8})? work: (-?\d+)",
        _progress,
    ),
    form("NCCL error in", r"NCCL error in: [^\s,]{1,400}, (?P<reason>[^,(]{1,80}?)(?: \(|,|$)", f.TorchError),
    form("NCCL error: ", r"exception[^:]{0,60}: NCCL error: (?P<reason>[^,(]{1,80}?)(?: \(|,|$)", f.TorchError),
    form(
        "sync error",
        r"\[rank=\d{1,9}\].{0,100}?(?:nccl hit async error(?: on rank \d{1,9})?|Async error on rank \d{1,9}): "
        r"(?P<reason>[^,(]{1,80}?)(?: \(|,|$)",
        f.TorchError,
    ),
    made(
        "from another rank",
        r"Rank (\d+)\] Observed flight recorder dump signal from another rank",
        lambda m: f.Relayed(integer(m[1]), _where(m.string)),
    ),
    made("have failed or timed out", r"Some NCCL operations have failed or timed out", _gave_up),
    made("communicator was aborted on", r"NCCL communicator was aborted on rank (\d{1,9})", _gave_up),
    _stuck("watchdog got stuck", r"watchdog got stuck for (\d+) seconds"),
    _stuck("Heartbeat monitor", r"Heartbeat monitor timed out!()"),
    _stuck("no heartbeat", r"First PG on this rank that detected no heartbeat()"),
    _stuck("watchdog hang", r"due to \w{1,40} watchdog hang()"),
    _stuck("Could not acquire GIL", r"Could not acquire GIL()", gil=True),
    made(
        "[rank=",
        r"\[rank=(\d{1,9})\](?:\[name=([^\]]{0,200})\])? "
        r"(?:Operation timed out after (\d{1,15}) ms|.{0,100}?(?:due to timeout|watchdog detected operation timeout))",
        _comm_timeout,
    ),
    form("[rank", r"\[rank(?P<rank>\d+)\]:", f.Speaks),
    made(
        "[rank",
        r"(?<=\[rank)(\d+)\]:\s*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.{0,200})",  # not the whole text: others follow
        lambda m: f.Raised(integer(m[1]), m[2].strip()[:200]),
    ),
    # ranks whose collectives differ
    made(
        "lagging ranks",
        r"(ranks \[[^\]]{0,2000}\] are the lagging ranks.{0,400})",
        lambda m: f.Desync(m[1].strip()),
    ),
    made(
        "collective #",
        r"(\[[\d, .]+\] (?:joined but didn't finish|finished) collective #\d+.{0,400})",
        lambda m: f.Desync(m[1].strip()),
    ),
    made("Detected mismatch", r"Detected mismatch between collectives on ranks\. ?(.{0,6000})", _mismatch),
    form(
        "DDP expects same model",
        r"(?P<text>DDP expects same model across all ranks, but Rank \d{1,9} has \d{1,9} params, while rank \d{1,9} has inconsistent \d{1,9} params)",
        f.Desync,
    ),
    form(
        "appears not to match",
        r"(?P<text>\[?(?:Rank \d{1,9}\]?: )?params\[\d{1,9}\] in this process with (?:sizes|strides) \[[^\]]{0,1000}\] "
        r"appears not to match (?:sizes|strides) of the same param in process \d{1,9})",
        f.Desync,
    ),
    made(
        "preamble.length",
        r"op\.(?:preamble\.)?n?length <= op\.nbytes\. (\d{1,19}) vs (\d{1,19})",
        lambda m: f.Desync(f"Gloo received {m[1]} bytes where {m[2]} were expected: ranks pass different sizes"),
    ),
    # monitored barriers
    made(
        "failed to pass monitoredBarrier",
        r"Ranks? (\d[\d, ]{0,4000}) failed to pass monitoredBarrier in (\d{1,15}) ms",
        _barrier,
    ),
    made(
        "timed out in monitoredBarrier",
        r"Rank \d{1,9} timed out in monitoredBarrier after (\d{1,15}) ms",
        lambda m: f.Barrier((), integer(m[1])),
    ),
    made(
        "reached monitoredBarrier",
        r"successfully reached monitoredBarrier, but received errors",
        lambda m: f.Barrier((), None),
    ),
    # Gloo
    _gloo("closed", "closed by peer [", rf"(?P<text>Connection closed by peer) {_PEER}"),
    _gloo("closed", "gloo/", rf"{_GLOO}{_PEER}: (?P<text>Connection reset by peer|Broken pipe)"),
    _gloo("refused", "gloo/", rf"{_GLOO}{_PEER}: (?P<text>Connection refused|No route to host|Network is unreachable)"),
    _gloo("refused", "connectFullMesh", r"(?P<text>Gloo connectFullMesh failed)"),
    _gloo(
        "timed out",
        "Timed out waiting ",
        r"(?P<text>Timed out waiting \d{1,15} ?ms for \w{1,20} operations? to complete)",
    ),
    _gloo("timed out", "gloo/", rf"{_GLOO}(?P<text>(?i:connect time(?:out|d out)))(?: {_PEER})?"),
    _gloo("interface", "nable to find", r"(?P<text>Unable to find (?:interface|address) for: \S{1,80})"),
    _gloo("device", "makeDeviceFor", r"(?P<text>makeDeviceFor(?:Hostname|Interface)\(\): unsupported gloo device)"),
    # TCPStore
    _store(
        "connect",
        "client socket has timed out",
        r"The client socket has timed out after \w{1,20} while trying to connect to \([^)]{1,200}\)",
    ),
    _store(
        "connect",
        "client socket has failed",
        r"The client socket has failed to connect to any network address of \([^)]{1,200}\)",
    ),
    _store(
        "port",
        "server socket has failed",
        r"The server socket has failed to listen on any local network address(?:\. port: \d{1,6})?",
    ),
    _store(
        "port",
        "server socket has failed",
        r"The server socket has failed to bind to \S{1,100} \(errno: 98\b[^)]{0,60}\)",
    ),
    _store(
        "join",
        "waiting for clients",
        r"Timed out after \d{1,9} seconds waiting for clients\. \d{1,9}/\d{1,9} clients joined",
    ),
    made(
        "store based barrier",
        r"Timed out initializing process group in store based barrier.{1,200}?world_size=(\d{1,9}), worker_count=(\d{1,9})",
        lambda m: f.Store("join", f"{m[2]} of {m[1]} ranks came to the store-based barrier in time", who(m.string)),
    ),
    made(
        "ncclUniqueId from [",
        r"\[(\d{1,9})\] is setting up NCCL communicator and retr(?:ie|ei)ving ncclUniqueId from \[(\d{1,9})\].{0,200}?got error: (.{1,200})",
        lambda m: f.Store(
            "id", f"rank {m[1]} waited for the NCCL id from rank {m[2]}: {m[3].partition('. This')[0].strip()}"
        ),
    ),
    _store("connect", "Original timeout was", r"connect\(\) timed out\. Original timeout was \d{1,15} ms"),
    _store("connect", "C10d store", r"The connection to the C10d store has failed"),
    _store("join", "RendezvousTimeoutError", r"RendezvousTimeoutError"),
    _store("closed", "RendezvousClosedError", r"RendezvousClosedError"),
    _store("port", "RuntimeError: Address", r"(?<=RuntimeError: )Address already in use"),
    _store("key", "RuntimeError: Socket", r"(?<=RuntimeError: )Socket Timeout"),
    _store("key", "wait timeout after", r"wait timeout after \d{1,15}ms, keys: \S{1,200}"),
    _store("lost", "Connection was likely closed", r"[Ff]ailed to recv, got 0 bytes\. Connection was likely closed"),
    _store("lost", "recvValue", r"recvValue(?:WithTimeout)? failed on SocketImpl\([^)]{1,300}\): [^\[(]{1,100}"),
    _store("lost", "sendBytes", r"sendBytes failed on SocketImpl\([^)]{1,300}\): [^\[(]{1,100}"),
    _store("lost", "DistNetworkError", r"DistNetworkError: (?:Connection reset by peer|Broken pipe|Connection closed)"),
)
