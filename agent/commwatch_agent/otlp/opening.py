"""Opens the pushes that the settings ask for; the packages for it may be missing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from socket import gethostname
from typing import TYPE_CHECKING

from commwatch_agent.config import Config
from commwatch_agent.config_checks import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from commwatch_agent.incidents.incident import Incident
    from commwatch_agent.otlp.push import Push


def check(config: Config) -> None:
    """Check what the agent needs for its pushes.

    Raises:
        ConfigError: a package is missing, or a file cannot be used; the text has the remedy.
    """
    if config.otlp_endpoint is None:
        return
    from commwatch_agent.otlp.endpoint import Endpoint

    try:
        import commwatch_agent.otlp.push  # noqa: F401 - only whether it can be imported
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("opentelemetry", "google"):
            raise
        raise ConfigError(
            "otlp_endpoint is set, but the package opentelemetry-proto is not installed; "
            "install commwatch with its extra: commwatch[otlp]"
        ) from None
    Endpoint(config)


def pushes(
    config: Config,
    port: int,
    collect: Callable[[], Iterable[Metric]],
    incidents: Callable[[], Iterable[Incident]],
    stop: threading.Event,
) -> Push | None:
    """Return what the agent pushes; ``None``: nothing. Arguments as for ``Push``, errors as for ``check``.

    Args:
        port: of the agent, for the attribute ``service.instance.id``.
    """
    if config.otlp_endpoint is None:
        return None
    check(config)
    from commwatch_agent.otlp.endpoint import Endpoint
    from commwatch_agent.otlp.push import Push
    from commwatch_agent.otlp.resource import attributes_of

    host = gethostname()
    attributes = attributes_of(os.environ, host, f"{host}:{port}")
    return Push(
        Endpoint(config),
        attributes,
        every_s=config.otlp_interval,
        collect=collect,
        incidents=incidents if config.otlp_logs else None,
        stop=stop,
    )
