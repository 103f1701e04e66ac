"""The shipped dashboards as files for Grafana: plain JSON, ConfigMaps for its sidecar, or a folder for its provisioning. Pure.

Does not import the builders, because these need a development dependency.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from commwatch_alerts.export import RUNBOOK_URL, dumped

NAMES = ("cluster", "job", "node")
#: Label by which the sidecar of Grafana's Helm chart finds ConfigMaps.
LABEL = {"grafana_dashboard": "1"}
#: Name of the folder in Grafana.
FOLDER = "commwatch"


def shipped(name: str, runbook_url: str = RUNBOOK_URL) -> str:
    """Return the JSON text of a dashboard, one of ``NAMES``.

    Args:
        runbook_url: target of the dashboard's link to the runbook.
    """
    text = resources.files("commwatch_dashboards").joinpath(f"{name}.json").read_text(encoding="utf-8")
    return text.replace(json.dumps(RUNBOOK_URL), json.dumps(runbook_url))


def plain(runbook_url: str) -> dict[str, str]:
    """Return the dashboards' JSON by file name, to import by hand or over Grafana's API."""
    return {f"commwatch-{name}.json": shipped(name, runbook_url) for name in NAMES}


def configmaps(runbook_url: str, namespace: str | None = None) -> dict[str, str]:
    """Return the ConfigMaps of ``configmap_objects`` as YAML, by file name."""
    objects = configmap_objects(runbook_url, namespace)
    return {f"{file.removesuffix('.json')}.yaml": dumped(whole) for whole in objects for file in whole["data"]}


def configmap_objects(runbook_url: str, namespace: str | None = None) -> list[dict[str, Any]]:
    """Return a ConfigMap for each dashboard, for the sidecar of Grafana's Helm chart.

    Args:
        namespace: namespace of the ConfigMaps; ``None``: the namespace that they are applied in.
    """
    made = []
    for file, text in plain(runbook_url).items():
        metadata: dict[str, Any] = {"name": f"{file.removesuffix('.json')}-dashboard", "labels": dict(LABEL)}
        if namespace is not None:
            metadata["namespace"] = namespace
        made.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {file: text}})
    return made


def provisioning(runbook_url: str, directory: str) -> dict[str, str]:
    """Return the dashboards and a provider for Grafana's ``provisioning/dashboards``, by file name.

    Args:
        directory: absolute path of the folder from which Grafana will read the files.
    """
    provider = {
        "name": "commwatch",
        "folder": FOLDER,
        "type": "file",
        "options": {"path": f"{directory}/{FOLDER}"},
    }
    files = {f"{FOLDER}/{file}": text for file, text in plain(runbook_url).items()}
    return {"commwatch.yaml": dumped({"apiVersion": 1, "providers": [provider]}), **files}
