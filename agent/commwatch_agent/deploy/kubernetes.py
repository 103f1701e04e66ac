"""The objects of ``commwatch manifest k8s``: an agent beside each trainer or on each node, with its monitoring. Pure, except that it reads the templates.

They are YAML documents, made from the templates ``k8s-*.yaml``. ``$`` precedes a field, and ``$agent`` is the agent's
container. A line with a field of value ``None`` is left out. Lines with ``{{`` are only for the Helm chart (``chart``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

import yaml

from commwatch_agent.deploy.launchers import launched, meeting
from commwatch_agent.deploy.templates import template

#: Fields for the common token. Kubernetes gives the file the group of the pod; the agent refuses one that others may read.
_TOKEN = {"token_folder": "/etc/commwatch-token", "token_file": "/etc/commwatch-token/token", "token_mode": 0o440}
#: CPU and memory of the agent.
_RESOURCES = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}}
#: Fields that only values of the chart change.
_WITHOUT_THE_CHART = {
    "args": ["agent"],
    "host": "0.0.0.0",  # noqa: S104 - the address of a pod
    "insecure": "true",
    "require_token": "true",
    "healthz": {"port": "metrics", "path": "/healthz"},
    "readyz": {"port": "metrics", "path": "/readyz"},
    **dict.fromkeys(("connection", "config", "tls_cert", "tls_key", "ca_file")),
}
FIELD = re.compile(r"\$(\w+)")
#: Marks a line of a template that is only for the Helm chart.
CHART_ONLY = "{{"


@dataclass(frozen=True)
class Site:
    """The settings that differ between sites."""

    name: str
    image: str
    port: int
    #: Namespace of the objects; ``None``: the namespace that they are applied in.
    namespace: str | None = None
    #: Labels for every object; operators select objects by some of them.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: The user that the agent runs as, and the group that shares the rings.
    uid: int = 65532
    gid: int = 64646
    #: Namespace of Prometheus; the network policy admits no other clients to the agent.
    monitoring: str = "monitoring"
    #: Runtime class for containers with GPUs; ``None``: the cluster's default.
    runtime_class: str | None = None
    #: Agents of a DaemonSet use the node's network: they see its devices and have its address.
    host_network: bool = False
    #: The agents of the other nodes, as in the setting ``peers``; ``None``: those behind the Service of a DaemonSet if there is a common token.
    peers: str | None = None
    #: Secret whose key ``token`` is the token of all agents; ``None``: each agent makes its own.
    token_secret: str | None = None
    #: Claim of the volume for the histories of a Job's pods; ``None``: they end with the pods.
    history_claim: str | None = None
    #: Size of this claim, such as ``10Gi``, to make it; ``None``: it exists.
    history_size: str | None = None
    #: Labels of the nodes that Prometheus adds to the series, with their names there.
    node_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trainer:
    """The training container of the example with the sidecar, and what starts it."""

    image: str
    command: list[str]
    gpus: int
    #: One of ``LAUNCHERS``; ``None``: a Job.
    launcher: str | None = None
    #: Pods of a launcher; a Job has one.
    nodes: int = 2


def sidecar(site: Site, trainer: Trainer) -> list[str]:
    """Return a Job, or a launcher's objects, with an agent in each pod; PodMonitor, NetworkPolicy, and a claim if histories have a size."""
    fields = {
        "job_name": f"{site.name}-job",
        "trainer_image": trainer.image,
        "trainer_command": trainer.command,
        "gpus": trainer.gpus or None,
        "nodes": trainer.nodes,
        "workers": trainer.nodes - 1,
        "meeting": trainer.launcher and meeting(trainer.launcher, f"{site.name}-job"),
        "state_volume": None if site.history_claim else "state",
        "node_field": None,
        "access_mode": "ReadWriteMany",
    }
    job, *others = templates("sidecar")
    started = [job] if trainer.launcher is None else launched(trainer.launcher, job)
    *objects, claim = _documents([*started, *others], site, fields)
    return [*objects, claim] if site.history_size else objects


def daemon_set(site: Site) -> list[str]:
    """Return a DaemonSet with an agent for all jobs of a node, its Service, ServiceMonitor and NetworkPolicy."""
    host = site.host_network or None
    peers = site.peers or (site.token_secret and f"dns+{site.name}:{site.port}")
    fields = {
        "host_network": host,
        "dns_policy": host and "ClusterFirstWithHostNet",
        "peers": peers,
        "peer_name": peers and site.name,
        "node_field": "spec.nodeName",
    }
    *objects, policy = _documents(templates("daemonset"), site, fields)
    return objects if host else [*objects, policy]  # policies do not apply to the node's network


def labelled(site: Site, made: dict[str, Any]) -> dict[str, Any]:
    """Return an object made elsewhere with the site's labels added."""
    metadata = made["metadata"]
    return {**made, "metadata": {**metadata, "labels": {**_labels(site), **metadata.get("labels", {})}}}


def _labels(site: Site) -> dict[str, str]:
    return {"app.kubernetes.io/name": "commwatch", "app.kubernetes.io/instance": site.name, **site.labels}


def _documents(texts: list[str], site: Site, more: Mapping[str, object]) -> list[str]:
    """Return the YAML documents of templates, with the site's settings and the fields ``more``."""
    fields = {**vars(site), "labels": _labels(site), **(_TOKEN if site.token_secret else dict.fromkeys(_TOKEN))}
    fields |= {"secret_group": site.gid if site.token_secret else None, "resources": _RESOURCES, **more}
    fields["relabelings"] = relabelings(site.node_labels)
    fields["attach_node"] = bool(site.node_labels) or None
    fields |= _WITHOUT_THE_CHART
    return [_filled(text, fields) for text in texts]


def _filled(text: str, fields: Mapping[str, object]) -> str:
    lines = [line for line in text.splitlines(keepends=True) if CHART_ONLY not in line]
    kept = [line for line in lines if all(fields[name] is not None for name in FIELD.findall(line))]
    return FIELD.sub(lambda found: _written(fields[found[1]]), "".join(kept))


def templates(mode: str) -> list[str]:
    """Return the template of each object of a mode (``sidecar``, ``daemonset``), with the agent's container in its place."""
    agent = indent(template("k8s-agent.yaml"), "      ")
    return re.split(r"^---\n", template(f"k8s-{mode}.yaml").replace("      $agent\n", agent), flags=re.MULTILINE)


def relabelings(node_labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rules of Prometheus' operator by which series have the names of nodes and pods, not the addresses of pods.

    ``instance`` is the node of an agent of a DaemonSet, and ``NAMESPACE/POD`` for the agent in the pod of a job.

    Args:
        node_labels: labels of the nodes that the series get, with their names there.
    """
    pod = "__meta_kubernetes_pod_"
    of_pod = {
        "sourceLabels": ["__meta_kubernetes_namespace", f"{pod}name"],
        "separator": "/",
        "targetLabel": "instance",
    }
    of_node = {
        "sourceLabels": [f"{pod}controller_kind", f"{pod}node_name"],
        "regex": "DaemonSet;(.+)",
        "targetLabel": "instance",
    }
    sources = {f"{pod}node_name": "node"}
    for name, label in node_labels.items():
        sources[f"__meta_kubernetes_node_label_{re.sub('[^A-Za-z0-9_]', '_', name)}"] = label
    return [of_pod, of_node, *({"sourceLabels": [source], "targetLabel": label} for source, label in sources.items())]


def _written(value: object) -> str:
    """Return a value as YAML in one line. Text is quoted, so that it remains text and within its place."""
    if isinstance(value, int):
        return str(value).lower()
    text: str = yaml.safe_dump(
        value, default_style='"', default_flow_style=True, allow_unicode=True, sort_keys=False, width=sys.maxsize
    )
    return text.rstrip("\n")
