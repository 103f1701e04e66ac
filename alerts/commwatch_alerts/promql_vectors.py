"""Operations of PromQL on vectors: matching two vectors by labels, aggregating one by labels.

Source: prometheus/prometheus v2.42.0, promql/engine.go.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from commwatch_alerts.promql_functions import divide, modulo, power, text_of
from commwatch_alerts.series import NAME, Labels, Vector, labels_of, value_of

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
    "%": modulo,
    "^": power,
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


class EvaluationError(Exception):
    """An expression has no result for the present samples; the message names the labels that cause it."""


@dataclass(frozen=True)
class Matching:
    """How elements of two vectors are matched."""

    #: True: by ``labels`` (``on``). False: by all other labels (``ignoring``).
    on: bool = False
    labels: tuple[str, ...] = ()
    #: The side on which several elements may share a partner: ``left``, ``right``, or neither (empty).
    many: str = ""
    #: Labels that the result copies from the other side.
    include: tuple[str, ...] = ()

    def key(self, labels: Labels) -> Labels:
        """Return the labels that matching elements must have in common."""
        if self.on:
            return tuple(pair for pair in labels if pair[0] in self.labels)
        return tuple(pair for pair in labels if pair[0] not in self.labels and pair[0] != NAME)


def said(labels: Labels) -> str:
    """Return labels in the notation of PromQL."""
    return "{" + ", ".join(f'{name}="{value}"' for name, value in labels) + "}"


def bare(labels: Labels) -> Labels:
    """Return labels without the metric's name."""
    for at, (name, _) in enumerate(labels):
        if name == NAME:
            return labels[:at] + labels[at + 1 :]
    return labels


def collected(elements: Iterable[tuple[Labels, float]]) -> dict[Labels, float]:
    """Return elements as a vector.

    Raises:
        EvaluationError: two elements have equal labels.
    """
    vector: dict[Labels, float] = {}
    for labels, value in elements:
        if labels in vector:
            raise EvaluationError(f"several elements of the result would be {said(labels)}")
        vector[labels] = value
    return vector


# -- two vectors ------------------------------------------------------------------------------


def with_scalar(
    op: str, vector: Vector, scalar: float, *, scalar_left: bool, as_bool: bool = False
) -> dict[Labels, float]:
    """Combine a vector with a number. A comparison keeps the elements where it is true, or gives 0 or 1 (``as_bool``)."""
    pairs = [
        (labels, *((scalar, value) if scalar_left else (value, scalar)), value) for labels, value in vector.items()
    ]
    if op in ARITHMETIC:
        return collected((bare(labels), ARITHMETIC[op](left, right)) for labels, left, right, _ in pairs)
    holds = COMPARISONS[op]
    if as_bool:
        return collected((bare(labels), float(holds(left, right))) for labels, left, right, _ in pairs)
    return {labels: value for labels, left, right, value in pairs if holds(left, right)}


def matched(op: str, left: Vector, right: Vector, how: Matching, *, as_bool: bool = False) -> dict[Labels, float]:
    """Combine two vectors element by element.

    Raises:
        EvaluationError: an element has several partners against the matching, or two results have equal labels.
    """
    if not left or not right:
        return {}
    many, one = (right, left) if how.many == "right" else (left, right)
    partners: dict[Labels, Labels] = {}
    for labels in one:
        key = how.key(labels)
        if key in partners:
            side = "left" if how.many == "right" else "right"
            raise EvaluationError(
                f"many-to-many matching: {said(partners[key])} and {said(labels)} on the {side} are both {said(key)}"
            )
        partners[key] = labels
    result: dict[Labels, float] = {}
    taken: set[Labels] = set()
    for labels, value in many.items():
        key = how.key(labels)
        if key not in partners:
            continue
        pair = (one[partners[key]], value) if how.many == "right" else (value, one[partners[key]])
        number = _of_pair(op, *pair, as_bool=as_bool)
        if number is None:
            continue
        if not how.many and key in taken:
            raise EvaluationError(f"several elements on the left are {said(key)}: group_left is missing")
        taken.add(key)
        made = _made(op, labels, partners[key], how, as_bool=as_bool)
        if made in result:
            raise EvaluationError(f"several elements of the result would be {said(made)}")
        result[made] = number
    return result


def _of_pair(op: str, left: float, right: float, *, as_bool: bool) -> float | None:
    if op in ARITHMETIC:
        return ARITHMETIC[op](left, right)
    holds = COMPARISONS[op](left, right)
    if as_bool:
        return float(holds)
    return left if holds else None


def _made(op: str, many: Labels, one: Labels, how: Matching, *, as_bool: bool) -> Labels:
    """Return the labels of the result of a pair."""
    labels = many
    if not how.many:
        labels = tuple(pair for pair in many if (pair[0] in how.labels) is how.on)
    if op in ARITHMETIC or as_bool:
        labels = bare(labels)
    if how.include:
        return labels_of({**dict(labels), **{name: value_of(one, name) for name in how.include}})
    return labels


def of_sets(op: str, left: Vector, right: Vector, how: Matching) -> dict[Labels, float]:
    """Apply a set operator.

    ``and`` returns the left elements with a partner on the right, ``unless`` those without one, and ``or`` all left elements and the right
    ones without a partner.
    """
    if op == "or":
        there = {how.key(labels) for labels in left}
        added = ((labels, value) for labels, value in right.items() if how.key(labels) not in there)
        return collected([*left.items(), *added])
    there = {how.key(labels) for labels in right}
    return {labels: value for labels, value in left.items() if (how.key(labels) in there) is (op == "and")}


# -- one vector -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grouping:
    """Which labels an aggregation keeps: ``labels`` (``by``), or all others (``without``)."""

    by: bool = True
    labels: tuple[str, ...] = ()

    def key(self, labels: Labels) -> Labels:
        """Return the labels of an element's group."""
        if self.by:
            return tuple(pair for pair in labels if pair[0] in self.labels)
        return tuple(pair for pair in labels if pair[0] not in self.labels and pair[0] != NAME)


def grouped(vector: Vector, how: Grouping) -> dict[Labels, list[tuple[Labels, float]]]:
    """Return the elements of each group, by the group's labels."""
    groups: dict[Labels, list[tuple[Labels, float]]] = {}
    for labels, value in vector.items():
        groups.setdefault(how.key(labels), []).append((labels, value))
    return groups


def ranked(op: str, count: float, vector: Vector, how: Grouping) -> dict[Labels, float]:
    """Return the ``count`` largest (``topk``) or smallest (``bottomk``) elements per group; NaNs last, ties by labels.

    Raises:
        EvaluationError: ``count`` is NaN or too large.
    """
    if math.isnan(count) or abs(count) >= 1 << 63:
        raise EvaluationError(f"{op}: {text_of(count)} is not a number of elements")
    sign = -1 if op == "topk" else 1

    def order(element: tuple[Labels, float]) -> tuple[bool, float, Labels]:
        labels, value = element
        return math.isnan(value), 0.0 if math.isnan(value) else sign * value, labels

    groups = grouped(vector, how).values()
    return dict(element for group in groups for element in sorted(group, key=order)[: max(0, int(count))])


def counted(label: str, vector: Vector, how: Grouping) -> dict[Labels, float]:
    """Return how many elements of each group have each value, which becomes the label ``label`` (``count_values``)."""
    with_value = Grouping(how.by, (*how.labels, label) if how.by else how.labels)
    found: dict[Labels, float] = {}
    for labels, value in vector.items():
        key = with_value.key(labels_of({**dict(labels), label: text_of(value)}))
        found[key] = found.get(key, 0.0) + 1
    return found
