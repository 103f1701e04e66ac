"""``commwatch dashboards``: write the shipped Grafana dashboards to files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from commwatch.config import Config
from commwatch.core.errors import CommwatchError, UsageError

FORMATS = ("json", "configmap", "provisioning")


def add_parser(commands: Any) -> None:
    """Add the command and its verb."""
    dashboards = commands.add_parser(
        "dashboards",
        help="the Grafana dashboards, as files",
        description="The Grafana dashboards (docs/dashboards.md): Cluster, Job, Node.",
    )
    verbs = dashboards.add_subparsers(dest="command_verb", metavar="VERB", required=True)
    export = verbs.add_parser(
        "export",
        help="write them into a folder: JSON, ConfigMaps for Kubernetes, or a folder for Grafana's provisioning",
        description="Write the dashboards into a folder, which is made if it is not there.",
    )
    export.add_argument("--dir", type=Path, required=True, dest="to", metavar="DIR", help="where to")
    export.add_argument(
        "--format",
        choices=FORMATS,
        default="json",
        help="json: to import (default); configmap: for the sidecar of Grafana's Helm chart; "
        "provisioning: with a provider, DIR being Grafana's provisioning/dashboards",
    )
    export.add_argument("--namespace", help="configmap: where they are to be")
    export.add_argument(
        "--runbook-url", metavar="URL", help="where the runbook is read (default: at an agent on this host)"
    )
    export.set_defaults(command=_export, dir=None, state=None, config=None, host=None, port=None)


def _export(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.alerts.export import RUNBOOK_URL
    from commwatch.dashboards.export import configmaps, plain, provisioning

    to, url = arguments.to, arguments.runbook_url or RUNBOOK_URL
    if arguments.namespace and arguments.format != "configmap":
        raise UsageError("--namespace is for --format configmap")
    if arguments.format == "configmap":
        files = configmaps(url, arguments.namespace)
    else:
        files = provisioning(url, str(to.resolve())) if arguments.format == "provisioning" else plain(url)
    try:
        for name, text in files.items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommwatchError(f"cannot write {error.filename}: {error.strerror}") from None
    return 0
