"""The part of PromQL that rules may use, evaluated over samples in memory, with the results of Prometheus 2.42.

An expression is compiled once into functions; compilation refuses unsupported parts and names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import promql_parser as ql

from commwatch_alerts.model import OneLineError
from commwatch_alerts.promql_functions import AGGREGATIONS, INSTANT_FUNCTIONS, RANGE_FUNCTIONS, quantile
from commwatch_alerts.promql_vectors import (
    ARITHMETIC,
    COMPARISONS,
    EvaluationError,
    Grouping,
    Matching,
    bare,
    collected,
    counted,
    grouped,
    matched,
    of_sets,
    ranked,
    with_scalar,
)
from commwatch_alerts.series import EQUAL, LIKE, NAME, NOT_EQUAL, UNLIKE, Matcher, Need, Samples, Vector, labels_of

__all__ = ["EvaluationError", "Expression", "Moment", "UnsupportedExpression"]

_SETS = ("and", "or", "unless")
_CARDINALITY = {"ManyToOne": "left", "OneToMany": "right"}
_MATCHERS = {"Equal": EQUAL, "NotEqual": NOT_EQUAL, "Re": LIKE, "NotRe": UNLIKE}
_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class UnsupportedExpression(OneLineError):
    """An expression that the agent cannot evaluate; the message names the unsupported part."""


@dataclass(frozen=True)
class Moment:
    """The time and the samples of an evaluation."""

    samples: Samples
    #: Monotonic seconds, on the clock of the samples.
    at_s: float
    #: Unix time in seconds, the result of ``time()``.
    wall_s: float


@dataclass(frozen=True)
class _Scalar:
    run: Callable[[Moment], float]


@dataclass(frozen=True)
class _Elements:
    run: Callable[[Moment], Vector]


_Node: TypeAlias = _Scalar | _Elements


class Expression:
    """A PromQL expression, ready to be evaluated.

    Attributes:
        text: the PromQL.
        needs: the metrics and ranges that it reads.

    Raises:
        UnsupportedExpression: not PromQL, or with an unsupported part.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ql.parse(text)
        except ValueError as error:
            raise UnsupportedExpression(f"not PromQL: {error}") from None
        compiler = _Compiler()
        self._node = compiler.node(tree)
        self.needs: tuple[Need, ...] = tuple(compiler.needs)

    def evaluate(self, moment: Moment) -> Vector:
        """Return the elements of the result; a scalar result is one element without labels.

        Raises:
            EvaluationError: an error in Prometheus, too, such as many-to-many matching.
        """
        if isinstance(self._node, _Elements):
            return self._node.run(moment)
        return {(): self._node.run(moment)}


class _Compiler:
    """Compiles a syntax tree to functions, and collects the needs of its selectors."""

    def __init__(self) -> None:
        self.needs: list[Need] = []

    def node(self, tree: ql.Expr) -> _Node:
        """Return the function of a syntax node."""
        made: _Node
        match tree:
            case ql.NumberLiteral():
                value = tree.val
                made = _Scalar(lambda moment: value)
            case ql.ParenExpr():
                made = self.node(tree.expr)
            case ql.UnaryExpr():
                made = _negated(self.node(tree.expr))
            case ql.VectorSelector():
                names, others = self._selected(tree, 0.0)
                made = _Elements(lambda moment: moment.samples.instant(moment.at_s, names, others))
            case ql.BinaryExpr():
                made = self._binary(tree)
            case ql.AggregateExpr():
                made = self._aggregate(tree)
            case ql.Call():
                made = self._call(tree)
            case _:
                what = {"MatrixSelector": "a range outside of a function", "SubqueryExpr": "a subquery"}
                kind = type(tree).__name__
                raise UnsupportedExpression(f"{what.get(kind, kind)} is not supported: {_format_expr(tree)}")
        return made

    def _vector(self, tree: ql.Expr) -> Callable[[Moment], Vector]:
        node = self.node(tree)
        if isinstance(node, _Scalar):
            raise UnsupportedExpression(f"a number where a vector is needed: {_format_expr(tree)}")
        return node.run

    def _number(self, tree: ql.Expr) -> Callable[[Moment], float]:
        node = self.node(tree)
        if isinstance(node, _Elements):
            raise UnsupportedExpression(f"a vector where a number is needed: {_format_expr(tree)}")
        return node.run

    # -- selectors ----------------------------------------------------------------------------

    def _selected(self, tree: ql.VectorSelector, range_s: float) -> tuple[tuple[Matcher, ...], tuple[Matcher, ...]]:
        """Return the matchers of the name, and those of other labels."""
        for what, there in (
            ("offset", tree.offset),
            ("@", tree.at),
            ("or between matchers", tree.matchers.or_matchers),
        ):
            if there:
                raise UnsupportedExpression(f"{what} is not supported: {_format_expr(tree)}")
        matchers = [_matcher(one) for one in tree.matchers.matchers]
        names = tuple(one for one in matchers if one.name == NAME)
        if tree.name is not None:
            names = (Matcher(NAME, EQUAL, tree.name), *names)
        self.needs.append(Need(names, range_s))
        return names, tuple(one for one in matchers if one.name != NAME)

    def _ranged(self, name: str, tree: ql.Expr) -> _Elements:
        tree = _without_parentheses(tree)
        if not isinstance(tree, ql.MatrixSelector):
            raise UnsupportedExpression(f"{name} of a subquery is not supported: {_format_expr(tree)}")
        range_s = tree.range.total_seconds()
        names, others = self._selected(tree.vector_selector, range_s)
        function = RANGE_FUNCTIONS[name]
        # Only last_over_time keeps the metric name, because its results are samples of the series.
        label = (lambda labels: labels) if name == "last_over_time" else bare

        def run(moment: Moment) -> Vector:
            at_ms = round(moment.at_s * 1000)
            windows = moment.samples.range(moment.at_s, range_s, names, others)
            found = ((labels, function(window, at_ms, range_s)) for labels, window in windows.items())
            return collected((label(labels), value) for labels, value in found if value is not None)

        return _Elements(run)

    # -- operators ----------------------------------------------------------------------------

    def _binary(self, tree: ql.BinaryExpr) -> _Node:
        op, left, right = str(tree.op), self.node(tree.lhs), self.node(tree.rhs)
        if op not in (*ARITHMETIC, *COMPARISONS, *_SETS):
            raise UnsupportedExpression(f"the operator {op} is not supported: {_format_expr(tree)}")
        how, as_bool = _matching(tree)
        if isinstance(left, _Elements) and isinstance(right, _Elements):
            one, other = left.run, right.run
            if op in _SETS:
                return _Elements(lambda moment: of_sets(op, one(moment), other(moment), how))
            return _Elements(lambda moment: matched(op, one(moment), other(moment), how, as_bool=as_bool))
        if isinstance(left, _Scalar) and isinstance(right, _Scalar):
            return _of_numbers(op, left.run, right.run)
        if op in _SETS:
            raise UnsupportedExpression(f"{op} with a number: {_format_expr(tree)}")
        if isinstance(left, _Elements) and isinstance(right, _Scalar):
            vector, number = left.run, right.run
            return _Elements(
                lambda moment: with_scalar(op, vector(moment), number(moment), scalar_left=False, as_bool=as_bool)
            )
        assert isinstance(left, _Scalar)
        assert isinstance(right, _Elements)
        scalar, elements = left.run, right.run
        return _Elements(
            lambda moment: with_scalar(op, elements(moment), scalar(moment), scalar_left=True, as_bool=as_bool)
        )

    def _aggregate(self, tree: ql.AggregateExpr) -> _Elements:
        op, vector = str(tree.op), self._vector(tree.expr)
        how = Grouping()
        if tree.modifier is not None:
            how = Grouping(tree.modifier.type == ql.AggModifierType.By, tuple(tree.modifier.labels))
        if op == "count_values":
            label = tree.param.val if isinstance(tree.param, ql.StringLiteral) else ""
            if not _LABEL.fullmatch(label):
                raise UnsupportedExpression(f"count_values: '{label}' is not a label name")
            return _Elements(lambda moment: counted(label, vector(moment), how))
        if op in ("topk", "bottomk", "quantile"):
            assert isinstance(tree.param, ql.Expr)
            number = self._number(tree.param)
            if op == "quantile":
                return _Elements(lambda moment: _quantiles(number(moment), vector(moment), how))
            return _Elements(lambda moment: ranked(op, number(moment), vector(moment), how))
        if op not in AGGREGATIONS:
            raise UnsupportedExpression(f"the aggregation {op} is not supported: {_format_expr(tree)}")
        function = AGGREGATIONS[op]

        def run(moment: Moment) -> Vector:
            groups = grouped(vector(moment), how)
            return {labels: function([value for _, value in group]) for labels, group in groups.items()}

        return _Elements(run)

    # -- functions ----------------------------------------------------------------------------

    def _call(self, tree: ql.Call) -> _Node:
        name, arguments = tree.func.name, tree.args
        if name in RANGE_FUNCTIONS:
            return self._ranged(name, arguments[0])
        if name in INSTANT_FUNCTIONS:
            return self._mapped(INSTANT_FUNCTIONS[name], arguments)
        made: _Node
        match name:
            case "time":
                made = _Scalar(lambda moment: moment.wall_s)
            case "scalar":
                vector = self._vector(arguments[0])
                made = _Scalar(lambda moment: _only(vector(moment)))
            case "vector":
                number = self._number(arguments[0])
                made = _Elements(lambda moment: {(): number(moment)})
            case "absent":
                vector, labels = self._vector(arguments[0]), _absent_labels(arguments[0])
                made = _Elements(lambda moment: {} if vector(moment) else {labels: 1.0})
            case _:
                raise UnsupportedExpression(f"the function {name} is not supported: {_format_expr(tree)}")
        return made

    def _mapped(self, function: Callable[[float, float], float], arguments: list[ql.Expr]) -> _Elements:
        vector = self._vector(arguments[0])
        number = self._number(arguments[1]) if len(arguments) > 1 else (lambda moment: 1.0)

        def run(moment: Moment) -> Vector:
            second = number(moment)
            return collected((bare(labels), function(value, second)) for labels, value in vector(moment).items())

        return _Elements(run)


def _format_expr(tree: ql.Expr) -> str:
    """Return an expression as text on one line."""
    return " ".join(tree.prettify().split())


def _without_parentheses(tree: ql.Expr) -> ql.Expr:
    while isinstance(tree, ql.ParenExpr):
        tree = tree.expr
    return tree


def _matcher(given: ql.Matcher) -> Matcher:
    kind = _MATCHERS[str(given.op).rpartition(".")[2]]
    try:
        if "[:" in given.value and kind in (LIKE, UNLIKE):
            raise UnsupportedExpression(f"classes of characters by name are not supported: {given}")
        return Matcher(given.name, kind, given.value)
    except re.error as error:
        raise UnsupportedExpression(f"the regular expression {given} is not supported: {error}") from None


def _matching(tree: ql.BinaryExpr) -> tuple[Matching, bool]:
    """Return how a binary operator matches elements, and whether it has the ``bool`` modifier."""
    given = tree.modifier
    if given is None:
        return Matching(), False
    fill = given.fill_values
    if fill is not None and (fill.lhs is not None or fill.rhs is not None):
        raise UnsupportedExpression(f"fill is not supported: {_format_expr(tree)}")
    on = given.matching is not None and given.matching.type == ql.LabelModifierType.Include
    labels = () if given.matching is None else tuple(given.matching.labels)
    many = _CARDINALITY.get(str(given.card).rpartition(".")[2], "")
    return Matching(on, labels, many, tuple(given.group_labels or ())), given.return_bool


def _negated(node: _Node) -> _Node:
    if isinstance(node, _Scalar):
        number = node.run
        return _Scalar(lambda moment: -number(moment))
    vector = node.run
    return _Elements(lambda moment: collected((bare(labels), -value) for labels, value in vector(moment).items()))


def _of_numbers(op: str, left: Callable[[Moment], float], right: Callable[[Moment], float]) -> _Scalar:
    function = ARITHMETIC.get(op) or COMPARISONS[op]
    return _Scalar(lambda moment: float(function(left(moment), right(moment))))


def _only(vector: Vector) -> float:
    """Return the value of the only element; NaN if there are none or several."""
    return next(iter(vector.values())) if len(vector) == 1 else math.nan


def _quantiles(q: float, vector: Vector, how: Grouping) -> Vector:
    return {labels: quantile(q, [value for _, value in group]) for labels, group in grouped(vector, how).items()}


def _absent_labels(tree: ql.Expr) -> tuple[tuple[str, str], ...]:
    """Return the labels of an ``absent`` result, which Prometheus derives from the ``=`` matchers of its selector."""
    tree = _without_parentheses(tree)
    if not isinstance(tree, ql.VectorSelector):
        return ()
    found: dict[str, str] = {}
    seen: set[str] = set()
    for one in map(_matcher, tree.matchers.matchers):
        if one.name == NAME:
            continue
        if one.kind == EQUAL and one.name not in seen:
            found[one.name] = one.value
            seen.add(one.name)
        else:
            found.pop(one.name, None)
    return labels_of(found)
