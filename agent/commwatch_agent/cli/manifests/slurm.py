"""``commwatch manifest slurm``: prolog, epilog and task prolog, and a script that needs no administrator."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from shutil import which
from typing import Any

from commwatch.wire.addresses import DEFAULT_PORT
from commwatch.wire.errors import UsageError
from commwatch_agent.cli.manifests.flags import (
    check_host,
    check_utf8,
    given,
    is_local,
    program,
    refuse_settings,
)
from commwatch_agent.cli.manifests.folder import add_force, write_into
from commwatch_agent.config import FOLDERS, Config
from commwatch_agent.config_sources import load
from commwatch_agent.deploy.slurm import FILES, Site, scripts


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    slurm = verbs.add_parser(
        "slurm",
        help="prolog, epilog and task prolog; or a script that needs no administrator",
        description="Print or write scripts for Slurm. Prolog, epilog and task prolog run an agent on each node of a job, as the "
        "job's user. The fourth script does the same within a batch script, and needs no administrator.",
    )
    slurm.add_argument("parts", nargs="*", metavar="PART", help=f"only this script: {', '.join(FILES)} (default: all)")
    slurm.add_argument("--dir", type=Path, dest="to", metavar="DIR", help="write the scripts into this folder")
    add_force(slurm)
    slurm.add_argument(
        "--run-dir",
        default="/run/commwatch",
        metavar="DIR",
        help="folder in memory, for rings (default: /run/commwatch)",
    )
    slurm.add_argument(
        "--state-dir",
        default="/var/lib/commwatch",
        metavar="DIR",
        help="folder for histories (default: /var/lib/commwatch)",
    )
    slurm.add_argument(
        "--probe",
        metavar="DIR",
        help="folder of `probe install`, on each node (default: job installs one into the user's cache, the others have none)",
    )
    slurm.add_argument("--config", type=Path, help="settings file of the agents, on each node")
    slurm.add_argument("--host", help="address that the agents listen on (default: 127.0.0.1)")
    slurm.add_argument("--port", type=int, help="port of the agents (default: 9477, or a free one if it is taken)")
    slurm.add_argument(
        "--insecure", action="store_true", help="let the agents listen beyond their nodes without TLS, for Prometheus"
    )
    slurm.add_argument(
        "--secret",
        metavar="FILE",
        help="file with the same 32 characters or more on each node, which only root can read: the agents of a job on several "
        "nodes get a common token from it, and answer for the whole job",
    )
    slurm.set_defaults(command=_slurm, dir=None, state=None)


def _slurm(config: Config, arguments: argparse.Namespace) -> int:
    check_utf8(arguments, "run_dir", "state_dir", "probe", "secret", "config", "host")
    check_host(arguments)
    refuse_settings(arguments.config, "the scripts have folders of their own: --run-dir and --state-dir", FOLDERS)
    for part in arguments.parts:
        if part not in FILES:
            raise UsageError(f"{shlex.quote(part)}: unknown script; choose from {', '.join(FILES)}")
    folders = {name: getattr(arguments, name) or "" for name in ("run_dir", "state_dir", "probe", "secret")}
    for flag, value in folders.items():
        if value and not re.fullmatch(r"/[^:\0-\x1f\x7f]+", value):  # separators of Slurm, of PYTHONPATH
            raise UsageError(f"--{flag.replace('_', '-')} {value!r}: needs an absolute path without ':'")
    run, state = (str(Path(folders[flag])) for flag in ("run_dir", "state_dir"))
    # A token for reading, too: other users have accounts on the node.
    flags = [*given(arguments), "--require-token"]
    site = Site(
        run, state, folders["probe"], folders["secret"], _common_port(arguments), which("scontrol") or "scontrol"
    )
    made = scripts(str(program()), flags, site)
    chosen = {FILES[part]: text for part, text in made.items() if part in (arguments.parts or FILES)}
    if arguments.to is None:
        print("\n".join(chosen.values()), end="")
        return 0
    write_into(arguments.to, chosen, force=arguments.force, choose="PART", mode=0o755)
    return 0


def _common_port(arguments: argparse.Namespace) -> int | None:
    """Return the port on which the agents of other nodes reach those of the scripts; ``None``: they do not reach them.

    Raises:
        UsageError: they do not, and ``--secret`` is for agents that do.
    """
    config = load(
        {}, arguments.config, host=arguments.host, port=arguments.port
    )  # no variables: the scripts pass on none
    if config.port != 0 and not is_local(config.host):
        return config.port or DEFAULT_PORT
    if arguments.secret:
        raise UsageError(
            f"--secret: agents with host {config.host} and port {DEFAULT_PORT if config.port is None else config.port} cannot reach "
            "each other; add --host 0.0.0.0 with --insecure, or with TLS in the settings, and a fixed port"
        )
    return None
