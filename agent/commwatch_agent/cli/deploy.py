"""``commwatch probe`` and ``commwatch manifest``: files that a site needs to run the agent beside its jobs."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch import __version__
from commwatch.wire.addresses import DEFAULT_PORT
from commwatch.wire.errors import UsageError
from commwatch_agent.cli import alerts
from commwatch_agent.cli.manifests import prometheus, slurm
from commwatch_agent.cli.manifests.flags import (
    add_node_label,
    add_runbook_url,
    check_host,
    check_utf8,
    given,
    node_labels,
    program,
    refuse_flags,
    refuse_settings,
)
from commwatch_agent.config import FOLDERS, SETTINGS, Config
from commwatch_agent.config_sources import keys_in, settings_file
from commwatch_agent.deploy.launchers import LAUNCHERS

if TYPE_CHECKING:
    from commwatch_agent.deploy.kubernetes import Site

_DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,50}[a-z0-9])?")  # at most 52: with our suffixes 63
#: Settings that the objects of Kubernetes have from the settings file: the port, and the list of alerts.
_IN_OBJECTS = {"port", "thresholds", "kinds"}
#: Is in every object with an agent.
_AGENT = "{name: COMMWATCH_STATE,"
#: Kind of an object, in its YAML.
_KIND = re.compile(r"^kind: (\w+)$", re.MULTILINE)
_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the commands and their verbs."""
    probe = commands.add_parser(
        "probe",
        help="install the probe for trainers that `commwatch run` does not start",
        description="Install the probe alone, for trainers that `commwatch run` does not start.",
    )
    install = probe.add_subparsers(dest="command_verb", metavar="VERB", required=True).add_parser(
        "install",
        help="install it into a folder for PYTHONPATH",
        description="Install the probe into a folder for the trainer's PYTHONPATH. The probe needs only torch. You can repeat "
        "this at any time, also with another version and while trainers run.",
    )
    install.add_argument("to", type=Path, metavar="DIR", help="folder to install into; created if it is missing")
    install.set_defaults(command=_install, dir=None, state=None, config=None, host=None, port=None)
    manifest = commands.add_parser(
        "manifest",
        help="print what a site needs to run the agent under Kubernetes, Slurm or systemd, and for Prometheus",
        description="Print what a site needs to run and to scrape the agent (docs/deploy.md).",
    )
    verbs = manifest.add_subparsers(dest="command_verb", metavar="VERB", required=True)
    _add_k8s(verbs, common)
    slurm.add_parser(verbs)
    _add_systemd(verbs, common)
    prometheus.add_parser(verbs)


def _add_k8s(verbs: Any, common: argparse.ArgumentParser) -> None:
    k8s = verbs.add_parser(
        "k8s",
        parents=[common],
        help="a Job with the agent as its sidecar, or a DaemonSet; with monitors, alerts and dashboards",
        description="Print Kubernetes objects (1.29 or later) for `kubectl apply -f -`: a training Job with the agent as a native "
        "sidecar or, with --daemonset, an agent on each node. Comments give the reasons; the alerts have the thresholds of your settings.",
    )
    k8s.add_argument("--daemonset", action="store_true", help="one agent on each node instead of one in each pod")
    k8s.add_argument(
        "--only", action="append", default=[], metavar="KIND", help="print only objects of this kind; may be repeated"
    )
    k8s.add_argument("--name", default="commwatch", help="name of the objects (default: commwatch)")
    k8s.add_argument("--namespace", help="namespace of the objects (default: the namespace in which you apply them)")
    k8s.add_argument(
        "--image", default=f"commwatch:{__version__}", help=f"image of the agent (default: commwatch:{__version__})"
    )
    k8s.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="label of all objects, by which the operator selects them, such as release=prometheus; may be repeated",
    )
    k8s.add_argument(
        "--user", type=int, default=65532, metavar="UID", help="user that the agent runs as (default: 65532)"
    )
    k8s.add_argument(
        "--group", type=int, default=64646, metavar="GID", help="group that trainers and agent share (default: 64646)"
    )
    k8s.add_argument(
        "--monitoring-namespace",
        default="monitoring",
        metavar="NAME",
        help="namespace of Prometheus (default: monitoring)",
    )
    k8s.add_argument(
        "--runtime-class", metavar="NAME", help="runtime class of the pods, such as nvidia if it is not the default"
    )
    k8s.add_argument(
        "--host-network", action="store_true", help="with --daemonset: use the network of the node, and see its devices"
    )
    k8s.add_argument(
        "--token-secret",
        metavar="NAME",
        help="Secret whose key token all agents share, so that each one can answer for the whole job (default: each has its own token)",
    )
    k8s.add_argument(
        "--peers",
        metavar="NAMES",
        help="the agents of the other nodes, as in the setting peers (default: with --daemonset and --token-secret, the pods of the Service; otherwise none)",
    )
    k8s.add_argument(
        "--history-claim",
        metavar="NAME",
        help="PersistentVolumeClaim that keeps the histories of the Job's pods (default: they end with the pods)",
    )
    k8s.add_argument(
        "--history-size", metavar="SIZE", help="with --history-claim: create the claim with this size, such as 10Gi"
    )
    add_node_label(k8s)
    add_runbook_url(k8s)
    _add_trainer(k8s)
    k8s.set_defaults(command=_k8s)


def _add_trainer(k8s: argparse.ArgumentParser) -> None:
    k8s.add_argument(
        "--trainer-image",
        default="trainer:latest",
        metavar="IMAGE",
        help="image of the trainer in the Job (default: trainer:latest)",
    )
    k8s.add_argument(
        "--trainer-command",
        default="torchrun --nproc-per-node=gpu train.py",
        metavar="COMMAND",
        help="command of the trainer in the Job (default: %(default)s)",
    )
    k8s.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="GPUs of the trainer in the Job (default: 8; 0: none)"
    )
    k8s.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        help="instead of a Job: a JobSet, a TrainJob or PyTorchJob of Kubeflow, or a job of Volcano",
    )
    k8s.add_argument("--nodes", type=int, default=2, metavar="N", help="pods with --launcher (default: 2)")


def _add_systemd(verbs: Any, common: argparse.ArgumentParser) -> None:
    systemd = verbs.add_parser(
        "systemd",
        parents=[common],
        help="a hardened systemd unit",
        description="Print a unit for systemd (247 or later) for an agent that watches all jobs of a node.",
    )
    systemd.add_argument("--name", default="commwatch", help="name of the unit and its folders (default: commwatch)")
    systemd.add_argument("--user", default="commwatch", help="user that the agent runs as (default: commwatch)")
    systemd.add_argument(
        "--group", default="commwatch", help="group whose members' jobs are watched (default: commwatch)"
    )
    systemd.add_argument("--memory", default="512M", help="memory limit of the agent (default: 512M)")
    systemd.add_argument("--cpu", default="50%", help="CPU limit of the agent (default: 50%%)")
    systemd.set_defaults(command=_systemd)


def _install(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.deploy.probe_folder import install

    where = shlex.quote(str(install(arguments.to)))
    print(
        f"probe {__version__} is in {where}; in the trainer set PYTHONPATH={where} COMMWATCH=1, and COMMWATCH_DIR to the agent's"
    )
    return 0


def _k8s(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_alerts.export import dumped

    files = ("token_file", "ca_file", "client_cert")
    refuse_flags(arguments, "the pods have files and addresses of their own", "dir", "state", "host", *files)
    if config.port == 0:
        raise UsageError("--port 0, or port = 0 in the settings: the Service needs a fixed port")
    check_utf8(arguments, "image", "runtime_class", "runbook_url", "peers", "trainer_image", "trainer_command")
    documents = _documents(config, arguments)
    kinds = list(dict.fromkeys(kind for kind, _ in documents))
    for kind in arguments.only:
        if kind not in kinds:
            raise UsageError(f"--only {shlex.quote(kind)}: unknown kind; choose from {', '.join(kinds)}")
    chosen = [document for kind, document in documents if kind in (arguments.only or kinds)]
    texts = [document if isinstance(document, str) else dumped(document) for document in chosen]
    if any(_AGENT in text for text in texts):
        why = "the printed objects do not carry these settings; put them into `settings` of the Helm chart's values"
        refuse_settings(settings_file(os.environ, arguments.config), why, SETTINGS.keys() - _IN_OBJECTS)
    print("# Made by `commwatch manifest k8s`.\n" + "---\n".join(texts), end="")
    return 0


def _documents(config: Config, arguments: argparse.Namespace) -> list[tuple[str, str | dict[str, Any]]]:
    """Return each object with its kind: as YAML if a template has it, else as an object."""
    from commwatch_agent.deploy import kubernetes
    from commwatch_agent.notify.alert_rules import catalogue
    from commwatch_alerts.export import RUNBOOK_URL, prometheus_rule
    from commwatch_dashboards.export import configmap_objects

    site = _site(config, arguments)
    if arguments.daemonset:
        documents = kubernetes.daemon_set(site)
    else:
        command = _words(arguments.trainer_command)
        image, gpus, launcher = arguments.trainer_image, arguments.gpus, arguments.launcher
        documents = kubernetes.sidecar(site, kubernetes.Trainer(image, command, gpus, launcher, arguments.nodes))
    url = arguments.runbook_url or RUNBOOK_URL
    rules = prometheus_rule(catalogue(config), url, site.name, site.namespace, None)
    others = [rules, *configmap_objects(url, site.namespace)]
    return [
        *((_KIND.findall(text)[0], text) for text in documents),
        *((each["kind"], kubernetes.labelled(site, each)) for each in others),
    ]


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--trainer-command {command}: {error}") from None
    if not words:
        raise UsageError("--trainer-command is empty; give the command that starts the training")
    return words


def _site(config: Config, arguments: argparse.Namespace) -> Site:
    from commwatch_agent.deploy.kubernetes import Site

    for flag in ("name", "namespace", "monitoring_namespace", "token_secret", "history_claim"):
        value = getattr(arguments, flag)
        if value is not None and not _DNS_LABEL.fullmatch(value):
            raise UsageError(
                f"--{flag.replace('_', '-')} {shlex.quote(value)}: needs a Kubernetes name: a-z, 0-9 and '-', at most 52 characters"
            )
    for flag, least in (("user", 1), ("group", 1), ("gpus", 0), ("nodes", 1)):
        if getattr(arguments, flag) < least:
            raise UsageError(f"--{flag} {getattr(arguments, flag)}: needs at least {least}")
    if arguments.host_network and not arguments.daemonset:
        raise UsageError("--host-network needs --daemonset; a sidecar has the network of its pod")
    if arguments.host_network and not arguments.insecure:
        raise UsageError(
            "--host-network: everybody who reaches the node could listen to the agent's port; "
            "use the Helm chart with TLS, or add --insecure if the node's network is private"
        )
    if arguments.launcher and arguments.daemonset:
        raise UsageError("--launcher does not apply with --daemonset, which starts no training")
    if arguments.peers and not arguments.token_secret:
        raise UsageError("--peers needs --token-secret; without a common token the agents refuse each other")
    _check_history(arguments)
    return Site(
        name=arguments.name,
        image=arguments.image,
        port=config.port or DEFAULT_PORT,
        namespace=arguments.namespace,
        labels=alerts.labels(arguments.label),
        uid=arguments.user,
        gid=arguments.group,
        monitoring=arguments.monitoring_namespace,
        runtime_class=arguments.runtime_class,
        host_network=arguments.host_network,
        peers=arguments.peers,
        token_secret=arguments.token_secret,
        history_claim=arguments.history_claim,
        history_size=arguments.history_size,
        node_labels=node_labels(arguments.node_label),
    )


def _check_history(arguments: argparse.Namespace) -> None:
    if arguments.history_claim and arguments.daemonset:
        raise UsageError("--history-claim does not apply with --daemonset; its histories are on the nodes' disks")
    if arguments.history_size and not arguments.history_claim:
        raise UsageError("--history-size needs --history-claim, the name of the claim")
    if arguments.history_size and not re.fullmatch(r"[1-9]\d*[KMGTP]i", arguments.history_size):
        raise UsageError(f"--history-size {shlex.quote(arguments.history_size)}: needs an amount such as 10Gi")


def _fixed_port(arguments: argparse.Namespace) -> list[str]:
    """Return the flag for the default port if neither flag nor file names one: clients of a service look for it at one port."""
    named = arguments.port is not None or (arguments.config is not None and "port" in keys_in(arguments.config))
    return [] if named else ["--port", str(DEFAULT_PORT)]


def _systemd(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.deploy.systemd import unit

    why = "the unit has folders of its own; change its Environment= for others"
    refuse_flags(arguments, why, *FOLDERS)
    refuse_settings(arguments.config, why, FOLDERS)
    check_utf8(arguments, "config", "host", "token_file", "ca_file", "client_cert")
    check_host(arguments)
    for flag in ("name", "user", "group"):
        value = getattr(arguments, flag)
        if not _ACCOUNT.fullmatch(value):
            raise UsageError(f"--{flag} {shlex.quote(value)}: needs a-z, 0-9, '_' and '-', at most 32 characters")
    for flag, pattern, example in (("memory", r"[1-9]\d*[KMGT]", "512M"), ("cpu", r"[1-9]\d*%", "50%")):
        value = getattr(arguments, flag)
        if not re.fullmatch(pattern, value):
            raise UsageError(f"--{flag} {shlex.quote(value)}: needs an amount such as {example}")
    command = [str(program()), "agent", *given(arguments), *_fixed_port(arguments)]
    accounts = {"name": arguments.name, "user": arguments.user, "group": arguments.group}
    print(unit(command, **accounts, memory=arguments.memory, cpu=arguments.cpu), end="")
    return 0
