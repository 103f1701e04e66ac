"""The answers of other agents as values, and queries that put them and this agent's own together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, overload

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.job.merging import Heard, Nodes
from commwatch_agent.job.queries import JobQueries, NodePart

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def over_nodes(
    agent: QueryService, heard: Heard | None, kind: Any, part_of: Callable[[Any], NodePart]
) -> tuple[QueryService, Nodes | None]:
    """Return the queries over all nodes that have answered, and which these are; ``heard``: ``None`` for this node alone.

    Args:
        kind: what the other agents were asked for; ``part_of`` returns an answer as a part of the queries.
    """
    if heard is None:
        return agent, None
    found, nodes = read(heard, kind)
    return JobQueries(agent, [part_of(answer) for (answer,) in found]), nodes


@overload
def read(heard: Heard, *kinds: Any) -> tuple[list[list[Any]], Nodes]: ...
@overload
def read(heard: Heard | None, *kinds: Any) -> tuple[list[list[Any]], Nodes | None]: ...
def read(heard: Heard | None, *kinds: Any) -> tuple[list[list[Any]], Nodes | None]:
    """Return the answers of each agent as objects of ``kinds``; agents with other answers count as silent.

    Of nothing heard (``None``: only this agent was asked) it is nothing, and ``None``.
    """
    if heard is None:
        return [], None
    from pydantic import ValidationError

    found, silent = [], dict(heard.silent)
    for url, answers in heard.answers.items():
        try:
            found.append([_adapter(kind).validate_json(text) for kind, text in zip(kinds, answers, strict=True)])
        except ValidationError as error:
            what = error.errors(include_url=False)[0]
            silent[url] = (
                f"does not answer as an agent of this version: {'.'.join(map(str, what['loc']))}: {what['msg']}"
            )
    return found, Nodes(1 + len(found), silent)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # Here, because the process needs pydantic only for these questions.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
