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


#: Names of labels in their order, and a form for their values.
_Labels = tuple[list[str], str]


def _labels(keys: tuple[str, ...]) -> _Labels:
    order = sorted(keys)
    form = ",".join([f'{key}="%s"' for key in order])
    return order, f"{{{form}}}" if form else ""


def rendered(families: Iterable[Metric], openmetrics: bool) -> bytes:
    """Return families without exemplars, timestamps and units in the text format of Prometheus, or in that of OpenMetrics.

    The bytes are those of the encoders of ``prometheus_client``, which take five times as long: they look at each character of each name
    of each sample. Our names are legal (``metrics.METRICS``).
    """
    lines: list[str] = []
    escaped = _Escaped()
    labels_of: dict[tuple[str, ...], _Labels] = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" and not openmetrics else family.name
        about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        about = about.replace('"', r"\"") if openmetrics else about
        lines.append(f"# HELP {name} {about}\n# TYPE {name} {family.type}\n")
        for sample, labels, value, *_ in family.samples:
            keys = tuple(labels)
            if keys not in labels_of:
                labels_of[keys] = _labels(keys)
            order, form = labels_of[keys]
            lines.append(f"{sample}{form % tuple([escaped[labels[key]] for key in order])} {_number(value)}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _number(value: float) -> str:
    text = repr(float(value))
    if -1e6 < value < 1e6:
        return text
    whole, point, rest = text.partition(".")
    if point and len(whole) > 6 and value > 0:  # as Go writes it
        mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
        return f"{mantissa}e+{len(whole) - 1:02d}"
    return _NOT_FINITE.get(text, text)
