"""Check that a list fits the agents: valid PromQL, over metrics and labels that exist. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import promql_parser as promql

from commwatch_alerts.catalogue import Catalogue, CatalogueError
from commwatch_alerts.model import Rule
from commwatch_alerts.text import VALUE, WORDS, fields

#: Labels that a scrape adds; ``instance`` identifies the node.
OF_A_SCRAPE = frozenset({"instance", "job"})
#: Metrics that Prometheus adds for each target.
_OF_PROMETHEUS = {"up": OF_A_SCRAPE}
Labels = frozenset[str]


def check(catalogue: Catalogue, metrics: Mapping[str, Iterable[str]]) -> None:
    """Check every expression and text of the list.

    Args:
        metrics: labels of the agents' metrics, by name of the series.

    Raises:
        CatalogueError: the first fault; names the entry and the key.
    """
    known = {name: frozenset(labels) | OF_A_SCRAPE for name, labels in metrics.items()} | _OF_PROMETHEUS
    for record in catalogue.records:
        known[record.name] = labels(record.expr, known, f"{record.name}: expr")
    for rule in catalogue.alerts:
        _check_alert(rule, known)


def labels(expr: str, known: Mapping[str, Labels], where: str) -> Labels:
    """Return the labels that the series of an expression's result can have.

    Args:
        known: labels by name of series; no other series exist.
        where: the place of the expression, for errors.

    Raises:
        CatalogueError: not PromQL, or a metric or label that does not exist.
    """
    return _Shape(known, where).of(parsed(expr, where))


def parsed(expr: str, where: str) -> promql.Expr:
    """Return the syntax tree of an expression.

    Raises:
        CatalogueError: not PromQL.
    """
    try:
        return promql.parse(expr)
    except ValueError as error:
        raise CatalogueError(f"{where}: not valid PromQL: {error}") from None


def _check_alert(rule: Rule, known: Mapping[str, Labels]) -> None:
    there = labels(rule.expr, known, f"{rule.name}: expr")
    for name, expr in rule.also.items():
        where = f"{rule.name}: also: {name}"
        missing = set(rule.on) - (labels(expr, known, where) & there)
        if missing:
            raise CatalogueError(f"{where}: it and the alert have no common label '{min(missing)}' ('also_on')")
    for key, template in (("summary", rule.summary), ("description", rule.description)):
        for field in sorted(fields(template), key=lambda field: field.name):
            if field.format is None and field.name not in there | WORDS | {VALUE}:
                has = f"it has {', '.join(sorted(there))}" if there else "it has none"
                raise CatalogueError(f"{rule.name}: {key}: the alert has no label '{field.name}'; {has}")


class _Shape:
    """Infers the labels of an expression's result."""

    def __init__(self, known: Mapping[str, Labels], where: str) -> None:
        self._known, self._where = known, where

    def of(self, node: Any) -> Labels:
        """Return the labels of the result of a syntax node."""
        if isinstance(node, (promql.VectorSelector, promql.MatrixSelector)):
            return self._selected(node.vector_selector if isinstance(node, promql.MatrixSelector) else node)
        if isinstance(node, promql.AggregateExpr):
            return self._aggregated(node)
        if isinstance(node, promql.BinaryExpr):
            return self._joined(node)
        if isinstance(node, promql.Call):
            return self._called(node)
        if isinstance(node, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr)):
            return self.of(node.expr)
        return frozenset()

    def _selected(self, node: promql.VectorSelector) -> Labels:
        matchers = node.matchers.matchers
        name = node.name or next((matcher.value for matcher in matchers if matcher.name == "__name__"), "")
        if name not in self._known:
            raise CatalogueError(f"{self._where}: there is no metric '{name}'")
        self._have((matcher.name for matcher in matchers), self._known[name] | {"__name__"}, name)
        return self._known[name]

    def _called(self, node: promql.Call) -> Labels:
        there = [self.of(argument) for argument in node.args]
        return frozenset() if node.func.name in ("scalar", "vector", "time") or not there else there[0]

    def _aggregated(self, node: promql.AggregateExpr) -> Labels:
        there = self.of(node.expr)
        if str(node.op) in ("topk", "bottomk"):
            return there
        kept: Labels = frozenset()
        if node.modifier is not None:
            named = frozenset(node.modifier.labels)
            self._have(named, there | OF_A_SCRAPE, str(node.op))
            kept = named if node.modifier.type == promql.AggModifierType.By else there - named
        return kept | {node.param.val} if str(node.op) == "count_values" and node.param is not None else kept

    def _joined(self, node: promql.BinaryExpr) -> Labels:
        left, right = self.of(node.lhs), self.of(node.rhs)
        scalar = (promql.NumberLiteral, promql.StringLiteral)
        if isinstance(node.lhs, scalar) or isinstance(node.rhs, scalar) or node.modifier is None:
            return left | right
        matching, card = node.modifier.matching, node.modifier.card
        named = None if matching is None else frozenset(matching.labels)
        included = matching is not None and matching.type == promql.LabelModifierType.Include
        if named is not None and included:
            self._have(named, left | OF_A_SCRAPE, f"the left of {node.op}")
            self._have(named, right | OF_A_SCRAPE, f"the right of {node.op}")
        if str(node.op) in ("and", "or", "unless"):
            return left | right if str(node.op) == "or" else left
        more = frozenset(node.modifier.group_labels or ())
        if card == promql.VectorMatchCardinality.ManyToOne:
            return left | more
        if card == promql.VectorMatchCardinality.OneToMany:
            return right | more
        return left if named is None else named if included else left - named

    def _have(self, named: Iterable[str], there: Labels, what: str) -> None:
        for label in named:
            if label not in there:
                raise CatalogueError(f"{self._where}: {what} has no label '{label}'")
