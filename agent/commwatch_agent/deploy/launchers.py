"""The training of ``commwatch manifest k8s`` for launchers other than a Job: its pod in their objects. Pure, except that it reads the templates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent, indent

from commwatch_agent.deploy.templates import template

_PORT = 29500  # of torchrun's rendezvous
_RENDEZVOUS = """\
    # For torchrun: the nodes meet at the first one.
    - {name: PET_NNODES, value: "$nodes"}
    - {name: PET_RDZV_BACKEND, value: c10d}
    - {name: PET_RDZV_ENDPOINT, value: $meeting}
"""


@dataclass(frozen=True)
class Launcher:
    """What differs in the pods of a launcher."""

    #: Label that names the job on all of its pods.
    label: str
    #: Name of the trainer's container.
    container: str = "trainer"
    #: Host name of the first pod, with the job's name as ``{}``; ``None``: the launcher itself configures torchrun.
    first_node: str | None = None


#: By the word for each. A Job is what the template has.
LAUNCHERS = {
    "jobset": Launcher("jobset.sigs.k8s.io/jobset-name", first_node="{}-node-0-0.{}"),
    "trainjob": Launcher("jobset.sigs.k8s.io/jobset-name", container="node"),
    "pytorchjob": Launcher("training.kubeflow.org/job-name", container="pytorch"),
    "volcano": Launcher("volcano.sh/job-name", first_node="{}-node-0.{}"),
}


def meeting(name: str, job_name: str) -> str | None:
    """Return where the nodes of a job meet, as host and port; ``None``: the launcher itself configures torchrun."""
    first = LAUNCHERS[name].first_node
    return first and f"{first.format(job_name, job_name)}:{_PORT}"


def launched(name: str, job: str) -> list[str]:
    """Return the templates of a launcher's objects, with the pod of the template of a Job."""
    launcher = LAUNCHERS[name]
    pod = dedent(job.partition("  template:\n")[2])
    pod = pod.replace("batch.kubernetes.io/job-name", launcher.label)
    pod = pod.replace("- name: trainer\n", f"- name: {launcher.container}\n")
    if launcher.first_node is not None:
        pod = pod.replace("    # The id of the job", f"{_RENDEZVOUS}    # The id of the job")
    whole = re.sub(
        r"^( +)\$pod\n", lambda found: indent(pod, found[1]), template(f"k8s-{name}.yaml"), flags=re.MULTILINE
    )
    return re.split(r"^---\n", whole, flags=re.MULTILINE)
