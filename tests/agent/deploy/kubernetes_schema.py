"""Checks objects as Kubernetes 1.33 does, in this process: the program of that package reads YAML slowly, and all schemas for each file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from kubernetes_validate import SchemaNotFoundError, ValidationError, validate  # type: ignore[import-untyped]

#: Kinds that only an operator knows, which no schema of Kubernetes has.
CUSTOM = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "Certificate"}


def strictly_valid(objects: Iterable[dict[str, Any]]) -> None:
    """Every object of Kubernetes' own passes its schema, strictly, and those of operators have none."""
    checked = 0
    for each in objects:
        checked += 1
        if each["kind"] in CUSTOM:
            with pytest.raises(SchemaNotFoundError):
                validate(each, "1.33", strict=True)
        else:
            validate(each, "1.33", strict=True)
    assert checked


def is_refused(objects: Iterable[dict[str, Any]]) -> bool:
    """Whether one of them does not."""
    try:
        strictly_valid(objects)
    except ValidationError:
        return True
    return False
