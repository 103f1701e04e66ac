"""The settings of the agents in the Helm chart: every one can be set, what is rendered is what an agent accepts, and wrong values are refused by name."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from commwatch_agent.cli.command_line import _parser
from commwatch_agent.cli.common_flags import flags_of
from commwatch_agent.cli.settings import check
from commwatch_agent.config import SETTINGS, Config
from commwatch_agent.config_sources import load
from commwatch_agent.deploy.chart import OF_THE_CHART
from commwatch_agent.notify.alert_rules import catalogue
from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import RUNBOOK_URL, prometheus_rule
from tests.agent.deploy.kubernetes_schema import strictly_valid
from tests.agent.deploy.kubernetes_tools import Tools, by_name
from tests.agent.web.test_tls import authority

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECRETS = "/etc/commwatch-secrets"
#: Every setting that the values can have.
EVERYTHING: dict[str, Any] = {
    "host": "0.0.0.0", "require_token": False, "require_token_for_metrics": True, "allowed_hosts": [".example.org"], "insecure": True,
    "tls_client_ca": f"{SECRETS}/files/ca.crt", "ca_file": f"{SECRETS}/files/ca.crt", "client_cert": f"{SECRETS}/files/client.pem",
    "peers": ["dns+agents:9477", "node1"], "discover_peers": False, "interval": 1, "raw_bytes": 536870912, "summary_bytes": 1099511627776,
    "profile_every": 100, "keep_days": 0.5, "keep_ended": 60, "gpus": "off", "inspector_dir": "/dumps", "ras": "localhost:28028",
    "log_format": "json", "log_level": "debug", "job_info": ["node"],
    "links": {"*": "nvlink4", 'data "parallel"': "8 x ib-ndr"},
    "receivers": [
        {"kind": "slack", "url_file": f"{SECRETS}/slack/url"},
        {"kind": "alertmanager", "urls": ["http://am-0:9093", "http://am-1:9093"], "username": "watch", "password_env": "AM_PASSWORD"},
        {"kind": "webhook", "name": "chat", "url": "http://chat/hook?a=1&b=<2>", "repeat": "30m", "send_resolved": False},
    ],
    "thresholds": {"comm_share": 0.4, "hang_seconds": 20} , "kinds": {"hang": {"for": "1m", "severity": "warning"}, "straggler": {"enabled": False}},
    "labels": {"cluster": "east", "team": "é \\ \"x\""}, "otlp_endpoint": "https://otlp.example.com", "otlp_interval": 60, "otlp_logs": False,
    **{f"otlp_{name}": f"{SECRETS}/files/{file}" for name, file in (("headers_file", "headers"), ("ca_file", "ca.crt"), ("client_cert", "client.pem"))},
}  # fmt: skip
TLS: dict[str, dict[str, Any]] = {
    "": {}, "secret": {"tls": {"existingSecret": "cert"}}, "cert-manager": {"tls": {"issuer": {"name": "ca", "kind": "ClusterIssuer"}}}
}  # fmt: skip
TOKEN: dict[str, dict[str, Any]] = {"": {}, "token": {"token": {"existingSecret": "agents"}}}
#: Modes and networks, each with the settings that another test of this mode does not have.
PLACES: dict[str, dict[str, Any]] = {
    "daemonset": {"settings": {"keep_days": 30, "thresholds": {"comm_share": 0.4}}},
    "sidecar": {"mode": "sidecar", "history": {"size": "10Gi"}, "settings": {"receivers": EVERYTHING["receivers"]}, "secrets": ["slack"]},
    "sidecar, its claim": {"mode": "sidecar", "history": {"existingClaim": "runs"}},
    "host network": {"hostNetwork": True, "extraArgs": ["--quiet"]},
}  # fmt: skip


@pytest.fixture
def kube(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the Secrets of these tests have in the agent's container."""
    root = tmp_path_factory.mktemp("container")
    ours = authority(tmp_path_factory.mktemp("ours"), "ours")
    cert, key = ours.signed("agent", "DNS:localhost")
    files = {
        "etc/commwatch-token/token": "0123456789abcdef", "etc/commwatch-tls/tls.crt": cert.read_text(), "etc/commwatch-tls/tls.key": key.read_text(),
        "etc/commwatch-tls/ca.crt": ours.cert.read_text(), "etc/commwatch-secrets/files/ca.crt": ours.cert.read_text(),
        "etc/commwatch-secrets/files/client.pem": cert.read_text() + key.read_text(), "etc/commwatch-secrets/files/headers": "A: b\n",
        "etc/commwatch-secrets/otlp/headers": "A: b\n",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o640)
    return root


def agent_of(made: dict[tuple[str, str], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's specification and the agent's container."""
    ((_, workload),) = ((kind, each) for (kind, _), each in made.items() if kind in ("DaemonSet", "Job"))
    spec = workload["spec"]["template"]["spec"]
    (agent,) = (each for each in (*spec["initContainers"], *spec["containers"]) if each["name"] == "commwatch")
    return spec, agent


def accepted(made: dict[tuple[str, str], dict[str, Any]], root: Path) -> Config:
    """The settings of an agent with the command, the variables and the ConfigMap of a release, as `commwatch config check` accepts them."""

    def inside(text: str) -> str:
        return text.replace("/etc/commwatch-", f"{root}/etc/commwatch-")

    spec, agent = agent_of(made)
    mounted = {each["name"]: each["mountPath"] for each in agent["volumeMounts"]}
    assert {each["name"] for each in spec["volumes"]} >= set(mounted)
    for each in spec["volumes"]:
        if "configMap" in each:
            place = Path(inside(mounted[each["name"]]))
            place.mkdir(exist_ok=True)
            for name, text in made["ConfigMap", each["configMap"]["name"]]["data"].items():
                (place / name).write_text(inside(text))
    env = {each["name"]: inside(each.get("value", "node-1")) for each in agent["env"]}
    arguments = _parser().parse_args(agent["args"])
    config = load(env, arguments.config, **flags_of(arguments))
    check(config, env)
    return config


@pytest.mark.parametrize(("place", "tls", "token"), [*product(PLACES, TLS, TOKEN)])
def test_agents_accept_what_is_rendered(kube: Tools, container: Path, place: str, tls: str, token: str) -> None:
    """Over modes, networks, TLS and tokens: Helm finds nothing wrong, Kubernetes takes the objects, and the agent its settings."""
    values = {**PLACES[place], **TLS[tls], **TOKEN[token]}
    if place == "host network" and not tls:
        values["settings"] = {"host": "127.0.0.1"}
    elif token:
        values["settings"] = {
            **values.get("settings", {}),
            "peers": ["dns+agents:9477"],
            "require_token_for_metrics": True,
        }
    done = kube.helm("lint", values, "--strict")
    assert done.returncode == 0, done.stdout
    made = by_name(kube.rendered(values))
    strictly_valid(made.values())
    config = accepted(made, container)
    for key, value in values.get("settings", {}).items():
        if key != "receivers":
            assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value)
    assert [each.kind for each in config.receivers] == [
        each["kind"] for each in values.get("settings", {}).get("receivers", [])
    ]
    assert (config.tls_cert is not None, config.token_file is not None) == (bool(tls), bool(token))
    assert config.require_token
    spec, agent = agent_of(made)
    assert (spec.get("securityContext", {}).get("fsGroup") == agent["securityContext"]["runAsGroup"]) >= bool(
        tls or token
    )
    assert ("Certificate" in {kind for kind, _ in made}) == (tls == "cert-manager")
    # Nothing but the node itself reaches a plaintext port on the node's address.
    assert not spec.get("hostNetwork") or config.tls_cert is not None or config.host == "127.0.0.1"
    asked = agent["livenessProbe"]["httpGet"]
    assert asked == {"port": "metrics", "path": "/healthz", **({"scheme": "HTTPS"} if tls else {}),
                     **({"host": "127.0.0.1"} if config.host == "127.0.0.1" else {})}  # fmt: skip
    monitors = [each["spec"] for (kind, _), each in made.items() if kind in ("PodMonitor", "ServiceMonitor")]
    assert bool(monitors) == (config.host != "127.0.0.1")
    for monitor in monitors:
        ((endpoint,),) = (value for key, value in monitor.items() if key.lower().endswith("endpoints"))
        assert endpoint.get("scheme", "http") == ("https" if tls else "http")
        secret = "cert" if tls == "secret" else "commwatch-tls"
        ca = {"serverName": "commwatch.ml.svc", "ca": {"secret": {"name": secret, "key": "ca.crt"}}}
        assert endpoint.get("tlsConfig") == (ca if tls else None)
        credentials = {"credentials": {"name": "agents", "key": "token"}}
        assert endpoint.get("authorization") == (credentials if config.require_token_for_metrics else None)


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_every_setting(kube: Tools, container: Path, mode: str) -> None:
    """Every setting that no other value determines can be set, and reaches the agent unchanged."""
    assert {*EVERYTHING, *OF_THE_CHART} == set(SETTINGS)
    values = {"mode": mode, "settings": EVERYTHING, "secrets": ["files", "slack"], **TLS["secret"], **TOKEN["token"]}
    made = by_name(kube.rendered(values))
    strictly_valid(made.values())
    text = made["ConfigMap", "commwatch-settings"]["data"]["commwatch.toml"]
    assert tomllib.loads(text) == EVERYTHING
    config = accepted(made, container)
    assert {key for key in EVERYTHING if getattr(config, key) == SETTINGS[key].default} == {"require_token"}
    # The kubelet has no certificate of a client.
    assert agent_of(made)[1]["livenessProbe"]["tcpSocket"] == {"port": "metrics"}


@pytest.mark.parametrize(
    "settings",
    [
        {"thresholds": {"comm_share": 0.425, "hang_seconds": 20, "bus_bandwidth_floor": 1e12, "exposed_share": 0}},
        {"kinds": {"straggler": {"enabled": False}, "hang": {"for": "1m"}, "slow_link": {"severity": "info"}}},
        {"kinds": {"stalled": {"severity": "warning"}, "comm_bound": {"severity": "info", "for": "20m", "enabled": True}}},
    ],
)  # fmt: skip
def test_rules_have_the_settings(kube: Tools, container: Path, settings: dict[str, Any]) -> None:
    """The PrometheusRule of the chart has the thresholds and kinds of the settings, exactly as the command makes it with them."""
    made = by_name(kube.rendered({"settings": settings}))
    of_settings, shipped_ones = (
        prometheus_rule(each, RUNBOOK_URL, "commwatch", None, None)["spec"]
        for each in (catalogue(accepted(made, container)), read(shipped("rules.yaml")))
    )
    assert made["PrometheusRule", "commwatch"]["spec"] == of_settings != shipped_ones


def test_changed_settings_restart_the_agents(kube: Tools) -> None:
    """The pods of a DaemonSet differ if the settings do, so that Kubernetes replaces them."""
    first, second = (
        by_name(kube.rendered({"settings": {"keep_days": days}}))["DaemonSet", "commwatch"]["spec"]["template"]
        for days in (1, 2)
    )
    assert first.pop("metadata") != second.pop("metadata")
    assert first == second


def test_certificate(kube: Tools) -> None:
    """Cert-manager makes the Secret that the pods have, for the name that Prometheus asks for."""
    values = {"tls": {"issuer": {"name": "ca"}, "dnsNames": ["*.gpu.example.com"]}}
    made = by_name(kube.rendered(values))
    spec = made["Certificate", "commwatch-tls"]["spec"]
    assert spec["issuerRef"] == {"group": "cert-manager.io", "kind": "Issuer", "name": "ca"}
    assert {"commwatch.ml.svc", "localhost", "*.gpu.example.com"} <= {*spec["dnsNames"]}
    (volume,) = (each["secret"] for each in agent_of(made)[0]["volumes"] if each["name"] == "tls")
    assert volume["secretName"] == spec["secretName"] == "commwatch-tls"
    monitor = made["ServiceMonitor", "commwatch"]["spec"]["endpoints"][0]
    assert monitor["tlsConfig"]["serverName"] in spec["dnsNames"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"settings": {"keep_day": 1}}, "keep_day"), ({"settings": {"keep_days": 0}}, "keep_days"), ({"settings": {"keep_days": "7"}}, "keep_days"),
        ({"settings": {"port": 1}}, "port"), ({"settings": {"tls_cert": "/c"}}, "tls_cert"), ({"settings": {"raw_bytes": 1.5e9 + 0.5}}, "raw_bytes"),
        ({"settings": {"gpus": "some"}}, "gpus"), ({"settings": {"insecure": "yes"}}, "insecure"), ({"settings": {"peers": "node1"}}, "peers"),
        ({"settings": {"thresholds": {"comm_share": "much"}}}, "comm_share"),
        ({"settings": {"thresholds": {"comm_shar": 0.4}}}, "comm_shar"), ({"settings": {"thresholds": {"comm_share": 4}}}, "comm_share"),
        ({"settings": {"kinds": {"hangs": {"enabled": False}}}}, "hangs"), ({"settings": {"labels": {"1st": "x"}}}, "1st"),
        ({"settings": {"labels": {"__a": "x"}}}, "__a"), ({"settings": {"kinds": {"hang": {"after": "1m"}}}}, "after"),
        ({"settings": {"kinds": {"hang": {"for": "soon"}}}}, "for"), ({"settings": {"kinds": {"hang": {"severity": "page"}}}}, "severity"),
        ({"settings": {"receivers": [{"kind": "pager"}]}}, "kind"), ({"settings": {"receivers": [{"url": "http://a"}]}}, "kind"),
        ({"settings": {"receivers": [{"kind": "slack", "url": "https://a"}]}}, "url"),
        ({"settings": {"receivers": [{"kind": "alertmanager", "username": "a", "password_env": "P"}]}}, "urls"),
        ({"settings": {"receivers": [{"kind": "webhook", "url": "http://a", "tokn_file": "/t"}]}}, "tokn_file"),
        ({"settings": {"labels": {"job": "x"}}}, "job"), ({"settings": {"labels": {"host": "x"}}}, "host"),
        ({"settings": {"labels": {"team": "a\nb"}}}, "team"),
        ({"settings": {"links": {"*": "nvlink9"}}}, "links"), ({"settings": {"links": {"dp": "0 x ib-ndr"}}}, "dp"),
        ({"settings": {"otlp_endpoint": "foo"}}, "otlp_endpoint"), ({"settings": {"otlp_endpoint": "http://a/v1/metrics"}}, "otlp_endpoint"),
        ({"settings": {"otlp_endpoint": "http://a:b@c"}}, "otlp_endpoint"), ({"settings": {"ras": "localhost"}}, "ras"),
        ({"settings": {"receivers": [{"kind": "webhook", "url": "notaurl"}]}}, "url"),
        ({"settings": {"receivers": [{"kind": "webhook", "url": "http://u:p@a/"}]}}, "url"),
        ({"settings": {"receivers": [{"kind": "alertmanager", "urls": ["am:9093"]}]}}, "urls"),
        ({"settings": {"receivers": [{"kind": "webhook", "url": "http://a", "repeat": "59s"}]}}, "repeat"),
        ({"settings": {"host": None}}, "host"), ({"settings": {"peers": ["node1"]}}, "existingSecret"),
        ({"tls": {"existingSecret": "a", "issuer": {"name": "b"}}}, "existingSecret"), ({"tls": {"issuer": {"kind": "CA"}}}, "kind"),
        ({"tls": {"secret": "a"}}, "secret"), ({"secrets": ["A_B"]}, "secrets"), ({"extraArgs": "--quiet"}, "extraArgs"),
        ({"hostNetwork": True}, "hostNetwork: everybody who reaches the node could listen"),
        ({"settings": {"host": "127.0.0.1"}}, "settings.host: the kubelet and Prometheus do not reach"),
        ({"settings": {"require_token_for_metrics": True}}, "settings.require_token_for_metrics: Prometheus needs the agents' token"),
        ({"settings": {"thresholds": {"comm_share": 0.6}}}, "settings.thresholds: comm_share (0.6) must not be above comm_share_critical (0.5)"),
        ({"settings": {"thresholds": {"stalled_page_seconds": 30}}}, "settings.thresholds: stalled_seconds (60) must not be above stalled_page_seconds (30)"),
        ({"settings": {"thresholds": {"link_used": 0}}}, "settings.thresholds: link_floor (0.1) must not be above link_used (0)"),
        ({"settings": {"receivers": [{"kind": "slack", "url_env": "A"}, {"kind": "webhook", "name": "slack", "url": "http://a"}]}},
         "settings.receivers: two have the name slack"),
        ({"settings": {"receivers": [{"kind": "slack", "url_env": "A"}, {"kind": "slack", "url_env": "B"}]}}, "settings.receivers: two have the name slack"),
        ({"settings": {"tls_client_ca": "/ca"}}, "settings.tls_client_ca: needs TLS"),
        ({"settings": {"insecure": False}}, "settings.insecure: without TLS"),
        *(({"settings": {f"otlp_{key}": "/f"}}, f"settings.otlp_{key}: needs otlp_endpoint") for key in ("headers_file", "ca_file", "client_cert")),
    ],
)  # fmt: skip
def test_refused(kube: Tools, values: dict[str, Any], named: str) -> None:
    """A wrong value is refused by its name, before anything is installed."""
    done = kube.helm("template", values, "commwatch")
    assert (done.returncode, done.stdout) == (1, "")
    assert named in done.stderr, done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"labels": {"job_name": "x", "team": "é, 'x' \u2713"}, "ras": "a:1, [::1]:28029", "otlp_endpoint": "HTTP://[::1]:4318/base/"},
        {"links": {"*": " nvlink4 ", "dp": "12 x ib-ndr", "tp": "8x nvlink5"}, "otlp_endpoint": "https://a/v1/metrics/x#f"},
        {"receivers": [{"kind": "webhook", "url": "https://a.example:8443?x=a@b", "repeat": "60s"}, {"kind": "webhook", "name": "b", "url": "http://[fe80::1]/x"}]},
    ],
)  # fmt: skip
def test_unusual_values(kube: Tools, container: Path, settings: dict[str, Any]) -> None:
    """The schema accepts unusual values that the agent accepts."""
    config = accepted(by_name(kube.rendered({"settings": settings})), container)
    assert all(getattr(config, key) != SETTINGS[key].default for key in settings)


@pytest.mark.parametrize("document", ["metrics.md", "deploy.md"])
def test_documented_values(kube: Tools, container: Path, document: str) -> None:
    """Values that the documents show are such that an agent accepts, and each of their settings arrives."""
    text = (Path(__file__).parents[3] / "docs" / document).read_text(encoding="utf-8")
    values = yaml.safe_load(text.rpartition("```yaml\n")[2].partition("```")[0])
    config = accepted(by_name(kube.rendered(values)), container)
    assert values["settings"]
    assert all(getattr(config, key) != SETTINGS[key].default for key in values["settings"])
