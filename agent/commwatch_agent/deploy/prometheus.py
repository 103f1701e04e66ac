"""The files of ``commwatch manifest prometheus``: what Prometheus scrapes, rules, routes. Pure, except that it reads the sample of routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from commwatch.wire.addresses import DNS, TARGETS, BadAddress, url_of
from commwatch_agent.deploy.kubernetes import relabelings
from commwatch_alerts.catalogue import Catalogue
from commwatch_alerts.export import RUNBOOK_URL, dumped, prometheus

#: The files, by the word for each.
FILES = {"scrape": "prometheus.yml", "rules": "commwatch.rules.yaml", "alertmanager": "alertmanager.yml"}
_HEAD = "# Made by `commwatch manifest prometheus`, for Prometheus 2.42 or later.\n"


@dataclass(frozen=True)
class Scrape:
    """How Prometheus finds and reads the agents."""

    #: The agents, as in the setting ``peers``; empty: pods of Kubernetes.
    agents: Sequence[str]
    interval_s: int
    #: Namespace of the pods; ``None``: all.
    namespace: str | None = None
    #: Labels of the nodes of the pods that the series get, with their names there.
    node_labels: Mapping[str, str] = field(default_factory=dict)
    #: Files on Prometheus' host.
    token_file: str | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    #: Agents named without a scheme use TLS.
    secure: bool = False
    #: The agents run only while a job does; the alert ``AgentDown`` knows their scrape job by its name.
    per_job: bool = False
    #: The name in the agents' certificates; ``None``: the name in each address.
    server_name: str | None = None


def files(scrape: Scrape, alertmanager: str, catalogue: Catalogue, runbook_url: str | None) -> dict[str, str]:
    """Return the text of each of ``FILES``.

    Args:
        alertmanager: host and port of Alertmanager.
        runbook_url: of the runbook; ``None``: the first agent with an address serves it.

    Raises:
        BadAddress: an agent's address is wrong, or some agents use TLS and others do not.
    """
    job = _job(scrape)
    named = [target for each in job.get("static_configs", ()) for target in each["targets"]]
    served = f"{job.get('scheme', 'http')}://{named[0]}/runbook" if named else RUNBOOK_URL
    whole = {
        "global": {"evaluation_interval": f"{scrape.interval_s}s"},
        "rule_files": [FILES["rules"]],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [job],
    }
    sample = resources.files("commwatch_alerts").joinpath("alertmanager.yml").read_text(encoding="utf-8")
    return {
        "scrape": _HEAD + dumped(whole),
        "rules": prometheus(catalogue, runbook_url or served),
        "alertmanager": sample,
    }


def _job(scrape: Scrape) -> dict[str, Any]:
    found, schemes = _found(scrape)
    if len(schemes) > 1:
        raise BadAddress("some agents use TLS and others do not; make a configuration for each kind")
    job: dict[str, Any] = {
        "job_name": "commwatch-per-job" if scrape.per_job else "commwatch",
        "scrape_interval": f"{scrape.interval_s}s",
        "scrape_timeout": f"{min(scrape.interval_s, 10)}s",
    }
    if schemes == {"https"}:
        tls = {
            "ca_file": scrape.ca_file,
            # One file has both.
            "cert_file": scrape.client_cert,
            "key_file": scrape.client_cert,
            "server_name": scrape.server_name,
        }
        job |= {"scheme": "https", "tls_config": {key: value for key, value in tls.items() if value is not None}}
    if scrape.token_file is not None:
        job["authorization"] = {"credentials_file": scrape.token_file}
    return {**job, **found}


def _found(scrape: Scrape) -> tuple[dict[str, Any], set[str]]:
    """Return how the agents are found, and the schemes of their URLs."""
    default = "https" if scrape.secure else "http"
    if not scrape.agents:
        return _pods(scrape), {default}
    targets, target_files, names = [], [], []
    schemes = set()
    for agent in dict.fromkeys(scrape.agents):
        if agent.endswith(TARGETS):
            target_files.append(agent)
            schemes.add(default)
            continue
        try:
            url = urlsplit(url_of(agent.removeprefix(DNS), scrape.secure))
            port = url.port
        except ValueError:
            raise BadAddress(
                f"{agent}: not an agent's address; give HOST, HOST:PORT, or an http or https URL"
            ) from None
        schemes.add(url.scheme)
        if agent.startswith(DNS):
            name = {"names": [url.hostname], "type": "A", "port": port}
            names += [name] if name not in names else []
        else:
            targets.append(url.netloc)
    found = {
        "static_configs": [{"targets": list(dict.fromkeys(targets))}] if targets else [],
        "file_sd_configs": [{"files": target_files}] if target_files else [],
        "dns_sd_configs": names,
    }
    return {key: value for key, value in found.items() if value}, schemes


def _pods(scrape: Scrape) -> dict[str, Any]:
    meta = "__meta_kubernetes_pod_"
    pods: dict[str, Any] = {"role": "pod"}
    if scrape.namespace is not None:
        pods["namespaces"] = {"names": [scrape.namespace]}
    if scrape.node_labels:
        pods["attach_metadata"] = {"node": True}
    marks = ("label_app_kubernetes_io_name", "container_port_name", "phase")
    # The agents of `commwatch manifest k8s`, while they run.
    kept = {"source_labels": [meta + mark for mark in marks], "regex": "commwatch;metrics;Running", "action": "keep"}
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}  # the operator's, and Prometheus' own
    named = [{names.get(key, key): value for key, value in each.items()} for each in relabelings(scrape.node_labels)]
    return {"kubernetes_sd_configs": [pods], "relabel_configs": [kept, *named]}
