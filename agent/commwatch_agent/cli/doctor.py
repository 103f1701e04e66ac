"""``commwatch doctor``: check that everything works on this node, or prove on its GPU that commwatch measures right."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import output_cells

_RESULT = Path("commwatch-gpu-proof.json")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="check that everything works, and print a remedy for each fault",
        description="Check this node: agent, port, probes, records, hooks, NCCL's logs, Prometheus. Exit code 1 if a check fails.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--gpu-proof",
        type=Path,
        nargs="?",
        const=_RESULT,
        metavar="FILE",
        help="instead, run small jobs on one NVIDIA GPU without and with commwatch, compare, and write the result to FILE "
        f"(default: {_RESULT}); about four minutes. Exit code 1: at least one check does not hold; 2: no GPU or no torch",
    )
    doctor.add_argument(
        "--python",
        default=sys.executable,
        help="with --gpu-proof: the Python that has torch, if not the one of commwatch",
    )
    doctor.set_defaults(command=_doctor)


def _doctor(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.commands import doctor

    if arguments.gpu_proof is not None:
        return _gpu_proof(arguments.gpu_proof, arguments.python, arguments.json)
    checks = doctor.examine(config)
    print(doctor.as_json(checks) if arguments.json else doctor.text(checks, output_cells()))
    return int(any(check.result == "fail" for check in checks))


def _gpu_proof(file: Path, python: str, as_json: bool) -> int:
    from commwatch_agent.commands.native_hook import program
    from commwatch_agent.deploy.probe_folder import on_path
    from commwatch_agent.proof import gpu_proof

    gpu_proof.check_file(file)
    python = program(python)
    env = on_path(os.environ)
    try:
        machine = gpu_proof.machine(python, env)
        proof, rows = gpu_proof.Proof(machine, python, env), []
        if not as_json:
            print(gpu_proof.head(machine), flush=True)
        for row in proof.rows():
            rows.append(row)
            if not as_json:
                print(gpu_proof.text(row), flush=True)
    except KeyboardInterrupt:
        raise gpu_proof.Stopped("stopped; no result was written") from None
    result = gpu_proof.as_json(proof, rows)
    gpu_proof.write(file, result)
    print(result if as_json else gpu_proof.conclusion(rows, file))
    return int(not gpu_proof.holds(rows))
