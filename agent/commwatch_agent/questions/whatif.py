"""Questions about changes of a job, on this node or on all its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commwatch_agent.analysis.headline import mean_core_wait
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.job.merging import Heard
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.questions.answer import Scoped
from commwatch_agent.questions.heard import read
from commwatch_agent.report.recorded_steps import FEW_PARTS, model_of
from commwatch_agent.report.timeline_export import NodeTrace, Window, own_trace
from commwatch_agent.report.timeline_parts import TimelinePart, trace_of
from commwatch_agent.whatif.answers import Study, study
from commwatch_agent.whatif.model import Model
from commwatch_agent.whatif.questions import Question, changes_of


def whatif(
    agent: QueryService,
    job: str,
    *,
    last_s: float | None,
    question: Question,
    runs: Sequence[str] = (),
    heard: Heard | None = None,
) -> Scoped[Study]:
    """Return a study of the last ``last_s`` s of a job.

    Args:
        runs: other runs of the same training, on this node.
        heard: the first pages of the timelines of the other nodes.
    """
    found, nodes = read(heard, TimelinePart)
    model = _model(agent, job, last_s, [trace_of(part) for (part,) in found])
    others = {each: _model(agent, each, last_s, ()) for each in runs}
    changes, cores = changes_of(question, _measured(agent)), mean_core_wait(agent.ranks(job))
    return Scoped(nodes, study(job, model, changes, others, cores=cores))


def _model(agent: QueryService, job: str, last_s: float | None, others: Sequence[NodeTrace]) -> Model:
    with own_trace(agent.path, job, Window(last_s), (), alone=not others) as own:
        return model_of([own, *others], _world_size(agent, job), FEW_PARTS)


def _measured(agent: QueryService) -> Mapping[str, Curve]:
    return {} if agent.references is None else agent.references.curves()


def _world_size(agent: QueryService, job: str) -> int:
    found = agent.job(job)
    return 0 if found is None else found.world_size
