"""``commwatch manifest k8s --launcher``: the pod of the Job in the objects of JobSet, Kubeflow and Volcano."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.agent.deploy.kubernetes_schema import strictly_valid
from tests.helpers import commwatch

#: By launcher: kinds of its objects, and the label that names the job on its pods.
LAUNCHERS = {
    "jobset": (["JobSet"], "jobset.sigs.k8s.io/jobset-name"),
    "trainjob": (["TrainingRuntime", "TrainJob"], "jobset.sigs.k8s.io/jobset-name"),
    "pytorchjob": (["PyTorchJob"], "training.kubeflow.org/job-name"),
    "volcano": (["Job"], "volcano.sh/job-name"),
}
FLAGS = ("--namespace=ml", "--name=watch", "--history-claim=runs", "--runtime-class=nvidia", "--token-secret=agents")


@cache
def objects(*flags: str) -> list[dict[str, Any]]:
    """The objects that the command prints."""
    done = commwatch("manifest", "k8s", *FLAGS, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))  # the dashboards are long


def pods(value: Any) -> list[dict[str, Any]]:
    """The templates of pods, wherever they are in an object."""
    if isinstance(value, list):
        return [pod for each in value for pod in pods(each)]
    if not isinstance(value, dict):
        return []
    if "initContainers" in value.get("spec", {}):
        return [value]
    return pods(list(value.values()))


def trainer(pod: dict[str, Any]) -> dict[str, Any]:
    """The container that trains."""
    (container,) = pod["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def as_in_a_job(pod: dict[str, Any]) -> dict[str, Any]:
    """A pod without what its launcher requires to differ."""
    container = trainer(pod)
    env = [each for each in container["env"] if not each["name"].startswith(("PET_", "COMMWATCH_JOB"))]
    return {**pod, "spec": {**pod["spec"], "containers": [{**container, "name": "trainer", "env": env}]}}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_pod(launcher: str) -> None:
    """The pods are those of the Job but for the label of the job, and Kubernetes takes them; all other objects are the same."""
    kinds, label = LAUNCHERS[launcher]
    made, (job, *others) = objects("--launcher", launcher), objects()
    assert [each["kind"] for each in made[: len(kinds)]] == kinds
    assert made[len(kinds) :] == others
    assert all(each["metadata"]["namespace"] == "ml" for each in made)
    found = pods(made[: len(kinds)])
    for pod in found:
        assert as_in_a_job(pod) == as_in_a_job(*pods(job))
        (name,) = (each for each in trainer(pod)["env"] if each["name"] == "COMMWATCH_JOB")
        assert name["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{label}']"
    strictly_valid(
        {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "x"}} for pod in found
    )


@pytest.mark.parametrize(
    ("launcher", "first"), [("jobset", "watch-job-node-0-0.watch-job"), ("volcano", "watch-job-node-0.watch-job")]
)
def test_rendezvous(launcher: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher does not configure torchrun, the pod does: the nodes meet at the first pod."""
    (pod,) = pods(objects("--launcher", launcher, "--nodes", "4")[0])
    for each in trainer(pod)["env"]:
        if each["name"].startswith("PET_"):
            monkeypatch.setenv(each["name"], each["value"])
    read = get_args_parser().parse_args(["train.py"])
    assert (read.nnodes, read.rdzv_backend, read.rdzv_endpoint) == ("4", "c10d", f"{first}:29500")


def test_nodes() -> None:
    """Every launcher starts as many pods as --nodes has."""
    job_set = objects("--launcher", "jobset", "--nodes", "4")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job_set["parallelism"], job_set["completions"]) == (4, 4)
    runtime, train = objects("--launcher", "trainjob", "--nodes", "4")[:2]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 4
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    roles = objects("--launcher", "pytorchjob", "--nodes", "4")[0]["spec"]["pytorchReplicaSpecs"]
    assert {role: each["replicas"] for role, each in roles.items()} == {"Master": 1, "Worker": 3}
    volcano = objects("--launcher", "volcano", "--nodes", "4")[0]["spec"]
    assert (volcano["minAvailable"], volcano["tasks"][0]["replicas"]) == (4, 4)


@pytest.mark.parametrize(
    ("launcher", "container"),
    [("jobset", "trainer"), ("trainjob", "node"), ("pytorchjob", "pytorch"), ("volcano", "trainer")],
)
def test_container(launcher: str, container: str) -> None:
    """The trainer's container has the name by which the launcher finds it."""
    assert {trainer(pod)["name"] for pod in pods(objects("--launcher", launcher))} == {container}


@pytest.mark.parametrize("flags", [("--nodes", "0", "--launcher", "jobset"), ("--launcher", "jobset", "--daemonset")])
def test_refused(flags: tuple[str, ...]) -> None:
    """A mistake ends in one line that names the flag."""
    done = commwatch("manifest", "k8s", *flags)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert flags[0] in done.stderr
