"""What a report must not say of a job of the fault matrix, because its framework, its backend or its cause contradicts it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from commwatch_agent.incidents.answers import IncidentDetails, details_of
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.report.report import Report
from commwatch_agent.report.report_text import headlines
from tests.faults.scenarios import LATE, Scenario

#: The frameworks of the shapes that have one, as their ranks report them; the others exchange what they have by themselves.
_FRAMEWORKS = {
    "ddp1": "ddp", "ddp4": "ddp", "ddp8": "ddp", "overlap": "ddp", "accumulated": "ddp", "fsdp": "fsdp2",
}  # fmt: skip
#: Words of the settings of each framework.
_SETTINGS = {
    "ddp": r"DDP:|bucket_cap_mb|static_graph|compress_hook",
    "fsdp2": r"FSDP2|fully_shard|MixedPrecisionPolicy",
    "fsdp": r"FSDP:|auto_wrap_policy|BackwardPrefetch",
    "deepspeed": r"DeepSpeed|overlap_comm|reduce_bucket_size|communication_data_type",
    "megatron": r"Megatron|`--[a-z-]+",
}
#: All jobs ran with Gloo, on one node without GPUs.
_NOT_HERE = (
    r"NCCL|NVLink|InfiniBand|RDMA|\bNICs?\b|nvidia-smi|faster link|several links|links of the ranks|crosses nodes"
)
#: By the words in the verdict on why a rank is late: the code of the reason, and words of the first advice and of the headline.
_CAUSES = {"for a core": ("no_core", "waiting for a CPU core"), "CPU quota": ("quota", "stopped by a CPU quota")}


#: Figures in percent differ by rounding.
_ROUNDED = 1


def frameworks_of(shape: str) -> list[str]:
    """The frameworks that the ranks of a shape report."""
    return [_FRAMEWORKS[shape]] if shape in _FRAMEWORKS else []


def incident_of(scenario: Scenario, report: Report) -> IncidentDetails:
    """The incident of a job with a late rank, with the reason that its verdict gives; the records do not have what the node was asked for.

    Args:
        report: on the job without the incident. It has what the other ranks waited, which is what the incident costs.
    """
    code = next((code for words, (code, _) in _CAUSES.items() if words == scenario.why), None)
    waiting = tuple(set(range(scenario.size)) - set(scenario.ranks))
    cost_rank_s = sum((line.wait_s or 0.0) + (line.p2p_wait_s or 0.0) for line in report.ranks if line.rank in waiting)
    began_at, ended_at = report.job.started_at, report.job.last_seen_at
    return details_of(Incident(
        "1", "straggler", "warning", "ended", "job", "run", ("1",), began_at, began_at, ended_at, ended_at=ended_at, outcome="job_ended",
        cause="late", ranks=scenario.ranks, waiting=waiting, cost_rank_s=cost_rank_s,
        details={} if code is None else {"why_code": code},
    ))  # fmt: skip


def contradictions(scenario: Scenario, report: Report) -> Iterator[str]:
    """Yield the sentences of a report that its job contradicts."""
    headline = dict(headlines(report)).get("comm share", "")
    if scenario.shape.startswith("server"):
        yield from (each.title for each in report.advice if each.rule in ("micro_batches", "uneven_work"))
        yield from (headline,) if re.search("late rank|uneven", headline.partition("above")[2]) else ()
    texts = [text for each in report.advice for text in (each.title, each.gain, each.do, *each.because)]
    own = frameworks_of(scenario.shape)
    foreign = [pattern for name, pattern in _SETTINGS.items() if name not in own]
    yield from (text for text in texts for pattern in (*foreign, _NOT_HERE) if re.search(pattern, text))
    if own:
        yield from (text for text in texts if re.search(r"instead of `all_reduce`|or use DDP", text))
    yield from _about_ranks(scenario, report, headline)
    yield from _about_numbers(texts, headline)
    yield from _about_parts(report, headline)


def _about_ranks(scenario: Scenario, report: Report, headline: str) -> Iterator[str]:
    late = scenario.kinds == LATE
    for each in report.advice:
        if each.rule == "straggler" and not late:
            yield each.title
    if late and "communication is the bottleneck" in headline:
        yield headline
    blamed = re.findall(r"ranks? ([\d, -]+)", headline)
    if blamed and not late:
        yield headline
    if late and scenario.why in _CAUSES:
        _, words = _CAUSES[scenario.why]
        first = report.advice[0].title if report.advice else "no advice"
        yield from () if words in first else (f"first advice: {first}",)
        yield from () if words in headline or "bottleneck" not in headline else (headline,)
    cores = [each.rule == "scarce_cores" for each in report.advice[:1] if report.advice_last_s is None]
    if cores and "look first at" in headline and cores != ["look first at the CPUs" in headline]:
        yield f"{headline} / {report.advice[0].title}"


def _about_numbers(texts: Sequence[str], headline: str) -> Iterator[str]:
    """Yield a bound below a replay beside it, and a headline that blames communication for what is not transfer."""
    for text in texts:
        bound, replayed = (
            re.search(r"up to (\d+)%", text),
            re.search(r"replay of the recorded steps gives (\d+)%", text),
        )
        if bound and replayed and int(bound[1]) < int(replayed[1]):
            yield text
    transfer = re.search(r"(\d+)% transfer", headline)
    if "communication is the bottleneck" in headline and transfer and int(transfer[1]) < 30:
        yield headline


def _about_parts(report: Report, headline: str) -> Iterator[str]:
    """Yield numbers of the advice on the whole job that the headline has otherwise: its communication, and the transfer in it."""
    comm, transfer = re.search(r"^(\d+)%", headline), re.search(r"(\d+)% transfer", headline)
    for each in report.advice if report.advice_last_s is None else ():
        because = "; ".join(each.because)
        pairs = (
            (comm, r"communication takes (\d+)%"),
            (transfer, r"transfer takes (\d+)%"),
        )
        for there, here in pairs:
            found = re.search(here, because)
            if there and found and abs(int(there[1]) - int(found[1])) > _ROUNDED:
                yield f"{headline} / {because}"
        of_rank = r"the others wait (\d+)% of the time for rank \d+(?!\d)(?!(?:, which cost [^;(]*)? ?\(the comm share)"
        for share in re.findall(of_rank, because):
            if comm and int(share) > int(comm[1]) + _ROUNDED:
                yield f"{headline} / {because}"
        if each.rule == "overlap" and transfer and int(transfer[1]) == 0:
            yield f"{headline} / {each.title}"
