"""The objects of ``commwatch manifest k8s``: an agent beside each trainer or on each node, and its monitoring. Pure.

All objects are plain data; the caller converts them to YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

#: Mount paths, equal in all containers.
RUN, STATE, PROBE = "/run/commwatch", "/var/lib/commwatch", "/opt/commwatch"
#: Label that Kubernetes sets on the pods of every Job; all pods of a Job have one value, so it serves as job id.
JOB_LABEL = "batch.kubernetes.io/job-name"
_PORT_NAME = "metrics"


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


@dataclass(frozen=True)
class Trainer:
    """The training container of the example Job with the sidecar."""

    image: str
    command: tuple[str, ...]
    gpus: int


def sidecar(site: Site, trainer: Trainer) -> list[Object]:
    """Return a Job with an agent in each pod, its PodMonitor and its NetworkPolicy."""
    return [_job(site, trainer), _pod_monitor(site), _network_policy(site, among_themselves=True)]


def daemon_set(site: Site) -> list[Object]:
    """Return a DaemonSet with an agent for all jobs of a node, its Service, ServiceMonitor and NetworkPolicy."""
    policy = [] if site.host_network else [_network_policy(site, among_themselves=False)]  # policies do not apply to it
    return [_daemon_set(site), _service(site), _service_monitor(site), *policy]


def labelled(site: Site, made: Object) -> Object:
    """Return an object made elsewhere with the site's labels added."""
    metadata = made["metadata"]
    return {**made, "metadata": {**metadata, "labels": {**_metadata(site)["labels"], **metadata.get("labels", {})}}}


# -- pods ---------------------------------------------------------------------------------------


def _job(site: Site, trainer: Trainer) -> Object:
    mounts = [_mount("run", RUN), _mount("probe", PROBE, readOnly=True)]
    limits = {"nvidia.com/gpu": trainer.gpus} if trainer.gpus else {}
    training = {
        "name": "trainer",
        "image": trainer.image,
        "command": list(trainer.command),
        "env": [*_shared_env(site), _env("COMMWATCH", "1"), _env("PYTHONPATH", PROBE), _job_env()],
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": mounts,
    }
    bring = {
        "name": "probe",
        "image": site.image,
        "args": ["probe", "install", PROBE],
        "securityContext": _confined(site),
        "resources": _resources("50m", "64Mi", "500m", "128Mi"),
        "volumeMounts": [_mount("probe", PROBE)],
    }
    # Sidecar (an init container that stays): starts before the trainer, ends after it, does not keep the Job alive.
    beside = {**_agent(site), "restartPolicy": "Always"}
    spec = {
        **_pod(site),
        "restartPolicy": "Never",
        "securityContext": {"fsGroup": site.gid},
        "initContainers": [bring, beside],
        "containers": [training],
        "volumes": [
            _volume("run", medium="Memory", sizeLimit="256Mi"),
            _volume("probe", sizeLimit="16Mi"),
            _volume("state", sizeLimit="1Gi"),
            _volume("tmp", sizeLimit="256Mi"),
        ],
    }
    template = {"metadata": {"labels": _selector(site)}, "spec": spec}
    return _object(site, "batch/v1", "Job", {"backoffLimit": 0, "template": template}, site.name + "-job")


def _daemon_set(site: Site) -> Object:
    # The kubelet creates hostPath folders that only root can write to.
    script = (
        f"chgrp {site.gid} {RUN} && chmod 2770 {RUN} && chown {site.uid}:{site.gid} {STATE} && chmod 700 {STATE} && "
        f"commwatch probe install {PROBE}"
    )
    confined = _confined(site)
    as_root = {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False}
    prepare = {
        "name": "prepare",
        "image": site.image,
        "command": ["sh", "-c", script],
        "securityContext": {
            **confined,
            **as_root,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER", "FSETID"]},
        },
        "resources": _resources("50m", "64Mi", "500m", "128Mi"),
        "volumeMounts": [_mount("run", RUN), _mount("state", STATE), _mount("probe", PROBE)],
    }
    folders = [("run", RUN), ("state", STATE), ("probe", PROBE)]
    spec = {
        **_pod(site),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if site.host_network else {}),
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "initContainers": [prepare],
        "containers": [_agent(site)],
        "volumes": [
            *({"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}} for name, path in folders),
            _volume("tmp", sizeLimit="256Mi"),
        ],
    }
    whole = {
        "selector": {"matchLabels": _selector(site)},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
        "template": {"metadata": {"labels": _selector(site)}, "spec": spec},
    }
    return _object(site, "apps/v1", "DaemonSet", whole)


def _pod(site: Site) -> Object:
    """Return the settings that all pods share."""
    runtime = {} if site.runtime_class is None else {"runtimeClassName": site.runtime_class}
    return {"automountServiceAccountToken": False, "enableServiceLinks": False, **runtime}


def _agent(site: Site) -> Object:
    asked = {"port": _PORT_NAME, "path": "/healthz"}
    return {
        "name": "commwatch",
        "image": site.image,
        # No TLS, because the agent is inside the cluster and behind a NetworkPolicy; but a token for the query API.
        "args": ["agent", "--insecure", "--require-token"],
        "env": _agent_env(site),
        "ports": [{"name": _PORT_NAME, "containerPort": site.port}],
        "startupProbe": {"httpGet": asked, "periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": {"httpGet": asked, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {"httpGet": {**asked, "path": "/readyz"}, "periodSeconds": 10, "timeoutSeconds": 5},
        "securityContext": _confined(site),
        "resources": _resources("50m", "128Mi", "500m", "512Mi"),
        "volumeMounts": [_mount("run", RUN), _mount("state", STATE), _mount("tmp", "/tmp")],
    }


def _agent_env(site: Site) -> list[Object]:
    """Return the agent's environment variables that differ from those of the image."""
    return [
        *_shared_env(site),
        _env("COMMWATCH_STATE", STATE),
        _env("COMMWATCH_HOST", "0.0.0.0"),  # noqa: S104 - of the pod; a NetworkPolicy limits access
        _env("COMMWATCH_PORT", str(site.port)),
        # Mounts the driver's library into the container, without taking a GPU from the jobs.
        _env("NVIDIA_VISIBLE_DEVICES", "all"),
        _env("NVIDIA_DRIVER_CAPABILITIES", "utility"),
    ]


def _shared_env(site: Site) -> list[Object]:
    """Return the environment variables that must be equal in trainer and agent."""
    return [_env("COMMWATCH_DIR", RUN), _env("COMMWATCH_GROUP", str(site.gid))]


def _job_env() -> Object:
    return {"name": "COMMWATCH_JOB", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOB_LABEL}']"}}}


def _confined(site: Site) -> Object:
    return {
        "runAsUser": site.uid,
        "runAsGroup": site.gid,
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


# -- service, monitors, network policy ----------------------------------------------------------


def _service(site: Site) -> Object:
    port = {"name": _PORT_NAME, "port": site.port, "targetPort": _PORT_NAME}
    # Headless: each agent has data of its node only, and pods get no variable COMMWATCH_PORT=tcp://... as a setting.
    return _object(site, "v1", "Service", {"clusterIP": "None", "selector": _selector(site), "ports": [port]})


def _service_monitor(site: Site) -> Object:
    spec = {"selector": {"matchLabels": _selector(site)}, "endpoints": [_scraped()]}
    return _object(site, "monitoring.coreos.com/v1", "ServiceMonitor", spec)


def _pod_monitor(site: Site) -> Object:
    spec = {"selector": {"matchLabels": _selector(site)}, "podMetricsEndpoints": [_scraped()]}
    return _object(site, "monitoring.coreos.com/v1", "PodMonitor", spec)


def _scraped() -> Object:
    node = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
    return {"port": _PORT_NAME, "interval": "15s", "scrapeTimeout": "10s", "relabelings": [node]}


def _network_policy(site: Site, *, among_themselves: bool) -> Object:
    """Return a policy that admits only Prometheus to the agent.

    Args:
        among_themselves: also admit the selected pods to each other on any port, because trainers are in them.
    """
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": site.monitoring}}}
    chosen = {"matchLabels": _selector(site)}
    ingress: list[Object] = [{"from": [monitoring], "ports": [{"port": site.port, "protocol": "TCP"}]}]
    if among_themselves:
        ingress.append({"from": [{"podSelector": chosen}]})
    spec = {"podSelector": chosen, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(site, "networking.k8s.io/v1", "NetworkPolicy", spec)


# -- parts of objects ---------------------------------------------------------------------------


def _object(site: Site, version: str, kind: str, spec: Object, name: str | None = None) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": _metadata(site, name), "spec": spec}


def _metadata(site: Site, name: str | None = None) -> Object:
    where = {} if site.namespace is None else {"namespace": site.namespace}
    return {"name": name or site.name, **where, "labels": {**_selector(site), **site.labels}}


def _selector(site: Site) -> Object:
    return {"app.kubernetes.io/name": "commwatch", "app.kubernetes.io/instance": site.name}


def _env(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _mount(volume: str, path: str, **more: object) -> Object:
    return {"name": volume, "mountPath": path, **more}


def _volume(name: str, **empty_dir: str) -> Object:
    return {"name": name, "emptyDir": empty_dir}


def _resources(cpu: str, memory: str, most_cpu: str, most_memory: str) -> Object:
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": most_cpu, "memory": most_memory}}
