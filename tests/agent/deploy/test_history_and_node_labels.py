"""``commwatch manifest k8s``: a volume for the history, and labels of nodes on the series."""

from __future__ import annotations

import pytest

from tests.agent.deploy.test_manifest_k8s import AGENT, VARIANTS, containers, env, objects, pod


def test_history_outlives_the_pod() -> None:
    """With a claim the agent's history is in its volume; the claim is made if it has a size, for pods on several nodes."""
    assert "PersistentVolumeClaim" not in objects()
    for size in ((), ("--history-size", "10Gi")):
        found = objects("--history-claim", "runs", *size)
        spec = pod(found)["spec"]
        agent = containers(spec)[AGENT]
        (mount,) = (
            each["name"] for each in agent["volumeMounts"] if each["mountPath"] == env(agent)["COMMWATCH_STATE"]
        )
        assert [each for each in spec["volumes"] if each["name"] == mount] == [
            {"name": mount, "persistentVolumeClaim": {"claimName": "runs"}}
        ]
        assert ("PersistentVolumeClaim" in found) == bool(size)
    claim = found["PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == "runs"
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "10Gi"}}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_node_labels(variant: str) -> None:
    """Prometheus gives the series labels of the node, by the names that its discovery has for them."""
    found = objects(
        *VARIANTS[variant], "--node-label", "topology.kubernetes.io/zone=zone", "--node-label", "rack-no=rack"
    )
    monitor = found.get("PodMonitor", found.get("ServiceMonitor"))["spec"]  # type: ignore[index]
    assert monitor["attachMetadata"] == {"node": True}
    ((endpoint,),) = (value for key, value in monitor.items() if key.lower().endswith("endpoints"))
    assert [(*each["sourceLabels"], each["targetLabel"]) for each in endpoint["relabelings"][2:]] == [
        ("__meta_kubernetes_pod_node_name", "node"),
        ("__meta_kubernetes_node_label_topology_kubernetes_io_zone", "zone"),
        ("__meta_kubernetes_node_label_rack_no", "rack"),
    ]
