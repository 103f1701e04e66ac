"""Renders families as the page of ``/metrics``. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

_NOT_FINITE = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


class _Escaped(dict[str, str]):
    """Label values as text between quotes; each is escaped once."""

    def __missing__(self, value: str) -> str:
        text = self[value] = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        return text


def rendered(families: Iterable[Metric], openmetrics: bool) -> bytes:
    """Return families without exemplars, timestamps and units in the text format of Prometheus, or in that of OpenMetrics.

    The bytes are those of the encoders of ``prometheus_client``, which take five times as long: they look at each character of each name
    of each sample. Our names are legal (``metrics.METRICS``).
    """
    lines: list[str] = []
    escaped = _Escaped()
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" and not openmetrics else family.name
        about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        about = about.replace('"', r"\"") if openmetrics else about
        lines.append(f"# HELP {name} {about}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            labels = ",".join([f'{key}="{escaped[value]}"' for key, value in sorted(sample.labels.items())])
            lines.append(f"{sample.name}{{{labels}}} " if labels else f"{sample.name} ")
            lines.append(f"{_number(sample.value)}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _number(value: float) -> str:
    text = repr(float(value))
    whole, point, rest = text.partition(".")
    if point and len(whole) > 6 and value > 0:  # as Go writes it
        mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
        return f"{mantissa}e+{len(whole) - 1:02d}"
    return _NOT_FINITE.get(text, text)
