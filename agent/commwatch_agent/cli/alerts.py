"""``commwatch alerts``: export the list of alerts to Prometheus or Kubernetes, check it, test the receivers."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from pathlib import Path
from typing import Any

from commwatch.wire.addresses import DEFAULT_PORT
from commwatch.wire.errors import UsageError
from commwatch_agent.config import REMOVED, Config
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.runtime.whole_files import write
from commwatch_agent.text.terminal_text import line
from commwatch_agent.text.units import counted

_LABEL = re.compile(r"([A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?)=([-A-Za-z0-9_.]*)")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command and its verbs."""
    alerts = commands.add_parser(
        "alerts",
        help="export or check the list of alerts, or test the receivers",
        description="Export or check the list of alerts (docs/alerts.md), with your thresholds and kinds, or test the receivers.",
    )
    verbs = alerts.add_subparsers(dest="command_verb", metavar="VERB", required=True)
    _add_export(verbs, common)
    _add_check(verbs, common)
    _add_test(verbs, common)


def _add_export(verbs: Any, common: argparse.ArgumentParser) -> None:
    export = verbs.add_parser(
        "export",
        parents=[common],
        help="write a rule file for Prometheus, or a PrometheusRule for Kubernetes",
        description="Write the list as a rule file for Prometheus (2.42 or later), or as a PrometheusRule.",
    )
    export.add_argument(
        "--format",
        choices=("prometheus", "k8s"),
        default="prometheus",
        help="format of the output (default: prometheus)",
    )
    export.add_argument("--output", type=Path, metavar="FILE", help="file to write to (default: standard output)")
    export.add_argument(
        "--runbook-url", metavar="URL", help="URL of the runbook (default: that of an agent on this host)"
    )
    export.add_argument("--name", default="commwatch", help="k8s: name of the resource (default: commwatch)")
    export.add_argument("--namespace", help="k8s: namespace of the resource")
    export.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="k8s: a label that the operator selects, such as release=prometheus; may be repeated",
    )
    export.set_defaults(command=_export)


def _add_check(verbs: Any, common: argparse.ArgumentParser) -> None:
    check = verbs.add_parser(
        "check",
        parents=[common],
        help="check the list with your settings",
        description="Check the list of alerts with the thresholds and kinds of your settings. "
        "If something is wrong, print one line and exit with code 2.",
    )
    check.add_argument("file", nargs="?", metavar="FILE", help=argparse.SUPPRESS)
    check.set_defaults(command=_check)


def _add_test(verbs: Any, common: argparse.ArgumentParser) -> None:
    test = verbs.add_parser(
        "test",
        parents=[common],
        help="send a test alert, and then its end, to every receiver",
        description="Send a test alert, and then its end, to every receiver of the settings, and print the results. "
        "Exit code 1 if a receiver failed.",
    )
    test.add_argument("--receiver", metavar="NAME", help="only this receiver")
    test.set_defaults(command=_test)


def _export(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.notify.alert_rules import catalogue
    from commwatch_alerts.export import RUNBOOK_URL, kubernetes, prometheus

    found, url = catalogue(config), arguments.runbook_url or RUNBOOK_URL
    in_kubernetes = (arguments.name, arguments.namespace, labels(arguments.label))
    text = kubernetes(found, url, *in_kubernetes) if arguments.format == "k8s" else prometheus(found, url)
    if arguments.output is None:
        print(text, end="")
        return 0
    write(arguments.output, text)
    return 0


def labels(given: list[str]) -> dict[str, str]:
    """Return the labels of ``--label``; raise ConfigError if one is not a Kubernetes label."""
    found = {}
    for each in given:
        parts = _LABEL.fullmatch(each)
        if parts is None:
            raise ConfigError(f"--label {shlex.quote(each)}: needs KEY=VALUE, such as release=prometheus")
        found[parts[1]] = parts[2]
    return found


def _check(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.notify.alert_rules import catalogue, labels_by_series
    from commwatch_alerts.check import check

    if arguments.file is not None:
        raise ConfigError(f"{arguments.file}: {REMOVED['rules']}")
    found = catalogue(config)
    check(found, labels_by_series())
    kinds = [kind for kind in found.kinds.values() if kind.enabled]
    counts = (
        counted(len(kinds), "kind"),
        counted(len(found.alerts), "alert"),
        counted(len(found.records), "recording rule"),
    )
    print(", ".join(counts))
    return 0


def _test(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.notify.delivery_setup import address_of
    from commwatch_alerts.receivers.opening import receivers
    from commwatch_alerts.receivers.trial import trial

    chosen = [each for each in config.receivers if arguments.receiver in (None, each.name)]
    if not config.receivers:
        raise UsageError("no receivers; add one under [[receivers]] in the settings file")
    if not chosen:
        known = ", ".join(each.name for each in config.receivers)
        raise UsageError(f"no receiver '{arguments.receiver}'; choose from {known}")
    made = receivers(chosen, address_of(config, config.port or DEFAULT_PORT))
    outcomes = [(each.name, trial(each, time.time())) for each in made]
    for name, trouble in outcomes:
        print(line(f"{name}: {trouble or 'ok'}"))
    return int(any(trouble for _, trouble in outcomes))
