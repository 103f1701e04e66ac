"""``commwatch doctor``: check that everything works on this node."""

from __future__ import annotations

import argparse
from typing import Any

from commwatch.config import Config


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="check that everything works; each fault comes with its remedy",
        description="Check this node: agent, port, probes, records, hooks, NCCL's logs, Prometheus. Exit code 1 if a check fails.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)


def _doctor(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.commands import doctor

    checks = doctor.examine(config)
    print((doctor.as_json if arguments.json else doctor.text)(checks))
    return int(any(check.result == "fail" for check in checks))
