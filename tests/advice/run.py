"""Follows each piece of advice in a real job, and compares the measured gain with the promised one (``make advice``, as root).

A job runs on two hosts (network namespaces joined by a link of a known rate or delay), and the test requests the agent's advice. Then the
job runs again with the advice applied. A rule is confirmed if the time per sample decreases by at least half of the promised gain, or, if
the rule names no gain, if it decreases at all.

Arguments: names of rules; only these are tried.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests import prefork
from tests.e2e.hosts import Host, joined_hosts
from tests.faults.run import Place, ranks
from tests.helpers import PATIENCE_S, RunningAgent, agent

TRAIN = Path(__file__).parent / "jobs" / "train.py"
#: Duration of a job, and the time after which its advice is requested, shortly before its end.
SECONDS, ASKED_AFTER_S = 24.0, 18.0
#: Least measured part of a promised gain that confirms it.
LEAST = 0.5


class Trial(NamedTuple):
    """A job, and the same job with the advice of a rule applied."""

    rule: str
    what: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    ranks: int = 2
    #: Arguments of ``tc`` for the link, before and after; empty: the link is not limited.
    link: str = ""
    link_after: str = ""
    #: One agent watches all ranks, as if they were on one node; otherwise each host has an agent.
    one_node: bool = True
    #: The link in the agent's settings (``[links]``); empty: none.
    links: str = ""
    #: Name of the remedy whose gain applies; empty: that of the advice.
    named: str = ""


def slow(rate: str) -> str:
    """Return the arguments of ``tc`` for a link of this rate, such as ``200mbit``."""
    return f"tbf rate {rate} burst 64kb latency 100ms"


#: Placeholder for the number of micro-batches that the advice names.
STEPS = "STEPS"
DDP, SLOW, SLOWER = ("ddp",), slow("600mbit"), slow("200mbit")
TRIALS = (
    Trial("straggler", "the late rank is no longer late", ("plain", "--late", "0.05"), ("plain",)),
    Trial("uneven_work", "all batches are alike", ("plain", "--uneven"), ("plain",)),
    Trial("accumulate_gradients", "as many micro-batches as it says (`no_sync()`)", DDP, (*DDP, "--accumulate", STEPS), link=SLOW, link_after=SLOW),
    Trial("larger_buckets", "60 small sums in one tensor", ("values",), ("values", "--together")),
    Trial("overlap", "DDP in place of all_reduce after the backward pass", ("by_hand",), DDP, link=SLOW, link_after=SLOW),
    Trial("compression", "`fp16_compress_hook`", DDP, (*DDP, "--half"), link=SLOWER, link_after=SLOWER, named="fp16"),
    Trial("faster_network", "twice the rate", DDP, DDP, link=SLOWER, link_after=slow("400mbit"), links="eth-1g"),
    Trial("faster_network", "twice the rate of a link that no setting names", DDP, DDP, link=SLOWER, link_after=slow("400mbit")),
    Trial("below_the_link", "1 Gbit/s, as the link should have", DDP, DDP, link=SLOWER, link_after=slow("1gbit"), links="eth-1g"),
    Trial("tensor_parallel_in_node", "tensor parallel pairs within a node", ("tensor",), ("tensor", "--in-node"), ranks=4, link=slow("400mbit"),
          link_after=slow("400mbit"), one_node=False),
    Trial("micro_batches", "4 micro-batches in place of 2", ("pipe", "--micro", "2"), ("pipe", "--micro", "4")),
)  # fmt: skip


@contextmanager
def shaped(hosts: Sequence[Host], link: str) -> Iterator[None]:
    """Limit the link between the hosts in both directions with ``tc``."""
    for host in hosts if link else ():
        subprocess.run([*host.there, "tc", "qdisc", "add", "dev", host.device, "root", *link.split()], check=True)
    try:
        yield
    finally:
        for host in hosts if link else ():
            host.free()


def advised(running: RunningAgent, rule: str) -> dict[str, Any] | None:
    """Return the current advice of a rule; ``None``: there is none."""
    found: list[dict[str, Any]] = running.get("/api/v1/advice")
    return next((each for each in found if each["rule"] == rule), None)


def played(
    hosts: Sequence[Host], trial: Trial, words: tuple[str, ...], link: str
) -> tuple[float, dict[str, Any] | None]:
    """Run a job; return its samples per second and the advice of the rule, ``None`` if there is none."""
    with ExitStack() as stack:
        stack.enter_context(shaped(hosts, link))
        made = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(1 if trial.one_node else 2)]
        for each in made:
            (each / "commwatch.toml").write_text(f'[links]\n"*" = "{trial.links}"\n' if trial.links else "")
        agents = [
            stack.enter_context(agent(each, "--quiet", "--config", str(each / "commwatch.toml"))) for each in made
        ]
        halves = [
            Place(directory, host.there, host.device)
            for directory, host in zip((made[0], made[-1]), hosts, strict=True)
        ]
        places = [halves[2 * rank // trial.ranks] for rank in range(trial.ranks)]
        command = prefork.command(TRAIN, *words, "--seconds", str(SECONDS))
        first = stack.enter_context(ranks(command, places, "advised"))[0]
        time.sleep(ASKED_AFTER_S)
        said = advised(agents[0], trial.rule)
        out, _ = first.communicate(timeout=PATIENCE_S)
        return float(out.splitlines()[-1]), said


def promised_by(trial: Trial, said: dict[str, Any] | None) -> float | None:
    """Return the share of a step that the advice promises to save; ``None``: no advice, or no promise."""
    if said is None:
        return None
    gains = {each["name"]: each["saves_share"] for each in said["remedies"]}
    share: float | None = gains[trial.named] if trial.named else said["saves_share"]
    return share


def main() -> int:
    """Try the rules and print a table; return the exit code, 1 if a rule is not confirmed."""
    chosen = [trial for trial in TRIALS if trial.rule in (sys.argv[1:] or [trial.rule])]
    failed = 0
    print("| rule | what was done | promised | by | measured | confirmed |\n|---|---|---|---|---|---|", flush=True)
    with joined_hosts(2) as hosts:
        for trial in chosen:
            before, said = played(hosts, trial, trial.before, trial.link)
            named = re.search(r"over (\d+) steps", said["gain"]) if said else None
            followed = tuple(named[1] if named and word == STEPS else word for word in trial.after)
            after, _ = played(hosts, trial, followed, trial.link_after) if said else (before, None)
            saved, promised = 1 - before / after, promised_by(trial, said)
            confirmed = said is not None and saved > 0 and saved >= LEAST * (promised or 0.0)
            failed += not confirmed
            shown = ("–" if said is None else "not known") if promised is None else f"{100 * promised:.0f}%"
            print(
                f"| `{trial.rule}` | {trial.what} | {shown} | {said['gain_source'] if said else '–'} | {100 * saved:.0f}% | {'yes' if confirmed else 'no'} |",
                flush=True,
            )
            print(
                f"    {said['gain'] if said else 'silent'}; {said['because'] if said else ''}",
                file=sys.stderr,
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
