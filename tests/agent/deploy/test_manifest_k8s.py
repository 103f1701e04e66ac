"""``commwatch manifest k8s``: objects that Kubernetes takes, that belong together, and that confine the agent."""

from __future__ import annotations

import gc
import io
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from commwatch_agent.cli import command_line
from commwatch_agent.deploy.kubernetes import Site, Trainer, daemon_set, sidecar
from commwatch_agent.otlp.resource import _OF_KUBERNETES
from commwatch_alerts import catalogue
from commwatch_alerts.export import kubernetes as exported_rules
from commwatch_dashboards.export import configmaps
from tests.agent.deploy.kubernetes_schema import is_refused, strictly_valid
from tests.bare import TREE
from tests.helpers import NOBODY, clean_env, commwatch, examples, needs

VARIANTS = {
    "sidecar": (),
    "daemonset": ("--daemonset",),
    "host_network": ("--daemonset", "--host-network", "--insecure"),
}
AGENT = "commwatch"
#: A common token for the agents of all nodes.
COMMON = ("--token-secret", "agents", "--peers", "dns+agents:9001")


@cache
def text(*flags: str) -> str:
    """What the command prints, called here."""
    with (
        patch.dict(os.environ, clean_env(), clear=True),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        code = command_line.main(["manifest", "k8s", *flags])
    gc.enable()
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


def documents(whole: str) -> list[Any]:
    """What is in a file of YAML, read by libyaml: in Python it takes twenty times as long."""
    return list(yaml.load_all(whole, yaml.CSafeLoader))


def objects(*flags: str) -> dict[str, dict[str, Any]]:
    """The objects that it prints, by kind; of the dashboards the last."""
    return {each["kind"]: each for each in documents(text(*flags))}


def pod(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the agent's pod is made of."""
    template: dict[str, Any] = found.get("Job", found.get("DaemonSet"))["spec"]["template"]  # type: ignore[index]
    return template


def containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Containers of a pod by name, those that come first as well."""
    return {each["name"]: each for each in (*spec["initContainers"], *spec["containers"])}


def env(container: dict[str, Any]) -> dict[str, str]:
    """What a container has in its environment."""
    return {each["name"]: each.get("value", "") for each in container["env"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_takes_it(variant: str) -> None:
    """Every object of Kubernetes' own passes its schema, strictly; a misspelt key does not."""
    flags = (
        "--namespace",
        "ml",
        "--label",
        "release=prometheus",
        "--runtime-class",
        "nvidia",
        "--port",
        "9001",
        *COMMON,
    )
    made = text(*VARIANTS[variant], *flags)
    assert "&id" not in made
    strictly_valid(documents(made))
    assert is_refused(documents(made.replace("volumeMounts:", "volumeMount:")))


@pytest.mark.parametrize(
    ("golden", "flags"),
    [
        ("sidecar", ("--namespace", "ml", "--runtime-class", "nvidia")),
        ("daemonset", ("--daemonset", "--user", "1000", "--group", "7000", "--name", "watch")),
    ],
)
def test_golden(golden: str, flags: tuple[str, ...]) -> None:
    """The objects of our templates are those of the golden file, key by key."""
    made = [each for each in documents(text(*flags)) if each["kind"] not in ("PrometheusRule", "ConfigMap")]
    assert made == list(yaml.safe_load_all((TREE / "tests" / "golden" / f"k8s-{golden}.yaml").read_text()))


def test_comments() -> None:
    """The printed objects carry the comments of our templates, and none of their fields."""
    for mode in VARIANTS.values():
        ours = text(*mode).partition("kind: PrometheusRule")[0]
        assert ours.count("# ") > 20
        assert "$" not in ours


def test_host_network() -> None:
    """With the node's network the DaemonSet differs in two keys only."""
    (alone,) = objects("--daemonset", "--only", "DaemonSet").values()
    (host,) = objects(*VARIANTS["host_network"], "--only", "DaemonSet").values()
    alone["spec"]["template"]["spec"] |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    assert host == alone


@cache
def scalars(value: str) -> list[tuple[str, str, str]]:
    """The YAML events of all modes for settings that all have one value: kind, text and style of each."""
    more: dict[str, Any] = {"monitoring": value, "runtime_class": value, "peers": value, "token_secret": value}
    more |= {"history_claim": value, "history_size": value}
    site = Site(value, value, 9001, value, {value: value}, **more)
    documents = [*sidecar(site, Trainer(value, [value, value], 1)), *daemon_set(site)]
    found = [event for each in documents for event in yaml.parse(each, yaml.CSafeLoader)]
    return [(type(each).__name__, getattr(each, "value", ""), getattr(each, "style", "")) for each in found]


@examples(40)
@given(st.text(min_size=1))
@example("a\nkind: Pod\n---\n").via("a document of its own")
@example('it\'s "x" \\ ${image} $image $ $$ # {a: b} [c] &d *e !f | > %g @h `i`\t\u0085\u2028\ufeff').via("marks")
@example("x y " * 1000).via("a long line")
def test_any_text_arrives(value: str) -> None:
    """Any text of a setting arrives unchanged, in its place only, and quoted: no reader takes it for a number, a date or a bool."""
    assert scalars(value) == [(kind, found.replace("@@", value), style) for kind, found, style in scalars("@@")]
    assert {style for _, found, style in scalars("@@") if "@@" in found} == {'"'}


def test_labels_are_text() -> None:
    """Labels are quoted in every object where YAML 1.1 or 1.2 has a number, a date or a bool of their spelling."""
    labels = {f"l{value}": value for value in ("yes", "y", "null", "0123", "08", "1e3", "0o17", "0x1f", "2024-01-01")}
    whole = text(*(f"--label={name}={value}" for name, value in labels.items()))
    scalars = [event for event in yaml.parse(whole, yaml.CSafeLoader) if isinstance(event, yaml.ScalarEvent)]
    styles = [(name.value, value.style) for name, value in pairwise(scalars) if labels.get(name.value) == value.value]
    kinds = whole.count("\nkind: ")
    assert Counter(name for name, _ in styles) == dict.fromkeys(labels, kinds)
    assert {style for _, style in styles} <= {"'", '"'}


@pytest.mark.parametrize("variant", VARIANTS)
def test_agent_is_confined(variant: str) -> None:
    """The agent is not root, cannot write to its image or gain rights, is bounded and asked for its health, and has no account."""
    spec = pod(objects(*VARIANTS[variant]))["spec"]
    agent = containers(spec)[AGENT]
    security = agent["securityContext"]
    assert (security["runAsNonRoot"], security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (
        True,
        True,
        False,
    )
    assert (security["capabilities"], security["seccompProfile"]) == ({"drop": ["ALL"]}, {"type": "RuntimeDefault"})
    assert security["runAsUser"] > 0
    assert spec["automountServiceAccountToken"] is False
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= agent.keys()
    assert {kind: set(amounts) for kind, amounts in agent["resources"].items()} == {
        "requests": {"cpu", "memory"},
        "limits": {"cpu", "memory"},
    }
    written = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert {env(agent)["COMMWATCH_DIR"], env(agent)["COMMWATCH_STATE"], "/tmp"} == written
    assert "nvidia.com/gpu" not in agent["resources"]["limits"]


def test_sidecar_and_trainer() -> None:
    """The sidecar stays without keeping the Job from ending, starts before the trainer, and shares folder, group and job with it."""
    spec = pod(
        objects(
            "--group", "7000", "--trainer-image", "mine:1", "--trainer-command", "python -m 'my job'", "--gpus", "2"
        )
    )["spec"]
    assert [each["name"] for each in spec["initContainers"]] == ["probe", AGENT]
    parts = containers(spec)
    agent, trainer = parts[AGENT], parts["trainer"]
    assert [each.get("restartPolicy") for each in spec["initContainers"]] == [None, "Always"]
    assert (trainer["image"], trainer["command"]) == ("mine:1", ["python", "-m", "my job"])
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert spec["securityContext"]["fsGroup"] == 7000
    for key, value in (("COMMWATCH_DIR", "/run/commwatch"), ("COMMWATCH_GROUP", "7000")):
        assert env(agent)[key] == env(trainer)[key] == value
    run = [
        {each["mountPath"]: each["name"] for each in one["volumeMounts"]}["/run/commwatch"] for one in (agent, trainer)
    ]
    (volume,) = [each for each in spec["volumes"] if each["name"] == run[0] == run[1]]
    assert volume["emptyDir"]["medium"] == "Memory"
    (job,) = [each for each in trainer["env"] if each["name"] == "COMMWATCH_JOB"]
    assert job["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/job-name']"
    brought = parts["probe"]["args"]
    assert brought == ["probe", "install", env(trainer)["PYTHONPATH"]]
    assert env(trainer)["COMMWATCH"] == "1"
    assert "resources" not in containers(pod(objects("--gpus", "0"))["spec"])["trainer"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_agent_knows_its_pod(variant: str) -> None:
    """The agent has in its environment what the resource attributes of OTLP are made of, from the fields of its pod."""
    found = objects(*VARIANTS[variant])
    agent = containers(pod(found)["spec"])[AGENT]
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in agent["env"] if "valueFrom" in each}
    # On a node's disk the history is the node's; sidecars of one node may share a volume.
    assert fields.pop("COMMWATCH_NODE", None) == ("spec.nodeName" if "DaemonSet" in found else None)
    assert fields == {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "NODE_NAME": "spec.nodeName",
    }
    assert fields.keys() == _OF_KUBERNETES.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_belongs_together(variant: str) -> None:
    """Selectors choose the agent's pods, ports meet by name, labels and namespace are on every object."""
    flags = ("--namespace", "ml", "--label", "release=prometheus", "--name", "watch", "--port", "9001")
    found = objects(*VARIANTS[variant], *flags)
    template = pod(found)
    agent = containers(template["spec"])[AGENT]
    (port,) = agent["ports"]
    assert port["containerPort"] == int(env(agent)["COMMWATCH_PORT"]) == 9001
    chosen = template["metadata"]["labels"]
    for kind, each in found.items():
        assert (each["metadata"]["namespace"], each["metadata"]["labels"]["release"]) == ("ml", "prometheus"), kind
    if variant == "sidecar":
        monitor = found["PodMonitor"]["spec"]
        endpoints = monitor["podMetricsEndpoints"]
        assert monitor["selector"]["matchLabels"] == chosen
    else:
        service, monitor = found["Service"], found["ServiceMonitor"]["spec"]
        assert service["spec"]["selector"] == found["DaemonSet"]["spec"]["selector"]["matchLabels"] == chosen
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert service["spec"]["ports"] == [{"name": port["name"], "port": 9001, "targetPort": port["name"]}]
        assert service["spec"]["clusterIP"] == "None"
        endpoints = monitor["endpoints"]
    assert [each["port"] for each in endpoints] == [port["name"]]
    if variant == "host_network":  # where it would not be heeded
        assert "NetworkPolicy" not in found
        return
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == chosen
    assert policy["ingress"][0]["ports"] == [{"port": 9001, "protocol": "TCP"}]
    # Trainers of one job talk to each other on ports of their own choice.
    assert policy["ingress"][1:] == (
        [{"from": [{"podSelector": policy["podSelector"]}]}] if variant == "sidecar" else []
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_common_token(variant: str) -> None:
    """With a Secret all agents have one token, in a file that the agent accepts, and know each other; without it nothing of that is there."""
    assert "token" not in yaml.safe_dump(pod(objects(*VARIANTS[variant])))
    peers = () if variant == "daemonset" else ("--peers", "dns+watch:9001")  # its own Service is the default
    found = objects(*VARIANTS[variant], "--name", "watch", "--port", "9001", "--token-secret", "agents", *peers)
    spec = pod(found)["spec"]
    agent = containers(spec)[AGENT]
    assert env(agent)["COMMWATCH_PEERS"] == "dns+watch:9001"
    (mount,) = (each for each in agent["volumeMounts"] if each["name"] == "token")
    (volume,) = (each["secret"] for each in spec["volumes"] if each["name"] == "token")
    assert (volume["secretName"], env(agent)["COMMWATCH_TOKEN_FILE"]) == ("agents", f"{mount['mountPath']}/token")
    assert spec["securityContext"]["fsGroup"] == agent["securityContext"]["runAsGroup"]
    assert volume["defaultMode"] & 0o027 == 0
    if "NetworkPolicy" in found:
        policy = found["NetworkPolicy"]["spec"]
        admitted = [each["podSelector"] for rule in policy["ingress"] for each in rule["from"] if "podSelector" in each]
        assert admitted == [policy["podSelector"]]


def test_custom_kinds() -> None:
    """What no schema is at hand for has the shape that the operator's API documents, and no key besides."""
    sidecar, daemons = objects(), objects("--daemonset")
    keys = {"port", "interval", "scrapeTimeout", "relabelings"}
    for monitor, endpoints in (
        (sidecar["PodMonitor"], "podMetricsEndpoints"),
        (daemons["ServiceMonitor"], "endpoints"),
    ):
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(monitor["spec"]) == {"selector", endpoints}
        assert [set(each) for each in monitor["spec"][endpoints]] == [keys]
    rules = sidecar["PrometheusRule"]
    exported = yaml.safe_load(exported_rules(catalogue.read(catalogue.shipped("rules.yaml"))))
    assert (rules["apiVersion"], rules["spec"]) == (exported["apiVersion"], exported["spec"])


def test_dashboards() -> None:
    """Every dashboard is there, as `dashboards export` writes it, with the labels of the site beside its own."""
    made = documents(text("--only", "ConfigMap", "--label", "team=ml"))
    exported = [only for each in configmaps("http://localhost:9477/runbook").values() for only in documents(each)]
    assert [each["data"] for each in made] == [each["data"] for each in exported]
    assert all(each["metadata"]["labels"].items() >= {"grafana_dashboard": "1", "team": "ml"}.items() for each in made)


def test_only() -> None:
    """Kinds are chosen by name; an unknown kind is refused with the list of known ones."""
    assert list(objects("--only", "NetworkPolicy", "--only", "PodMonitor")) == ["PodMonitor", "NetworkPolicy"]
    done = commwatch("manifest", "k8s", "--only", "Pod")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "choose from Job, PodMonitor, NetworkPolicy, PrometheusRule, ConfigMap" in done.stderr


def test_thresholds() -> None:
    """Alerts have the thresholds of the settings."""
    done = commwatch(
        "manifest", "k8s", "--only", "PrometheusRule", env=clean_env(COMMWATCH_THRESHOLD_COMM_SHARE="0.4321")
    )
    assert "0.4321" in done.stdout
    assert "0.4321" not in text("--only", "PrometheusRule")


@pytest.mark.parametrize("named", ["by a flag", "by the environment", "by the folder"])
def test_settings_that_no_object_carries(tmp_path: Path, named: str) -> None:
    """Settings that the agents would not get are refused in one line that names them and the chart, however the file is found."""
    file = tmp_path / "commwatch.toml"
    file.write_text('keep_days = 30\nlog_format = "json"\nport = 9001\n[thresholds]\ncomm_share = 0.4321\n')
    flags = ("--config", str(file)) if named == "by a flag" else ()
    env = clean_env(**({"COMMWATCH_CONFIG": str(file)} if named == "by the environment" else {}))
    cwd = tmp_path if named == "by the folder" else None
    for mode in ((), ("--daemonset",), ("--launcher", "trainjob")):
        done = commwatch("manifest", "k8s", *mode, *flags, env=env, cwd=cwd)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert ": keep_days, log_format: " in done.stderr
        assert "Helm chart" in done.stderr
    monitoring = commwatch("manifest", "k8s", "--only", "PrometheusRule", *flags, env=env, cwd=cwd)
    assert (monitoring.returncode, monitoring.stderr) == (0, "")
    assert "0.4321" in monitoring.stdout


def test_settings_that_the_objects_carry(tmp_path: Path) -> None:
    """A settings file may have what the objects carry: the port, thresholds and kinds; a port that is not fixed is refused."""
    file = tmp_path / "commwatch.toml"
    file.write_text("port = 9001\n[thresholds]\ncomm_share = 0.4321\n[kinds.slow_link]\nenabled = false\n")
    made = text("--daemonset", "--config", str(file))
    assert ("0.4321" in made, "containerPort: 9001" in made, "alert: SlowLink" in made) == (True, True, False)
    file.write_text("port = 0\n")
    done = commwatch("manifest", "k8s", "--daemonset", "--config", file)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "port = 0" in done.stderr


@pytest.mark.parametrize("kind", ["systemd", "slurm"])
def test_folders_in_the_settings(kind: str, tmp_path: Path) -> None:
    """Folders in the settings file, which unit and scripts override, are refused by name; other settings reach the agent in the file."""
    file = tmp_path / "commwatch.toml"
    file.write_text("keep_days = 30\n")
    done = commwatch("manifest", kind, "--config", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--config {file}" in done.stdout
    file.write_text('keep_days = 30\ndir = "/r"\nstate = "/s"\n')
    done = commwatch("manifest", kind, "--config", file)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert ": dir, state: " in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--name", "Watch"), ("--name", "a" * 60), ("--namespace", "a_b"), ("--monitoring-namespace", ""), ("--user", "0"),
        ("--group", "0"), ("--gpus", "-1"), ("--label", "release"), ("--host-network",), ("--host-network", "--daemonset"),
        ("--trainer-command", "a 'b"), ("--trainer-command", ""), ("--token-secret", "My_Secret"), ("--peers", "node1"),
        ("--history-claim", "A_B"), ("--history-claim", "runs", "--daemonset"), ("--history-size", "1Gi"),
        ("--history-size", "10GB", "--history-claim", "runs"), ("--node-label", "zone"), ("--node-label", "a/b=c-d"),
        ("--port", "0"), ("--dir", "/x"), ("--state", "/x"), ("--host", "::"), ("--token-file", "/x"), ("--ca-file", "/x"), ("--client-cert", "/x"),
    ],
)  # fmt: skip
def test_refused(flags: tuple[str, ...]) -> None:
    """What Kubernetes would refuse, and root, is refused here, in one line that names the flag."""
    done = commwatch("manifest", "k8s", *flags)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert flags[0] in done.stderr


@pytest.mark.parametrize("kind", ["k8s", "systemd"])
def test_empty_value_is_quoted(kind: str) -> None:
    """An empty value is quoted in the error as in a shell."""
    done = commwatch("manifest", kind, "--name=")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--name '': needs " in done.stderr


NO_TEXT = {
    "k8s": ("--image", "--runtime-class", "--runbook-url", "--trainer-image", "--trainer-command"),
    "slurm": ("--run-dir", "--state-dir", "--probe", "--host"),
    "systemd": ("--host",),
}


@pytest.mark.parametrize(("kind", "flag"), [(kind, flag) for kind, flags in NO_TEXT.items() for flag in flags])
def test_bytes_that_are_no_text(kind: str, flag: str) -> None:
    """A value that is not UTF-8 is refused by name in one line, because no parser would accept it."""
    done = commwatch("manifest", kind, flag, "/a\udcff")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    why = "--host: needs an IP address or a host name" if flag == "--host" else f"{flag} '/a�': needs text in UTF-8"
    assert why in done.stderr


def test_documented_pod() -> None:
    """The pod that docs/deploy.md shows beside the DaemonSet has its folders, its group and the probe's place."""
    block, _ = re.findall(r"```yaml\n(.*?)```", (TREE / "docs" / "deploy.md").read_text(), re.DOTALL)
    shown = yaml.safe_load(block)["spec"]
    found = pod(objects("--daemonset"))["spec"]
    agent, (trainer,) = containers(found)[AGENT], shown["containers"]
    assert {name: env(trainer)[name] for name in ("COMMWATCH_DIR", "COMMWATCH_GROUP")}.items() <= env(agent).items()
    assert shown["securityContext"]["supplementalGroups"] == [agent["securityContext"]["runAsGroup"]]
    places = {each["name"]: each["hostPath"]["path"] for each in found["volumes"] if "hostPath" in each}
    assert {each["name"]: each["hostPath"]["path"] for each in shown["volumes"]}.items() <= places.items()
    mounts = {each["name"]: each["mountPath"] for each in trainer["volumeMounts"]}
    assert mounts == {"run": env(trainer)["COMMWATCH_DIR"], "probe": env(trainer)["PYTHONPATH"]}
    assert containers(found)["prepare"]["command"][-1].endswith(f"probe install {mounts['probe']}")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """A place for folders of a host, as the kubelet makes them."""
    for name in ("run", "state", "probe"):
        (tmp_path / name).mkdir(mode=0o755)
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_folders_of_a_node(host: Path) -> None:
    """With the rights that it has, and twice, the DaemonSet's first container makes of root's folders what agent and trainers need."""
    needs(os.geteuid() == 0 and shutil.which("setpriv"), "root and setpriv")
    found = pod(objects("--daemonset", "--user", str(NOBODY), "--group", "64646"))["spec"]
    prepare = containers(found)["prepare"]
    script = prepare["command"][-1]
    for path, name in (("/run/commwatch", "run"), ("/var/lib/commwatch", "state"), ("/opt/commwatch", "probe")):
        assert path in [mount["mountPath"] for mount in prepare["volumeMounts"]]
        script = script.replace(path, shlex.quote(str(host / name)))
    rights = ",".join(f"+{right.lower()}" for right in prepare["securityContext"]["capabilities"]["add"])
    confined = ["setpriv", "--no-new-privs", "--bounding-set", f"-all,{rights}", "--inh-caps", "-all"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for _ in range(2):
        done = subprocess.run(
            [*confined, "sh", "-c", script], env=clean_env(PATH=path), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    run, state = (host / "run").stat(), (host / "state").stat()
    assert (stat.S_IMODE(run.st_mode), run.st_uid, run.st_gid) == (0o2770, 0, 64646)
    assert (stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid) == (0o700, NOBODY, 64646)
    assert (host / "probe" / "commwatch" / "__init__.py").is_file()
