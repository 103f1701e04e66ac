"""The resource of what is pushed: the agent, its node, its pod, and the job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from commwatch import __version__

SCOPE = InstrumentationScope(name="commwatch", version=__version__)
JOB = "job_id"
#: Usual variables of Kubernetes' downward API, and the attributes that they give.
_OF_KUBERNETES = {
    "POD_NAME": "k8s.pod.name",
    "POD_NAMESPACE": "k8s.namespace.name",
    "POD_UID": "k8s.pod.uid",
    "NODE_NAME": "k8s.node.name",
}


def attributes_of(env: Mapping[str, str], host: str, instance: str) -> dict[str, str]:
    """Return the attributes of the agent's resource.

    Args:
        env: its environment. ``OTEL_RESOURCE_ATTRIBUTES`` (``key=value,…``, percent-encoded) has the last word.
        instance: as the label ``instance`` of a scrape, ``host:port``.
    """
    found = {
        "service.name": "commwatch",
        "service.version": __version__,
        "service.instance.id": instance,
        "host.name": host,
    }
    found |= {attribute: env[name] for name, attribute in _OF_KUBERNETES.items() if env.get(name)}
    pairs = (pair.partition("=") for pair in env.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    return found | {key.strip(): unquote(value.strip()) for key, equals, value in pairs if equals and key.strip()}


def resource(attributes: Mapping[str, str], job: str) -> Resource:
    """Return the resource of a job; an empty ``job``: of the node."""
    found = Resource()
    for key, value in {**attributes, **({JOB: job} if job else {})}.items():
        put(found.attributes.add(), key, value)
    return found


def put(pair: KeyValue, key: str, value: str | float | list[int]) -> None:
    """Set an attribute."""
    pair.key = key
    if isinstance(value, str):
        pair.value.string_value = value
    elif isinstance(value, list):
        for each in value:
            pair.value.array_value.values.add(int_value=each)
    elif isinstance(value, int):
        pair.value.int_value = value
    else:
        pair.value.double_value = value
