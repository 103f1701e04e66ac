"""``commwatch whatif``: predict the step time of a job after changes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from commwatch_agent.cli.common_flags import add_node, last_seconds
from commwatch_agent.config import Config
from commwatch_agent.model.durations import LAST
from commwatch_agent.text.terminal_text import complain, lines, output_cells

if TYPE_CHECKING:
    from commwatch_agent.model.views import JobView
    from commwatch_agent.whatif.model import Model


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    whatif = commands.add_parser(
        "whatif",
        parents=[common],
        help="predict the step time of a job after changes",
        description="Replay the latest recorded steps of a job with changes, and print the step time, the shares of communication, and how the "
        "job scales. Changes apply together. Without any, print the answers to the usual questions (docs/whatif.md).",
    )
    whatif.add_argument("job", nargs="?", help="job id, or the beginning of one (default: the latest)")
    _add_changes(whatif.add_argument_group("changes"))
    whatif.add_argument(
        "--with",
        dest="runs",
        action="append",
        default=[],
        metavar="JOB",
        help="another run of the same training, with another number of ranks: all runs together show how the job scales; may be repeated",
    )
    whatif.add_argument(
        "--last",
        type=last_seconds,
        default=LAST,
        metavar="AGE",
        help="the part of the job's end whose steps are replayed, at most the latest 50, such as 90s or 2h; all: these 50, however "
        "old (default: %(default)s)",
    )
    add_node(whatif)
    whatif.add_argument("--json", action="store_true", help="print JSON")
    whatif.set_defaults(command=_whatif)


def _add_changes(changes: Any) -> None:
    add = changes.add_argument
    add(
        "--link",
        metavar="LINK",
        help="another link: 2x (twice the bandwidth), or one of docs/hardware.md, such as '8 x ib-ndr', or the file name, without .json, of a reference "
        "that `commwatch bench --list` shows",
    )
    add("--latency", metavar="FACTOR", help="another latency of the link, such as 0.5x")
    add(
        "--group",
        metavar="LABEL",
        help="only this group is on that link (default: those that span nodes; all groups if none does)",
    )
    add("--no-late", action="store_true", help="no rank is late")
    add(
        "--no-late-rank",
        type=int,
        action="append",
        default=[],
        metavar="RANK",
        help="this rank is not late; may be repeated",
    )
    add(
        "--compute", action="append", default=[], metavar="[RANK=]FACTOR",
        help="compute time as a multiple of the recorded one, such as 0.5x, or 3=0.5x for rank 3; may be repeated",
    )  # fmt: skip
    add("--buckets", metavar="SIZE", help="DDP's buckets have this size, such as 25MiB")
    add(
        "--compress",
        metavar="FORM",
        help="gradients are sent as fp16, bf16 or int8, or as this part of their bytes, such as 0.25",
    )
    add(
        "--compress-cost",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="compute for packing 1 GB of gradients, and for unpacking it (default: 0)",
    )
    add("--accumulate", type=int, metavar="K", help="gradients are exchanged once in K micro-steps")
    add("--ranks", type=int, metavar="N", help="the job has N ranks, and each keeps its work")
    kind = changes.add_mutually_exclusive_group()
    kind.add_argument("--shard", action="store_true", help="FSDP in place of DDP")
    kind.add_argument("--replicate", action="store_true", help="DDP in place of FSDP")


def _whatif(config: Config, arguments: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict, fields

    from commwatch_agent.analysis.headline import mean_core_wait
    from commwatch_agent.cli.stored import job_in, reading
    from commwatch_agent.reference.references import References, directory
    from commwatch_agent.whatif.answers import study
    from commwatch_agent.whatif.pages import text
    from commwatch_agent.whatif.questions import Question, changes_of

    given = {each.name: getattr(arguments, each.name) for each in fields(Question)}
    given |= {name: tuple(given[name]) for name in ("no_late_rank", "compute")}
    links = References(directory(config.state), config.links).curves()
    changes = changes_of(Question(**given), links)
    with reading(config) as agent:
        jobs = [job_in(agent, name) for name in (arguments.job, *arguments.runs)]
        model, *others = [_model(config, job, arguments) for job in jobs]
        cores = mean_core_wait(agent.ranks(jobs[0].job_id))
    found = study(jobs[0].job_id, model, changes, dict(zip(arguments.runs, others, strict=True)), cores=cores)
    print(json.dumps(asdict(found), indent=2) if arguments.json else lines(text(found, output_cells())))
    return 0


def _model(config: Config, job: JobView, arguments: argparse.Namespace) -> Model:
    """Return the model of a job on all its nodes, or with ``--node`` on this one."""
    from commwatch_agent.commands.timeline import traces_of_others
    from commwatch_agent.report.recorded_steps import model_of
    from commwatch_agent.report.timeline_export import Window, own_trace

    others, silent = ([], {}) if arguments.node else traces_of_others(config, job.job_id, arguments.last)
    for url, why in silent.items():
        complain(f"{url} does not answer: {why}")
    with own_trace(config.history, job.job_id, Window(arguments.last), (), alone=not others) as own:
        return model_of([own, *others], job.world_size)
