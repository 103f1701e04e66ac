"""The part of the probe that both hooks share: ring, names, step marks, faults."""

from __future__ import annotations

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.process import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from commwatch.probe import torch_nccl_plugin, torch_peers
from commwatch.probe.checks.torch_checks import Checks
from commwatch.probe.frameworks.in_use import Frameworks
from commwatch.probe.governor import budget_of
from commwatch.probe.torch_gpu import Finder
from commwatch.probe.torch_graphs import GraphEvents, GraphHooks
from commwatch.probe.torch_groups import Group, Groups
from commwatch.probe.torch_outside import Outside, Start, launched
from commwatch.probe.torch_profile_requests import Profiles
from commwatch.probe.torch_steps import StepHooks
from commwatch.probe.torch_timing import OFF, Batches, choose, has_runtime, nccl_version
from commwatch.probe.units.torch_units import Units
from commwatch.wire import events as ev
from commwatch.wire import identity, ring, standard_error, variables
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.nccl_debug_file import inspector_dir, output_files, own_file
from commwatch.wire.uncaught import uncaught

_T = TypeVar("_T")
#: Finalisers of ``multiprocessing`` run from high to low: after those of the user, which may still communicate.
_LAST = -1000


class Probe(GraphEvents, ABC):
    """The probe of one trainer process. Its own failures never reach the training."""

    #: Name of the hook in the ring's header, and what makes the ring.
    hook: ClassVar[str]
    makes: ClassVar[type[ring.RingFile]] = ring.RingFile

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        #: Where a relative run directory begins: the trainer may change its own.
        self.home = identity.working_dir()
        self.off = False
        #: The ring from its first operation on; and from ``init_process_group`` on, if that is called and rank and size are known then.
        self.ring: ring.RingFile | None = None
        self.file: ring.RingFile | None = None
        #: How operations on GPUs are timed.
        self.timing = choose(env, runtime=has_runtime(), rocm=torch.version.hip is not None)
        #: Whether NCCL is to load our profiler plugin.
        self.plugin = torch_nccl_plugin.choose(env, nccl_version(), self._plugin_path())
        if self.plugin.asked_for:
            self.timing = self.timing._replace(reason=f"{self.timing.reason}; {self.plugin.reason}")
        #: Share of the time that the probe may take, 0 to 1.
        self.budget = budget_of(env, self.hook)
        at_batch = partial(self._protect, "at a batch")
        self._coalesced = Batches(partial(at_batch, self._begin_batch), partial(at_batch, self._end_batch))
        self._graphs = GraphHooks(self, partial(self._protect, "at a CUDA graph"))
        self.groups = Groups(identity.job_id(env))
        self.outside = Outside(env, lambda: None if self.off else self.file, self._starting)
        #: Called before ``init_process_group`` makes the default group. Returns the probe that records it: another one if that takes over.
        self.on_start: Callable[[int, int], Probe] | None = None
        self.steps = StepHooks(self._mark)
        #: Printed by rank 0 once it records.
        self.remark = ""
        #: Entries of the names file about the logs.
        self._told: list[Mapping[str, object]] = []
        self._making = threading.RLock()  # a signal handler may communicate in the middle of it
        self._dtypes: dict[str, int] = {}
        self._ops: dict[str, int] = dict(ev.OP_CODE)
        self._marks = 0
        self._warned: set[str] = set()
        self._installed = False
        #: Values of the ring's header, once there is a ring.
        self._job, self._rank, self._size = "", -1, 0
        self._profiles = Profiles(self)
        self._frameworks = Frameworks()
        self.checks = Checks(self)
        self.units = Units(self)
        #: Ends the records in a process of ``multiprocessing``, which exits without ``atexit``.
        self._at_exit: Finalize | None = None
        #: Finds out which GPU this process computes on; ``None`` once that is recorded, or cannot be known.
        self._gpu: Finder | None = Finder(env)

    @property
    def place(self) -> tuple[str, int]:
        """The job and the rank of this process, as its ring names them."""
        return self._job, self._rank

    @property
    def run_dir(self) -> Path:
        """The run directory. Launchers may name it after the probe is installed."""
        return self.home / identity.run_dir(self.env)

    # -- life ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the hooks."""
        self._installed = True
        self._put_in()
        if self.timing.mode != OFF:
            self._coalesced.watch()
        if has_runtime():
            self._graphs.watch()
        self.groups.on_default = self._default_changed
        self.groups.on_destroyed = self._group_destroyed
        self.groups.watch()
        self.outside.watch()
        self._frameworks.watch()
        self.checks.watch()
        self.units.watch()
        self.steps.install()
        atexit.register(self._leave)

    def uninstall(self) -> None:
        """Remove the hooks; operations in flight still get their record."""
        if not self._installed:
            return
        self._installed = False
        try:
            self._take_all_out()
        except BaseException:  # of a signal handler
            self._take_all_out()
            raise

    def _take_all_out(self) -> None:
        """Remove all hooks. May be called twice."""
        self.steps.uninstall()
        self.checks.unwatch()
        self._frameworks.unwatch()
        self.units.unwatch()
        self._profiles.end()
        self.groups.unwatch()
        self.outside.unwatch()
        self.on_start = None
        self._coalesced.unwatch()
        self._graphs.unwatch()
        self._take_out()
        if self.ring is None and self.file is not None:  # there was no operation
            self.file.close(time.monotonic_ns())
        atexit.unregister(self._leave)
        if self._at_exit is not None:
            self._at_exit.cancel()

    def _leave(self) -> None:
        """At the end of the process: record the exception that ended it, if any, and close the ring."""
        raised = uncaught()
        if raised is not None and not self.off:
            try:
                start = launched(self.env) if self.file is None else None
                if start is not None:  # it failed before it had come to the other ranks
                    self._reserve(start.rank, start.size, start.meets)
                if self.file is not None:
                    self.file.name(raised)
            except (OSError, ValueError) as error:  # no space: the exception is not recorded
                if raised_by_handler(error):
                    raise
        try:
            if parent_process() is None:  # others leave without ending the interpreter
                self._before_exit()
        finally:
            self.uninstall()

    def _before_exit(self) -> None:
        """Wait for what must not happen after the interpreter has ended."""
        torch_peers.before_exit()

    def _plugin_path(self) -> Path | None:
        """Return NCCL's profiler plugin that this hook can ask; ``None``: there is none."""
        return None

    @abstractmethod
    def _put_in(self) -> None:
        """Hook the operators."""

    @abstractmethod
    def _take_out(self) -> None:
        """Undo ``_put_in``, and close the ring."""

    @abstractmethod
    def successor(self, env: Mapping[str, str]) -> Probe:
        """Return a new probe with this hook, not installed."""

    def abandon(self) -> None:
        """In a forked child: stop recording, because the ring is the parent's. Takes no lock: the parent may have held it."""
        self.off = True
        self.ring = self.file = None
        self._profiles.forget()

    def writes_as(self, rank: int, size: int) -> bool:
        """Return False if the ring has another rank or world size and is still written, else True."""
        return self.off or self.file is None or (self._rank, self._size) == (rank, size)

    def _default_changed(self, there_is_one: bool) -> None:
        """Mark the ring closed when the default group is destroyed (the job has ended well), open when there is a new one."""
        writer = self.file
        if writer is not None and not self.off:
            when_ns = 0 if there_is_one else time.monotonic_ns()
            writer.counters[ring.DESTROYED] = writer.counters[ring.CLOSED] = when_ns

    def _group_destroyed(self, group: Group) -> None:
        """Record that this rank destroys a group, in which others may still wait for it."""
        writer = self.ring
        if writer is None or self.off or group.small_id == ev.NO_GROUP:
            return
        try:
            self.with_probe_locks(partial(writer.name, {"destroyed": group.small_id}))
        except Exception as error:  # no space, or no thread: the rank will seem to do something else
            if raised_by_handler(error):
                raise

    def fault(self, error: BaseException, doing: str) -> None:
        """Handle our own failure: switch off, count it, print it once. Training continues.

        An exception that a signal handler raised during our work is not a failure: it is raised again.
        """
        if raised_by_handler(error):
            try:
                raise error
            finally:
                del error  # or this frame and the error would hold each other, and all that the user's frames hold
        self.off = True
        if self.ring is not None:
            self.ring.counters[ring.DROPPED] += 1
        self.say(f"probe switched off in rank {self.env.get('RANK', '?')}: {doing}: {type(error).__name__}: {error}")

    def say(self, text: str, about: str = "records") -> None:
        """Print one line to standard error, once per topic ``about``."""
        if about not in self._warned:
            self._warned.add(about)
            standard_error.say(f"commwatch: {text}")

    # -- ring ---------------------------------------------------------------------------------

    def _starting(self, start: Start) -> Outside:
        """Make the ring before the default group is made, which may wait for other ranks; return what notes that."""
        probe = self if self.on_start is None else self.on_start(start.rank, start.size)
        if probe.writes_as(start.rank, start.size):
            with probe._making:
                probe._reserve(start.rank, start.size, start.meets)
            probe._default_changed(there_is_one=True)  # a process may make it anew
        return probe.outside

    def open_ring(self, group_rank: int, group_size: int) -> bool:
        """Begin to record at the first operation; return whether there is a ring. Without space or rights, switch off.

        Args:
            group_rank, group_size: this process's rank in the operation's group, and the group's size.
        """
        with self._making:
            if self.ring is None:
                if self.file is None:
                    rank, size = self._place(group_rank, group_size)
                    self._reserve(rank, size, {})
                if self.file is not None and self._begin_ring(self.file):
                    self.steps.watch_engine()
                    self._tell_logs()
                    self._share_with_nodes()
                    self._tell_user()
            return self.ring is not None

    def _reserve(self, rank: int, size: int, meets: Mapping[str, str]) -> None:
        """Make the ring's file, if there is none; ``meets``: where the ranks meet, if known. Without space or rights, switch off."""
        if self.file is not None or self.off or not self._installed:
            return
        about: tuple[Any, ...] = ()
        try:
            about = self._about_ring(rank, size, meets)
            self.file = self.makes(*about)
        except BaseException as error:
            if self.file is None and about:  # a signal handler has raised as the call returned
                about[0].unlink(missing_ok=True)
                about[0].with_suffix(".names").unlink(missing_ok=True)
            if not isinstance(error, OSError) or raised_by_handler(error):
                raise
            self._refused(error)
            return
        self._job, self._rank, self._size = about[1]["job"], rank, size
        self._tell_logs()
        self._watch_exit()

    def _begin_ring(self, made: ring.RingFile) -> bool:
        """Begin to write records to the ring's file; return False if that is refused."""
        try:
            self._profiles.look_for(self._job)
            self._make_ring(made)
        except OSError as error:
            if raised_by_handler(error):
                raise
            self.file = None
            made.close(time.monotonic_ns())  # for a user who may not remove it any more
            made.discard()
            self._refused(error)
            return False
        return True

    def _refused(self, error: OSError) -> None:
        self.off = True
        self.say(f"not recording this run: {error.strerror or error} ({error.filename or self.run_dir})")

    def _place(self, group_rank: int, group_size: int) -> tuple[int, int]:
        """Return rank and size of the world: of the default group, else by the environment, else of the first group that communicates."""
        if dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        rank, size = self.env.get("RANK", ""), self.env.get("WORLD_SIZE", "")
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size)
        return group_rank, group_size

    def _watch_exit(self) -> None:
        """Register for the end of a process of ``multiprocessing``; not earlier, because the registry is emptied when it begins."""
        if parent_process() is not None:
            self._at_exit = Finalize(None, self._leave, exitpriority=_LAST)

    def _about_ring(self, rank: int, size: int, meets: Mapping[str, str]) -> tuple[Any, ...]:
        """Return path, identity, slots and mode of the ring to be made; ``meets``: where the ranks meet, if known."""
        directory = self.run_dir
        identity.make_private_dir(directory, self.env)
        mode = identity.make_private_dir(directory / "rings", self.env)
        who = identity.describe(self.env, rank, size, torch=str(torch.__version__), hook=self.hook)
        try:
            who |= meets or torch_peers.rendezvous()
        except Exception as error:  # any error of torch: the launcher's variables may have it
            if raised_by_handler(error):
                raise
        self.groups.job = who["job"]
        if (nccl := nccl_version()) is not None:
            who["nccl"] = ".".join(map(str, nccl))
        who["timing"], who["budget"] = self.timing._asdict(), self.budget
        path = identity.ring_path(directory / "rings", who["job"], who["restart"], rank)
        return path, who, variables.slots(self.env.get("COMMWATCH_SLOTS", "")) or ring.DEFAULT_SLOTS, mode

    def _tell_user(self) -> None:
        """Print the remarks of rank 0, which hold for all ranks, now that it records."""
        remarks = [
            self.remark,
            self.checks.remark,
            *(f"{wrong}; the default applies" for wrong in variables.wrong({**self.env, "COMMWATCH": ""})),
        ]
        for remark in filter(None, remarks) if self._rank == 0 else ():
            self.say(remark, remark)

    def _tell_logs(self) -> None:
        """Record where NCCL, NCCL Inspector and this process write: before the first group, and what is new before the first operation."""
        try:
            paths = {"nccl_log": own_file(self.env), "inspector": inspector_dir(self.env)}
            found = [{name: path} for name, path in paths.items() if path is not None]
            for entry in [*found, *(() if self._told else output_files(self.env))]:
                if self.file is not None and entry not in self._told:
                    self.file.name(entry)
                    self._told.append(entry)
        except (OSError, ValueError) as error:  # no working directory, or no space: the agent can do without
            if raised_by_handler(error):
                raise

    def _share_with_nodes(self) -> None:
        """Begin to exchange the run's id and the addresses of the nodes' agents, and record them as they become known."""
        writer = self.ring
        if writer is None:
            return
        try:
            torch_peers.share(self.env, self.run_dir, self._job, writer.name)
        except Exception as error:  # any error of torch: the agent can do without
            if raised_by_handler(error):
                raise
            self.say(f"the agents of other nodes remain unknown: {type(error).__name__}: {error}", "peers")

    def tell_gpu(self, current: int | None = None) -> None:
        """Record which GPU this process computes on, once that is known; ``current`` as in ``Finder.find``."""
        if self._gpu is None or self.ring is None:
            return
        try:
            found = self._gpu.find(current)
            if found is not None:
                self.with_probe_locks(partial(self.ring.name, {"gpu": found}))
            if found is not None or self._gpu.over:
                self._gpu = None
        except Exception as error:  # any error of torch: the agent can do without
            if raised_by_handler(error):
                raise
            self._gpu = None
            self.say(f"cannot determine the GPU of this process: {type(error).__name__}: {error}", "gpu")

    def _tell_frameworks(self) -> None:
        """Record which frameworks exchange the gradients, now that a step has ended."""
        try:
            found = self._frameworks.found(self.steps.seen())
            if found is not None and self.ring is not None:
                self.with_probe_locks(partial(self.ring.name, {"frameworks": found}))
        except Exception as error:  # any error of a framework, or no space: advice names the settings of all
            if raised_by_handler(error):
                raise

    @abstractmethod
    def _make_ring(self, made: Any) -> None:
        """Set ``self.ring`` to this file and start what goes with it; may raise ``OSError``."""

    # -- names --------------------------------------------------------------------------------

    def with_probe_locks(self, do: Callable[[], _T]) -> _T:
        """Call, from the trainer's thread, what takes locks of the probe; a signal handler may communicate meanwhile."""
        return do()

    def group_of(self, pg: Any) -> Group:
        """Return the group with its number in the ring; a new group gets a number."""
        with self._making:
            group = self.groups.known.get(id(pg))
            if group is None or group.ref() is not pg:
                group, entry = self.groups.add(pg)
                if entry is not None:
                    group.small_id = self.intern("group", group.small_id, entry, ev.NO_GROUP)
                self.groups.known[id(pg)] = group
            return group

    def foreign_group(self, name: str, description: str, size: int) -> Group:
        """Return a group that is not in ``torch.distributed``: counted under its name, never joined across ranks."""
        with self._making:
            group, entry = self.groups.add_foreign(name, description, size)
            if entry is not None:
                group.small_id = self.intern("group", group.small_id, entry, ev.NO_GROUP)
            return group

    def dtype_code(self, name: str) -> int:
        """Return the number of a dtype in the ring."""
        with self._making:
            if name not in self._dtypes:
                self._dtypes[name] = self.intern("dtype", len(self._dtypes) + 1, {"name": name}, ev.NO_DTYPE)
            return self._dtypes[name]

    def op_code(self, name: str) -> int:
        """Return the number of an operation in the ring."""
        with self._making:
            if name not in self._ops:
                code = min(ev.FIRST_UNKNOWN_OP + len(self._ops) - len(ev.OPS), ev.LAST_UNKNOWN_OP)
                self._ops[name] = self.intern("op", code, {"name": name}, ev.LAST_UNKNOWN_OP)
            return self._ops[name]

    def intern(self, kind: str, code: int, entry: dict[str, Any], otherwise: int) -> int:
        """Write ``entry`` with number ``code`` to the names file, return the number; ``otherwise`` without space."""
        if self.ring is None or code >= otherwise > 0:
            return otherwise
        try:
            self.ring.name({kind: code, **entry})
        except OSError as error:
            if raised_by_handler(error):
                raise
            return otherwise
        return code

    def _protect(self, doing: str, do: Callable[..., None], *args: Any) -> None:
        """Call ``do``, and handle its errors as faults, unless the probe is off."""
        if not self.off:
            try:
                do(*args)
            except Exception as error:
                self.fault(error, doing)

    # -- batches ------------------------------------------------------------------------------

    @abstractmethod
    def _begin_batch(self, pg: Any) -> None:
        """Operations of this group are coalesced from now on."""

    @abstractmethod
    def _end_batch(self, pg: Any, work: Any) -> None:
        """End the batch; ``work``, if there is one, ends all its operations."""

    # -- steps --------------------------------------------------------------------------------

    def _mark(self, optimizer: int, began: int, ended: int, same_pass: bool) -> None:
        """Write a step mark: an optimizer call has ended, or the user marks a step (``optimizer`` -1)."""
        if self.off or self.ring is None:
            self._profiles.end()
            return
        number = self._marks & ring.STAMP_MASK
        try:
            self._write_mark(optimizer, number, began, ended, ev.SAME_PASS if same_pass else 0)
            self._marks += 1
        except Exception as error:
            self.fault(error, "at a step mark")
        if self._gpu is not None:
            self.tell_gpu()
        if self._marks == 1:
            self._tell_frameworks()
        self._profiles.mark(optimizer, number, ended)
        self.units.step(ended)

    @abstractmethod
    def _write_mark(self, optimizer: int, number: int, began: int, ended: int, flags: int) -> None:
        """Write the record of a step mark."""

    def mark_now(self) -> None:
        """Write the user's own step mark."""
        self.steps.explicit(time.monotonic_ns())

    # -- checks -------------------------------------------------------------------------------

    @abstractmethod
    def write_checksum(self, checksum: ev.Checksum) -> None:
        """Write the record of a checksum."""

    @abstractmethod
    def check_collectives(self, every: int, budget: float) -> bool:
        """Check one in ``every`` collectives within this share of the time from now on; return False if this hook cannot do that."""
