"""The findings of a log: what its checks find, in the order in which it explains a failure. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.evidence import FINISHED, Live, Log, Rule
from commwatch_collectors.nccl.checks.fitting import fit
from commwatch_collectors.nccl.checks.order import CAUSE, CONSEQUENCE, in_time
from commwatch_collectors.nccl.checks.rules import RULES
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.nccl.views import SEVERITIES, Evidence, Finding

#: Most lines that are shown for one finding.
MOST_EVIDENCE = 5


def findings(account: Account, rules: Iterable[Rule] = RULES, live: Live = FINISHED) -> list[Finding]:
    """Return the findings of a log, worst first; of errors those first that explain others, else those that came first.

    What only follows from an error is information, if that error is in the log.
    """
    log = Log(account, live)
    hits = [
        (rule._replace(depth=CONSEQUENCE) if hit.follows else rule, hit) for rule in rules for hit in rule.check(log)
    ]
    if any(rule.severity == "error" and rule.depth == CAUSE for rule, _ in hits):
        hits = [(rule._replace(severity="info") if rule.depth == CONSEQUENCE else rule, hit) for rule, hit in hits]
    versions = {version.version for _, version, _ in account.of(f.Version)}
    order = in_time([hit.evidence for _, hit in hits])
    hits = [hits[at] for at in sorted(range(len(hits)), key=lambda at: _key(hits[at][0], order[at]))]
    return [
        Finding(
            rule.name,
            rule.severity,
            rule.title,
            hit.says,
            hit.means or rule.means,
            fit(rule.name, hit.says, hit.do or rule.do, versions),
            _evidence(hit.evidence),
        )
        for rule, hit in hits
    ]


def _key(rule: Rule, at: float) -> tuple[int, int, float]:
    error = rule.severity == "error"
    return SEVERITIES.index(rule.severity), rule.depth if error else CAUSE, at if error else 0.0


def _evidence(places: Iterable[Seen]) -> list[Evidence]:
    """Return each line once, ``MOST_EVIDENCE`` at most: a line may hold several facts of one finding."""
    once = {(seen.source, seen.number): Evidence(seen.source, seen.number, seen.line.strip()) for seen in places}
    return list(once.values())[:MOST_EVIDENCE]
