"""``commwatch agent``: watch the jobs of this node until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from commwatch.wire.concurrency import wait_until
from commwatch.wire.errors import CommwatchError
from commwatch_agent.cli.common_flags import settings_of
from commwatch_agent.config import Config
from commwatch_agent.config_checks import LOG_JSON
from commwatch_agent.config_sources import unknown_variables
from commwatch_agent.runtime import agent_log
from commwatch_agent.runtime.sighup import SighupListener

if TYPE_CHECKING:
    from commwatch_agent.daemon import Daemon

log = logging.getLogger("commwatch")
#: Most seconds that an agent that ends with its parent goes on for the other ranks of this node.
_TRAINERS_S = 15.0


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    agent = commands.add_parser(
        "agent",
        parents=[common],
        help="watch the jobs of this node (the sidecar)",
        description="Watch the jobs of this node until SIGTERM.",
    )
    agent.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error; see the setting log_level")
    agent.add_argument(
        "--quiet", dest="log_level", action="store_const", const="warning", help="the same as --log-level warning"
    )
    agent.add_argument(
        "--until-stdin-closes", action="store_true", help="exit when standard input closes (with the parent)"
    )
    agent.set_defaults(command=_agent)


def _agent(config: Config, arguments: argparse.Namespace) -> int:
    # An agent that ends with its parent does not read the settings again at SIGHUP.
    hangup = None if arguments.until_stdin_closes else SighupListener()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    from commwatch_agent.daemon import Daemon

    agent_log.set_up(config, plain=arguments.until_stdin_closes)
    for unknown in unknown_variables(os.environ):  # it may be meant to close the agent
        log.warning("%s", unknown)
    try:
        daemon = Daemon(config, reread=partial(settings_of, arguments), hangup=hangup)
    except CommwatchError as error:
        if config.log_format != LOG_JSON or arguments.until_stdin_closes:
            raise
        log.error("%s", error)
        return error.exit_code
    if arguments.until_stdin_closes:
        threading.Thread(target=_stop_with_parent, args=(daemon,), name="parent", daemon=True).start()
    return 0 if daemon.run() else 1


def _stop_with_parent(daemon: Daemon) -> None:
    if sys.stdin is not None:  # else it is closed already
        sys.stdin.read()
    wait_until(lambda: not daemon.has_rings(), _TRAINERS_S)
    daemon.stop()
