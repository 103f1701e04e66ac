"""``commwatch manifest prometheus``: what Prometheus and Alertmanager need to watch the agents."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from commwatch.wire.addresses import DEFAULT_PORT, hosts_and_ports
from commwatch.wire.errors import UsageError
from commwatch_agent.cli import common_flags
from commwatch_agent.cli.manifests.flags import add_node_label, add_runbook_url, check_text, check_utf8, node_labels
from commwatch_agent.cli.manifests.folder import add_force, write_into
from commwatch_agent.config import Config
from commwatch_agent.model.durations import parse_age
from commwatch_agent.text.terminal_text import complain

_PARTS = ("scrape", "rules", "alertmanager")


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    manifest = verbs.add_parser(
        "prometheus",
        parents=[common_flags.parser(asks=True)],
        help="scrape configuration, rules and routes for Prometheus and Alertmanager",
        description="Print a configuration of Prometheus (2.42 or later) that scrapes the agents, the rules of the alerts with the "
        "thresholds of your settings, and a configuration of Alertmanager. --token-file, --ca-file and --client-cert name files on "
        "Prometheus' host. Without --token-file, Prometheus sends the token of the settings only if require_token_for_metrics is true.",
    )
    manifest.add_argument(
        "agents",
        nargs="*",
        metavar="AGENT",
        help="HOST, HOST:PORT or URL of an agent, a target file of file_sd (.json), or dns+HOST:PORT (default: the agent of this host)",
    )
    manifest.add_argument(
        "--per-job",
        action="store_true",
        help="the agents run only while a job does, as with Slurm's prolog: no alert if one is down",
    )
    manifest.add_argument(
        "--kubernetes",
        action="store_true",
        help="find the agents of `manifest k8s` and of the Helm chart by their pods",
    )
    manifest.add_argument(
        "--namespace", metavar="NAME", help="with --kubernetes: the namespace of the pods (default: all)"
    )
    add_node_label(manifest)
    manifest.add_argument(
        "--server-name", metavar="NAME", help="the name in the agents' certificates (default: that of each address)"
    )
    manifest.add_argument("--interval", default="15s", metavar="TIME", help="time between scrapes (default: 15s)")
    manifest.add_argument(
        "--alertmanager",
        default="localhost:9093",
        metavar="HOST:PORT",
        help="Alertmanager for Prometheus (default: localhost:9093)",
    )
    add_runbook_url(manifest, "the first agent that is named")
    manifest.add_argument("--only", choices=_PARTS, help="print only this part")
    manifest.add_argument("--out", type=Path, metavar="DIR", help="write the files into this folder")
    add_force(manifest)
    manifest.set_defaults(command=_prometheus)


def _prometheus(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.deploy.prometheus import FILES, Scrape, files
    from commwatch_agent.notify.alert_rules import catalogue

    check_utf8(
        arguments, "namespace", "server_name", "alertmanager", "runbook_url", "token_file", "ca_file", "client_cert"
    )
    for agent in arguments.agents:
        check_text("", agent)
    _check(arguments)
    here = [f"localhost:{config.port or DEFAULT_PORT}"]
    # Prometheus sends a token only where it must: without TLS, anyone on the way can read it.
    sends_token = config.require_token_for_metrics or arguments.token_file is not None
    if config.require_token_for_metrics and config.token_file is None:
        complain(
            "manifest prometheus: warning: require_token_for_metrics is true and there is no token_file, so the agents refuse Prometheus; "
            "give the file with --token-file"
        )
    given = {
        "token_file": config.token_file if sends_token else None,
        "ca_file": config.ca_file,
        "client_cert": config.client_cert,
    }
    scrape = Scrape(
        agents=[] if arguments.kubernetes else arguments.agents or here,
        interval_s=_seconds(arguments.interval),
        namespace=arguments.namespace,
        per_job=arguments.per_job,
        node_labels=node_labels(arguments.node_label),
        server_name=arguments.server_name,
        secure=config.expects_tls or config.tls_cert is not None,
        **{name: str(file) for name, file in given.items() if file is not None},
    )
    made = files(scrape, arguments.alertmanager, catalogue(config), arguments.runbook_url)
    chosen = {FILES[part]: text for part, text in made.items() if part == arguments.only or not arguments.only}
    if arguments.out is None:
        print("---\n".join(f"# {name}\n{text}" for name, text in chosen.items()), end="")
        return 0
    write_into(arguments.out, chosen, force=arguments.force, choose="--only")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.kubernetes and arguments.agents:
        raise UsageError("--kubernetes finds the agents; leave out their addresses, or the flag")
    for flag in ("namespace", "node_label"):
        if getattr(arguments, flag) and not arguments.kubernetes:
            raise UsageError(f"--{flag.replace('_', '-')} needs --kubernetes")
    if hosts_and_ports(arguments.alertmanager) is None:
        raise UsageError(f"--alertmanager {shlex.quote(arguments.alertmanager)}: needs HOST:PORT")


def _seconds(text: str) -> int:
    try:
        seconds = parse_age(text)
    except ValueError:
        seconds = 0
    if seconds < 1 or not seconds.is_integer():
        raise UsageError(f"--interval {shlex.quote(text)}: needs whole seconds or minutes, such as 15s")
    return int(seconds)
