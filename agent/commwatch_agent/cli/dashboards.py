"""``commwatch dashboards``: write the shipped Grafana dashboards to files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from commwatch.wire.errors import CommwatchError, UsageError
from commwatch_agent.config import Config
from commwatch_agent.runtime.whole_files import write

FORMATS = ("json", "configmap", "provisioning")


def add_parser(commands: Any) -> None:
    """Add the command and its verb."""
    dashboards = commands.add_parser(
        "dashboards",
        help="export the Grafana dashboards as files",
        description="Export the Grafana dashboards (docs/dashboards.md): Cluster, Job and Node.",
    )
    verbs = dashboards.add_subparsers(dest="command_verb", metavar="VERB", required=True)
    export = verbs.add_parser(
        "export",
        help="write them to a folder: JSON, ConfigMaps for Kubernetes, or a folder for Grafana's provisioning",
        description="Write the dashboards to a folder, which is created if it does not exist.",
    )
    export.add_argument("--dir", type=Path, required=True, dest="to", metavar="DIR", help="folder to write to")
    export.add_argument(
        "--format",
        choices=FORMATS,
        default="json",
        help="json: for import by hand (default); configmap: for the sidecar of Grafana's Helm chart; "
        "provisioning: with a provider; DIR is Grafana's provisioning/dashboards",
    )
    export.add_argument("--namespace", help="configmap: namespace of the ConfigMaps")
    export.add_argument(
        "--runbook-url", metavar="URL", help="URL of the runbook (default: that of an agent on this host)"
    )
    export.set_defaults(command=_export, dir=None, state=None, config=None, host=None, port=None)


def _export(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_alerts.export import RUNBOOK_URL
    from commwatch_dashboards.export import configmaps, plain, provisioning

    to, url = arguments.to, arguments.runbook_url or RUNBOOK_URL
    if arguments.namespace and arguments.format != "configmap":
        raise UsageError("--namespace needs --format configmap")
    if arguments.format == "configmap":
        files = configmaps(url, arguments.namespace)
    else:
        files = provisioning(url, str(to.resolve())) if arguments.format == "provisioning" else plain(url)
    try:
        for name, text in files.items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            write(to / name, text)
    except OSError as error:
        raise CommwatchError(f"cannot write {error.filename}: {error.strerror}") from None
    return 0
