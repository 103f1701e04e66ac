"""API queries about changes of a job, on this node or on all its nodes; they run in the worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.core.alpha_beta import Curve
from commwatch_agent.nodes.merging import Heard, JobWide
from commwatch_agent.questions.job_questions import read
from commwatch_agent.report.recorded_steps import FEW_PARTS, model_of
from commwatch_agent.report.timeline_export import Window, own_trace
from commwatch_agent.report.timeline_parts import Page, TimelinePart, trace_of
from commwatch_agent.whatif.answers import Study, study
from commwatch_agent.whatif.model import Model
from commwatch_agent.whatif.questions import Question, changes_of


def whatif(
    agent: QueryService, job: str, *, last_s: float | None, question: Question, runs: Sequence[str] = ()
) -> Study:
    """Return a study of a job on this node; ``runs``: other runs of the same training."""
    model, *others = [_own_model(agent, each, last_s) for each in (job, *runs)]
    return study(job, model, changes_of(question, _measured(agent)), dict(zip(runs, others, strict=True)))


def _own_model(agent: QueryService, job: str, last_s: float | None) -> Model:
    with own_trace(agent.path, job, Window(last_s), (), alone=True) as own:
        return model_of([own], _world_size(agent, job), FEW_PARTS)


def job_whatif(agent: QueryService, job: str, *, page: Page, question: Question, heard: Heard) -> JobWide[Study]:
    """Return a study of all nodes of a job; ``page``: the first one of its timeline, as the other agents were asked for it."""
    found, nodes = read(heard, TimelinePart)
    with own_trace(agent.path, job, Window(page.last_s), (), alone=not found) as own:
        model = model_of([own, *(trace_of(part) for (part,) in found)], _world_size(agent, job), FEW_PARTS)
    return JobWide(nodes, study(job, model, changes_of(question, _measured(agent))))


def _measured(agent: QueryService) -> Mapping[str, Curve]:
    return {} if agent.references is None else agent.references.curves()


def _world_size(agent: QueryService, job: str) -> int:
    found = agent.job(job)
    return 0 if found is None else found.world_size


#: Functions by name, as in ``history_queries.QUESTIONS``.
WHATIF_QUESTIONS: Mapping[str, Callable[..., Any]] = {each.__name__: each for each in (whatif, job_whatif)}
