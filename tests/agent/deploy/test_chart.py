"""The Helm chart and the Kustomize bases, by helm and kubectl: the objects of ``commwatch manifest k8s``, and nothing else."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from commwatch import __version__
from commwatch_agent.deploy import chart
from tests.agent.deploy.kubernetes_schema import strictly_valid
from tests.agent.deploy.kubernetes_tools import CHART, Tools, by_name
from tests.bare import TREE
from tests.helpers import commwatch

KUSTOMIZE = TREE / "deploy" / "kustomize"
#: The files of the chart that are written by hand.
OWN = {
    "Chart.yaml", "values.yaml", "templates/_helpers.tpl", "templates/NOTES.txt", "templates/rules.yaml", "templates/dashboards.yaml",
    "templates/settings.yaml", "templates/certificate.yaml",
}  # fmt: skip
ALL = {
    "commonLabels": {"release": "prometheus", "number": "08"}, "runtimeClassName": "nvidia", "user": 1000, "group": 7000,
    "port": 9001, "image": {"repository": "registry.example.com:5000/commwatch", "tag": "7"}, "monitoringNamespace": "observe",
    "runbookUrl": "https://example.com/runbook", "token": {"existingSecret": "agents"},
    "nodeLabels": {"topology.kubernetes.io/zone": "zone", "example.com/rack-no": "rack"},
}  # fmt: skip
#: The same settings for the command; it takes the values' order of labels.
ALL_FLAGS = (
    "--label=release=prometheus", "--label=number=08", "--runtime-class=nvidia", "--user=1000", "--group=7000", "--port=9001",
    "--image=registry.example.com:5000/commwatch:7", "--monitoring-namespace=observe",
    "--runbook-url=https://example.com/runbook", "--token-secret=agents",
    "--node-label=example.com/rack-no=rack", "--node-label=topology.kubernetes.io/zone=zone",
)  # fmt: skip
COMMAND = ["python", "-m", "it's", 'a "b" && <c> ${d} {{e}} \\ é']
#: Values of the chart, and flags of the command that mean the same.
SAME: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "daemonset": ({}, ("--daemonset",)),
    "sidecar": ({"mode": "sidecar"}, ()),
    "daemonset, all": (ALL, ("--daemonset", *ALL_FLAGS)),
    "sidecar, all": (
        {
            **ALL, "mode": "sidecar", "history": {"size": "10Gi"},
            "trainer": {"image": "mine:1", "command": COMMAND, "gpus": 0},
        },
        (
            *ALL_FLAGS, "--history-claim=commwatch-history", "--history-size=10Gi",
            "--trainer-image=mine:1", f"--trainer-command={shlex.join(COMMAND)}", "--gpus=0",
        ),
    ),
    "a claim that exists": ({"mode": "sidecar", "history": {"existingClaim": "runs"}}, ("--history-claim=runs",)),
}  # fmt: skip
#: Values that only the chart has, because other users of the objects change these with their own tools.
MORE: dict[str, Any] = {
    "image": {"repository": "mine", "tag": "1", "pullPolicy": "Always"}, "imagePullSecrets": [{"name": "registry"}],
    "extraEnv": [{"name": "COMMWATCH_LABEL_CLUSTER", "value": "west"}], "nodeSelector": {"gpu": "yes"},
    "extraVolumes": [{"name": "otlp", "secret": {"secretName": "otlp-headers"}}],
    "extraVolumeMounts": [{"name": "otlp", "mountPath": "/etc/commwatch/otlp", "readOnly": True}],
    "affinity": {"nodeAffinity": {}}, "tolerations": [{"key": "reserved", "operator": "Exists"}], "priorityClassName": "high",
    "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
}  # fmt: skip


@pytest.fixture
def kube(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


@cache
def manifest(*flags: str) -> str:
    done = commwatch("manifest", "k8s", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def committed(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}


def test_generated_files() -> None:
    """What the chart has beside its own files is what `make chart` makes of the templates, the alerts and the dashboards."""
    schema = (CHART.parent / "values.schema.json").read_text(encoding="utf-8")
    assert {name: text for name, text in committed(CHART).items() if name not in OWN} == chart.files(schema)


def test_versions() -> None:
    """The chart has the version of commwatch, and so does its image."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (__version__, __version__)


@pytest.mark.parametrize("case", SAME)
def test_same_objects(kube: Tools, case: str) -> None:
    """The chart's objects are those of the command with the same settings, key by key, and in each mode with all settings Kubernetes takes them."""
    values, flags = SAME[case]
    made = kube.rendered(values)
    assert by_name(made) == by_name(manifest("--namespace", "ml", *flags))
    if case.endswith("all"):
        strictly_valid(by_name(made).values())


@pytest.mark.parametrize("mode", ["sidecar", "daemonset"])
def test_more_values(kube: Tools, mode: str) -> None:
    """Values that only the chart has are in the pod, where Kubernetes takes them."""
    made = kube.rendered({**MORE, "mode": mode})
    strictly_valid(by_name(made).values())
    (spec,) = (
        each["spec"]["template"]["spec"] for (kind, _), each in by_name(made).items() if kind in ("Job", "DaemonSet")
    )
    (agent,) = (each for each in (*spec["initContainers"], *spec["containers"]) if each["name"] == "commwatch")
    assert (agent["image"], agent["imagePullPolicy"], agent["resources"]) == ("mine:1", "Always", MORE["resources"])
    images = [each for each in (*spec["initContainers"], *spec["containers"]) if each["image"] == "mine:1"]
    assert len(images) == 2
    assert {each["imagePullPolicy"] for each in images} == {"Always"}
    assert MORE["extraEnv"][0] in agent["env"]
    assert MORE["extraVolumeMounts"][0] in agent["volumeMounts"]
    assert MORE["extraVolumes"][0] in spec["volumes"]
    assert MORE["tolerations"][0] in spec["tolerations"]
    same = ("imagePullSecrets", "nodeSelector", "affinity", "priorityClassName")
    assert {name: spec[name] for name in same} == {name: MORE[name] for name in same}


def test_storage(kube: Tools) -> None:
    """The claim has the class and the access mode of the values."""
    history = {"size": "1Gi", "storageClass": "fast", "accessMode": "ReadWriteOnce"}
    claim = by_name(kube.rendered({"mode": "sidecar", "history": history}))[
        "PersistentVolumeClaim", "commwatch-history"
    ]
    assert (claim["spec"]["storageClassName"], claim["spec"]["accessModes"]) == ("fast", ["ReadWriteOnce"])


@pytest.mark.parametrize("mode", ["sidecar", "daemonset"])
def test_switches(kube: Tools, mode: str) -> None:
    """Each object that a site may not want can be left out."""
    parts = ("podMonitor", "serviceMonitor", "prometheusRule", "dashboards", "networkPolicy", "trainer")
    made = kube.rendered({"mode": mode, **{part: {"enabled": False} for part in parts}})
    assert [kind for kind, _ in by_name(made)] == ([] if mode == "sidecar" else ["Service", "DaemonSet"])


@pytest.mark.parametrize("values", [{}, {"mode": "sidecar"}])
def test_lint(kube: Tools, values: dict[str, Any]) -> None:
    """helm's linter finds nothing, also where warnings count."""
    done = kube.helm("lint", values, "--strict")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mode": "deployment"}, "mode"), ({"user": 0}, "user"), ({"group": "wheel"}, "group"), ({"port": 70000}, "port"),
        ({"nonsense": 1}, "nonsense"), ({"image": {"name": "x"}}, "image"), ({"commonLabels": {"n": 8}}, "commonLabels"),
        ({"mode": "sidecar", "hostNetwork": True}, "hostNetwork"),
        ({"history": {"size": "10Gi"}}, "history"), ({"mode": "sidecar", "history": {"size": "10GB"}}, "size"),
        ({"mode": "sidecar", "history": {"size": "1Gi", "existingClaim": "runs"}}, "size"),
        ({"trainer": {"command": []}}, "command"), ({"trainer": {"gpus": -1}}, "gpus"), ({"token": {"existingSecret": "A_B"}}, "token"),
        ({"nodeLabels": {"a": "b-c"}}, "nodeLabels"), ({"networkPolicy": {"enabled": "no"}}, "networkPolicy"),
    ],
)  # fmt: skip
def test_refused(kube: Tools, values: dict[str, Any], named: str) -> None:
    """A wrong value is refused by its name, before anything is installed."""
    done = kube.helm("template", values, "commwatch")
    assert (done.returncode, done.stdout) == (1, "")
    assert "don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr


def test_name_of_the_release(kube: Tools) -> None:
    """Objects have the name of the release with commwatch in it, or the name of the values."""
    for release, values, name in (
        ("run7", {}, "run7-commwatch"),
        ("my-commwatch", {}, "my-commwatch"),
        ("run7", {"fullnameOverride": "watch"}, "watch"),
    ):
        made = by_name(kube.helm("template", values, release).stdout)
        assert ("DaemonSet", name) in made
        assert ("Service", name) in made


def notes(kube: Tools, values: dict[str, Any]) -> str:
    """What helm prints after an installation."""
    done = kube.helm("install", values, "commwatch", "--dry-run=client")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]


def test_notes(kube: Tools) -> None:
    """After the installation helm prints what a pod needs, as docs/deploy.md has it; and for a Job, where its history is."""
    text = notes(kube, {})
    shown = text[text.index("  spec:") : text.index("Diagnosis")]
    block, _ = re.findall(r"```yaml\n(.*?)```", (TREE / "docs" / "deploy.md").read_text(), re.DOTALL)
    assert yaml.safe_load(shown) == yaml.safe_load(block)
    assert "get pod -l app.kubernetes.io/instance=commwatch --field-selector spec.nodeName=NODE" in text
    assert "cat /run/commwatch/agent.token" in text
    assert "agent.token" not in notes(kube, {"token": {"existingSecret": "agents"}})
    job = notes(kube, {"mode": "sidecar", "history": {"size": "1Gi"}, "token": {"existingSecret": "agents"}})
    assert "exec job/commwatch-job -c commwatch" in job
    assert "claim commwatch-history" in job
    assert "Secret agents" in job
    assert "app.kubernetes.io/instance: commwatch" in notes(kube, {"mode": "sidecar", "trainer": {"enabled": False}})


def test_printed_files() -> None:
    """Bases and examples that `make chart` makes are what the command prints."""
    made = re.findall(r"\$\(K8S\) (.*) > (\S+)\n", (TREE / "Makefile").read_text())
    assert len(made) == 7
    for flags, path in made:
        assert (TREE / path).read_text() == manifest(*flags.split()), path


def test_bases(kube: Tools) -> None:
    """Kubectl makes of a mode's base all of the command's objects."""
    for name, whole in (("sidecar", ()), ("daemonset", ("--daemonset",))):
        done = kube.run("kubectl", "kustomize", KUSTOMIZE / "base" / name)
        assert (done.returncode, done.stderr) == (0, "")
        assert by_name(done.stdout) == by_name(manifest(*whole))


def test_overlay(kube: Tools) -> None:
    """The example of a site changes namespace, labels, image, settings and policy of the base, in a way that Kubernetes takes."""
    done = kube.run("kubectl", "kustomize", KUSTOMIZE / "overlays" / "example")
    assert (done.returncode, done.stderr) == (0, "")
    strictly_valid(by_name(done.stdout).values())
    flags = ("--namespace=ml", "--label=release=prometheus", "--image=registry.example.com/commwatch:0.1.0")
    expected = by_name(
        manifest("--daemonset", *flags, "--runtime-class=nvidia", "--monitoring-namespace=observability")
    )
    spec = expected["DaemonSet", "commwatch"]["spec"]["template"]["spec"]
    made = by_name(done.stdout)
    env = made["DaemonSet", "commwatch"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "COMMWATCH_LABEL_CLUSTER", "value": "west"} in env
    spec["containers"][0]["env"] = env
    assert made == expected


def test_report_after_the_job() -> None:
    """The example of a pod that reports on a past Job has the agent's volume, user and group, and Kubernetes takes it."""
    text = (TREE / "deploy" / "examples" / "report.yaml").read_text()
    strictly_valid(by_name(text).values())
    pod = yaml.safe_load(text)["spec"]
    job = by_name(manifest("--history-claim=commwatch-history"))["Job", "commwatch-job"]["spec"]["template"]["spec"]
    (agent,) = (each for each in job["initContainers"] if each["name"] == "commwatch")
    (report,) = pod["containers"]
    assert (report["image"], report["securityContext"]) == (agent["image"], agent["securityContext"])
    assert pod["securityContext"] == job["securityContext"]
    assert all(mount in agent["volumeMounts"] for mount in report["volumeMounts"])
    assert all(volume in job["volumes"] for volume in pod["volumes"])
