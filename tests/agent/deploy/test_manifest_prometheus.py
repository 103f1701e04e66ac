"""``commwatch manifest prometheus``: files that Prometheus and Alertmanager take, and with which Prometheus reads the agents."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import ssl
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from commwatch_alerts import catalogue
from commwatch_alerts.export import prometheus as exported_rules
from tests.agent.web.test_tls import authority
from tests.alerts.promtool import check, promtool
from tests.bare import TREE
from tests.helpers import PATIENCE_S, agent, clean_env, commwatch, needs, wait_for
from tests.prometheus import started

FILES = {"prometheus.yml", "commwatch.rules.yaml", "alertmanager.yml"}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a token, and certificates of an authority: of the agent, and of a client together with its key."""
    place = tmp_path_factory.mktemp("secrets")
    ours = authority(place, "ours")
    ours.signed("node", "DNS:localhost", "IP:127.0.0.1")
    (place / "client").write_text("".join(path.read_text() for path in ours.signed("client")))
    (place / "token").write_text("0123456789abcdef")
    for name in ("client", "token"):
        (place / name).chmod(0o600)
    return place


def written(directory: Path, *flags: str | Path) -> Path:
    """The folder with the files of the command."""
    done = commwatch("manifest", "prometheus", "--out", directory / "out", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return directory / "out"


def job(*flags: str) -> dict[str, Any]:
    """What the printed configuration scrapes."""
    done = commwatch("manifest", "prometheus", "--only", "scrape", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    (made,) = yaml.safe_load(done.stdout)["scrape_configs"]
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("node1", "10.0.0.2:9500", "[::1]:9477", "agents.json", "dns+agents.example.com:9477", "--interval", "5s"),
        ("--kubernetes", "--namespace", "ml", "--node-label", "topology.kubernetes.io/zone=zone", "--interval", "1m"),
        ("https://node1", "dns+agents", "--token-file", "token", "--ca-file", "ours.pem", "--client-cert", "client", "--server-name", "a"),
    ],
)  # fmt: skip
def test_prometheus_and_alertmanager_take_it(tmp_path: Path, secrets: Path, flags: tuple[str, ...]) -> None:
    """Promtool accepts configuration and rules, amtool the routes, however the agents are found."""
    needs(shutil.which("amtool"), "amtool")
    out = written(
        tmp_path, *(str(secrets / flag) if flag in ("token", "ours.pem", "client") else flag for flag in flags)
    )
    assert {file.name for file in out.iterdir()} == FILES
    if (
        "--kubernetes" in flags
    ):  # Debian's Prometheus is built without this discovery: the rest is checked, as of other targets
        whole = yaml.safe_load((out / "prometheus.yml").read_text())
        whole["scrape_configs"][0]["static_configs"] = [{"targets": ["node1:9477"]}]
        del whole["scrape_configs"][0]["kubernetes_sd_configs"]
        (out / "prometheus.yml").write_text(yaml.safe_dump(whole))
    done = promtool("check", "config", "--lint=all", "--lint-fatal", out / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout
    check(out / "commwatch.rules.yaml")
    accepted = subprocess.run(["amtool", "check-config", out / "alertmanager.yml"], capture_output=True, check=False)
    assert accepted.returncode == 0, accepted.stderr


def test_reads_an_agent_with_tls_and_token(tmp_path: Path, secrets: Path) -> None:
    """With the printed files Prometheus reads an agent that requires TLS, a client certificate and its token, and evaluates the rules."""
    names = {"tls_cert": "node.crt", "tls_key": "node.key", "tls_client_ca": "ours.pem", "ca_file": "ours.pem"}
    names |= {"client_cert": "client", "token_file": "token"}
    lines = [f"{name} = {json.dumps(str(secrets / file))}" for name, file in names.items()]
    lines.append("require_token_for_metrics = true")
    (tmp_path / "agent.toml").write_text("\n".join(lines))
    context = ssl.create_default_context(cafile=secrets / "ours.pem")
    context.load_cert_chain(secrets / "client")

    def ask(url: str) -> tuple[bytes, str]:
        with urllib.request.urlopen(url, context=context, timeout=PATIENCE_S) as response:
            return response.read(), response.headers["Content-Type"]

    with agent(tmp_path / "run", "--config", str(tmp_path / "agent.toml"), fetch=ask) as running:
        port = running.url.rpartition(":")[2]
        (tmp_path / "agents.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"]}]))
        flags = (
            "--token-file",
            secrets / "token",
            "--ca-file",
            secrets / "ours.pem",
            "--client-cert",
            secrets / "client",
        )
        out = written(tmp_path, f"localhost:{port}", tmp_path / "agents.json", "--interval", "1s", *flags)
        with started(tmp_path, out / "prometheus.yml") as prometheus:
            wait_for(lambda: prometheus.value('sum(up{job="commwatch"})') == 2, "two targets", PATIENCE_S)
            assert prometheus.value("count(commwatch_build_info)") == 2
            (group,) = prometheus.get("rules")["groups"]
            assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}


def test_kinds_of_agents() -> None:
    """Addresses, files and names are found as Prometheus does it; without a port the agents have ours."""
    made = job("node1", "node2:9500", "/etc/agents.json", "dns+agents:9501", "dns+more")
    assert made["static_configs"] == [{"targets": ["node1:9477", "node2:9500"]}]
    assert made["file_sd_configs"] == [{"files": ["/etc/agents.json"]}]
    assert made["dns_sd_configs"] == [
        {"names": [name], "type": "A", "port": port} for name, port in (("agents", 9501), ("more", 9477))
    ]
    assert "scheme" not in made
    assert job("--port", "9001")["static_configs"] == [{"targets": ["localhost:9001"]}]
    assert [job(*flags)["job_name"] for flags in ((), ("--per-job",))] == ["commwatch", "commwatch-per-job"]


def test_each_target_once() -> None:
    """An agent that is named twice, also with our port and without, is one target."""
    made = job("node1", "node1:9477", "agents.json", "agents.json", "dns+more", "dns+more:9477")
    assert made["static_configs"] == [{"targets": ["node1:9477"]}]
    assert made["file_sd_configs"] == [{"files": ["agents.json"]}]
    assert made["dns_sd_configs"] == [{"names": ["more"], "type": "A", "port": 9477}]


def test_of_the_agents_settings(tmp_path: Path) -> None:
    """With the settings of an agent, Prometheus uses TLS if the agent does, and sends a token only if metrics or the user ask for one."""
    file = tmp_path / "agent.toml"
    file.write_text('token_file = "/etc/token"\n')
    settings = ("--config", str(file))
    assert not {"authorization", "scheme"} & job(*settings).keys()
    assert job(*settings, "--token-file", "/t")["authorization"] == {"credentials_file": "/t"}
    file.write_text('token_file = "/etc/token"\nrequire_token_for_metrics = true\ntls_cert = "/c"\ntls_key = "/k"\n')
    made = job(*settings, "node1")
    assert (made["authorization"], made["scheme"]) == ({"credentials_file": "/etc/token"}, "https")
    assert "scheme" not in job(*settings, "http://node1")
    file.write_text("require_token_for_metrics = true\n")
    done = commwatch("manifest", "prometheus", *settings)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "require_token_for_metrics is true and there is no token_file" in done.stderr


def test_kubernetes() -> None:
    """Running pods are found by the label, the port and the node's labels that the manifest for Kubernetes has."""
    made = job("--kubernetes", "--node-label", "topology.kubernetes.io/zone=zone")
    assert made["kubernetes_sd_configs"] == [{"role": "pod", "attach_metadata": {"node": True}}]
    keep, *named = made["relabel_configs"]
    assert (keep["action"], keep["regex"]) == ("keep", "commwatch;metrics;Running")
    assert [each.removeprefix("__meta_kubernetes_pod_") for each in keep["source_labels"]] == [
        "label_app_kubernetes_io_name", "container_port_name", "phase",
    ]  # fmt: skip
    done = commwatch("manifest", "k8s", "--node-label", "topology.kubernetes.io/zone=zone")
    (monitor,) = (each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    of_prometheus = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    assert named == [
        {of_prometheus.get(key, key): value for key, value in each.items()} for each in endpoint["relabelings"]
    ]


@pytest.mark.parametrize(
    ("controller", "instance"), [("DaemonSet", "gpu-7"), ("Job", "ml/train-0"), ("", "ml/train-0")]
)
def test_instance_has_a_name(controller: str, instance: str) -> None:
    """On Kubernetes, `instance` is a name that an alert can show: the node of a DaemonSet's agent, else the pod with its namespace."""
    discovered = {"namespace": "ml", "pod_name": "train-0", "pod_node_name": "gpu-7", "pod_controller_kind": controller}
    labels = {f"__meta_kubernetes_{name}": value for name, value in discovered.items()} | {"__address__": "10.0.0.1:1"}
    for rule in job("--kubernetes")["relabel_configs"][1:]:
        joined = rule.get("separator", ";").join(labels.get(name, "") for name in rule["source_labels"])
        if found := re.fullmatch(rule.get("regex", "(.*)"), joined):
            labels[rule["target_label"]] = found[1]
    assert (labels["instance"], labels["node"]) == (instance, "gpu-7")


def test_prints_all() -> None:
    """Without a folder the command prints the three files with their names; the rules have the thresholds of the settings."""
    done = commwatch("manifest", "prometheus", env=clean_env(COMMWATCH_THRESHOLD_COMM_SHARE="0.4321"))
    parts = done.stdout.split("---\n")
    assert [part.splitlines()[0] for part in parts] == [
        f"# {name}" for name in ("prometheus.yml", "commwatch.rules.yaml", "alertmanager.yml")
    ]
    assert "0.4321" in parts[1]
    printed = commwatch("manifest", "prometheus", "--only", "rules", "--runbook-url", "https://example.com/r").stdout
    rules = catalogue.read(catalogue.shipped("rules.yaml"))
    assert printed.partition("\n")[2] == exported_rules(rules, "https://example.com/r")


@pytest.mark.parametrize(
    ("agents", "runbook"),
    [
        (["dns+agents.example.com:9477", "node1", "node2"], "http://node1:9477/runbook#"),
        (["https://node1:9478"], "https://node1:9478/runbook#"),
        (["/etc/agents.json"], "http://localhost:9477/runbook#"),
    ],
)
def test_runbook(agents: list[str], runbook: str) -> None:
    """Alerts link to the runbook of the first agent that is named, which people can reach, and not to one of Prometheus' host."""
    printed = commwatch("manifest", "prometheus", "--only", "rules", *agents).stdout
    urls = set(re.findall(r"runbook_url: *(\S+#)", printed))
    assert urls == {runbook}


def test_edited_files(tmp_path: Path) -> None:
    """A file that the user has edited is replaced only on request, and then as a whole."""
    made = written(tmp_path, "node1")
    edited = made / "alertmanager.yml"
    generated = edited.read_text()
    edited.write_text("receivers: []\n")
    done = commwatch("manifest", "prometheus", "--out", made, "node1", "node2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert all(name in done.stderr for name in ("alertmanager.yml", "prometheus.yml", "--force", "--only"))
    assert edited.read_text() == "receivers: []\n"
    assert "node2" not in (made / "prometheus.yml").read_text()
    assert commwatch("manifest", "prometheus", "--out", made, "--force", "node1", "node2").returncode == 0
    assert edited.read_text() == generated
    assert "node2" in (made / "prometheus.yml").read_text()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("node1", "--kubernetes"), "--kubernetes"), (("--namespace", "ml"), "--namespace needs --kubernetes"),
        (("--node-label", "a=b"), "--node-label needs --kubernetes"), (("--kubernetes", "--node-label", "zone"), "--node-label zone"),
        (("--interval", "fast"), "--interval fast"), (("--interval", "0.5s"), "--interval 0.5s"), (("--interval", "0s"), "--interval 0s"),
        (("--alertmanager", "here"), "--alertmanager here"), (("ftp://node1",), "ftp://node1"), (("node 1",), "node 1: needs a host"),
        (("https://node1", "http://node2"), "TLS"),
        (("--server-name", "/a\udcff"), "--server-name '/a�': needs text in UTF-8"),
        (("node\udcff",), "needs text in UTF-8"), (("--out", "/dev/null/x"), "/dev/null/x"),
    ],
)  # fmt: skip
def test_refused(flags: tuple[str, ...], named: str) -> None:
    """A mistake ends in one line that names it."""
    done = commwatch("manifest", "prometheus", *flags)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1 if flags[0] == "--out" else 2, "", 1)
    assert named in done.stderr


def test_documented_commands(tmp_path: Path) -> None:
    """The commands of docs/deploy.md for Prometheus write the files."""
    text = (TREE / "docs" / "deploy.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("commwatch manifest prometheus")]
    assert len(lines) >= 3
    for n, line in enumerate(lines):
        words = shlex.split(line.partition("#")[0])[1:]
        words[words.index("--out") + 1] = str(tmp_path / str(n))
        done = commwatch(*words)
        assert (done.returncode, done.stderr) == (0, ""), line
        assert {file.name for file in (tmp_path / str(n)).iterdir()} == FILES
