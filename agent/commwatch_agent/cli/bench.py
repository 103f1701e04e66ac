"""``commwatch bench``: measure the links with the user's launch command, and keep the result as a reference."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch.wire.errors import UsageError
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import line

if TYPE_CHECKING:
    from commwatch_agent.reference.references import Measured


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        parents=[common],
        help="measure the links: commwatch bench -- torchrun ...",
        description="Sweep collectives over sizes with your launch command, print a table like that of nccl-tests, and keep it as a "
        "reference to compare jobs with.",
    )
    bench.add_argument("--backends", help="comma-separated backends to compare (default: the one torch would choose)")
    bench.add_argument(
        "--ops",
        help="comma-separated operations (default: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all)",
    )
    bench.add_argument("--min-bytes", default="1K", help="smallest size (default: 1K)")
    bench.add_argument("--max-bytes", default="64M", help="largest size (default: 64M)")
    bench.add_argument("--factor", type=float, default=4.0, help="factor from one size to the next (default: 4)")
    bench.add_argument(
        "--seconds", type=float, default=20.0, help="approximate duration of the whole sweep (default: 20)"
    )
    bench.add_argument(
        "--import", type=Path, dest="file", metavar="FILE", help="import the output of nccl-tests, or its -J file"
    )
    bench.add_argument("--list", action="store_true", help="list the references")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="launch command that starts the ranks"
    )
    bench.set_defaults(command=_bench)


def _bench(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.proof import bench, bench_tables

    command = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    if bool(command) + (arguments.file is not None) + arguments.list != 1:
        raise UsageError("give one of: a launch command (commwatch bench -- torchrun ...), --import FILE, --list")
    if arguments.list:
        return _list_references(config, arguments.json)
    if arguments.file is not None:
        ops = bench.operations(arguments.ops)
        if len(ops) > 1:
            raise UsageError("--import needs a single operation in --ops, for output that does not name its own")
        kept, left_out = bench.take_in(arguments.file, config.state, ops[0] if ops else None)
    else:
        wanted = bench.wanted(
            arguments.backends,
            arguments.ops,
            arguments.min_bytes,
            arguments.max_bytes,
            factor=arguments.factor,
            seconds=arguments.seconds,
        )
        growing = bench_tables.Growing()

        def measured(result: dict[str, Any]) -> None:
            if not arguments.json:
                for row in growing.lines(result):
                    print(row, flush=True)

        swept = bench.run(command, wanted, config.state, os.environ, measured)
        left_out = swept.left_out
        kept = [bench.keep(outcome, config.state, command) for outcome in swept.outcomes]
    if arguments.json:
        print(json.dumps(bench.as_json(kept, left_out), indent=2))
        return 0 if kept else 1
    references = [reference for _, reference in kept]
    for part in _conclusions(references) if arguments.file is None else map(bench_tables.table, references):
        print(part)
    for remark in left_out:
        print("\n".join(map(line, bench_tables.note(remark))))
    for path, _ in kept:
        print(line(f"# kept as {path}"))
    return 0 if kept else 1


def _conclusions(references: Sequence[Measured]) -> Iterator[str]:
    """Yield what follows the rows of a sweep, which have been printed: the curves, and the backends side by side."""
    from commwatch_agent.proof import bench_tables

    for reference in references:
        if len(references) > 1:
            yield "#"
            yield from bench_tables.note(f"curves of {reference.backend}")
        yield from bench_tables.curves(reference)
    if len(references) > 1:
        yield bench_tables.compared(references)


def _list_references(config: Config, as_json: bool) -> int:
    from commwatch_agent.proof import bench, bench_tables
    from commwatch_agent.reference import references

    there = references.References(references.directory(config.state), config.links)
    if as_json:
        print(json.dumps(bench.as_json(list(there.measured.items()), list(there.damaged.values())), indent=2))
    else:
        print(bench_tables.listing(there))
    return 0
