"""All places of the product that reach files: without the gate, with the reason; and through it, with the trust that they name."""

from __future__ import annotations

#: Part of the installed package, or a process of it.
OURS = "ours"
#: In a folder that this user made for itself, or chose for the state: the run directory's own files, history, cache.
STATE = "state"
#: Named by the user on the command line, for this one command.
TYPED = "typed"
#: ``/proc``, ``/sys``, a terminal or the null device.
KERNEL = "kernel"
#: A descriptor that the gate has opened, or a library whose content the gate has read.
OPENED = "opened"
#: A temporary folder or file of this process.
SCRATCH = "scratch"
#: A library or module that the dynamic loader or Python finds, as for any program of this user.
SYSTEM = "system"
#: A program that the user, the settings or the system name; the settings come through the gate.
PROGRAM = "program"
#: An address: of the settings, of an announcement that is believed, or of a rank, which gets no token.
NETWORK = "network"
#: Bytes in memory.
MEMORY = "memory"
#: A folder that this process has just made.
MADE = "made"
#: The writer's own ring under a name that no other process uses, in a folder that was checked; nothing is opened through a name.
RING = "ring"

#: By file: by call, the reason of each.
DIRECT: dict[str, dict[str, list[str]]] = {
    "agent/alerting/bundles.py": {
        "fdopen": [OPENED],
        "glob": [STATE],
        "rename": [STATE],
        "unlink": [STATE, STATE, STATE],
    },
    "agent/analysis/flight_recorder_analysis.py": {"open": [OPENED]},
    "agent/api/watching.py": {"Popen": [OURS]},
    "agent/cli/command_line.py": {"open": [KERNEL, KERNEL]},
    "agent/cli/deploy.py": {"chmod": [TYPED]},
    "agent/cli/manifests/prometheus.py": {"read_bytes": [TYPED]},
    "agent/commands/bench.py": {"bind": [NETWORK], "open": [TYPED], "read_text": [TYPED, TYPED], "unlink": [SCRATCH]},
    "agent/commands/doctor.py": {"bind": [NETWORK]},
    "agent/commands/explain.py": {"glob": [TYPED, TYPED], "open": [TYPED]},
    "agent/commands/gpu_proof.py": {
        "NamedTemporaryFile": [SCRATCH],
        "TemporaryDirectory": [SCRATCH],
        "glob": [SCRATCH],
        "open": [SCRATCH],
        "read_bytes": [SCRATCH],
        "run": [PROGRAM],
        "write_text": [SCRATCH],
    },
    "agent/commands/gpu_proof_rows.py": {"run": [PROGRAM]},
    "agent/commands/native_hook.py": {"Popen": [OURS], "open": [TYPED], "run": [OURS]},
    "agent/commands/nccl_debug.py": {"read_text": [KERNEL], "rmdir": [STATE, STATE]},
    "agent/commands/output_filter.py": {"CDLL": [SYSTEM], "listdir": [STATE]},
    "agent/commands/progress.py": {"open": [KERNEL]},
    "agent/commands/run.py": {"Popen": [PROGRAM, PROGRAM], "open": [KERNEL], "rmtree": [STATE], "unlink": [STATE]},
    "agent/daemon.py": {"unlink": [STATE]},
    "agent/deploy/chart.py": {"write_text": [TYPED]},
    "agent/deploy/hooks_wheel.py": {
        "TemporaryDirectory": [TYPED],
        "glob": [TYPED],
        "read_bytes": [TYPED, TYPED, TYPED],
        "run": [PROGRAM, PROGRAM, PROGRAM],
        "run_path": [TYPED],
        "unlink": [TYPED],
        "write_text": [TYPED],
    },
    "agent/deploy/probe_bundle.py": {
        "chmod": [TYPED, TYPED, TYPED],
        "glob": [OURS],
        "mkdtemp": [TYPED],
        "mkstemp": [TYPED],
        "open": [TYPED],
        "read_bytes": [TYPED, TYPED, TYPED],
        "read_text": [TYPED, TYPED, TYPED],
        "rename": [TYPED, TYPED],
        "rglob": [OURS],
        "rmtree": [TYPED],
        "unlink": [TYPED],
        "walk": [TYPED],
        "write_bytes": [TYPED],
    },
    "agent/deploy/prometheus.py": {"read_text": [OURS]},
    "agent/deploy/templates.py": {"read_text": [OURS]},
    "agent/history/examination.py": {"connect": [STATE], "touch": [STATE]},
    "agent/history/opening.py": {"connect": [STATE, STATE], "open": [STATE]},
    "agent/history/sharing.py": {"unlink": [STATE]},
    "agent/history/soundness.py": {"rename": [STATE], "unlink": [STATE]},
    "agent/history/store.py": {"touch": [STATE]},
    "agent/history/wal.py": {"open": [STATE, STATE]},
    "agent/reference/links.py": {"read_text": [OURS]},
    "agent/reference/references.py": {"link": [STATE], "scandir": [STATE], "unlink": [STATE], "write_text": [STATE]},
    "agent/report/profile_trace.py": {"open": [STATE, STATE]},
    "agent/report/table_export.py": {"replace": [TYPED], "unlink": [TYPED]},
    "agent/runtime/client_tls.py": {"create_default_context": [OPENED], "load_cert_chain": [OPENED]},
    "agent/runtime/memory.py": {"CDLL": [OURS]},
    "agent/runtime/run_lock.py": {"chmod": [STATE], "unlink": [STATE]},
    "agent/runtime/sighup.py": {"open": [KERNEL]},
    "agent/runtime/whole_files.py": {"open": [TYPED, TYPED], "replace": [TYPED], "unlink": [TYPED]},
    "agent/server/history_worker.py": {"Popen": [OURS]},
    "agent/server/history_worker_process.py": {"write_text": [KERNEL]},
    "agent/server/job_timelines.py": {"GzipFile": [MEMORY]},
    "agent/server/listener.py": {"bind": [NETWORK, NETWORK]},
    "agent/server/tls.py": {"load_cert_chain": [OPENED], "load_verify_locations": [OPENED]},
    "agent/watchers/inspector.py": {"open": [OPENED]},
    "agent/watchers/nccl.py": {"rmdir": [STATE]},
    "agent/watchers/profiles.py": {
        "glob": [STATE, STATE, STATE, STATE],
        "replace": [STATE],
        "rmtree": [STATE, STATE],
        "write_bytes": [STATE],
    },
    "agent/watchers/stack_capture.py": {
        "TemporaryFile": [SCRATCH],
        "open": [KERNEL, KERNEL, KERNEL, KERNEL],
        "run": [PROGRAM],
    },
    "agent/watchers/trace_files.py": {
        "open": [OPENED, OPENED],
        "replace": [STATE],
        "run": [OURS],
        "unlink": [STATE],
        "write_text": [STATE],
    },
    "agent/watchers/trace_overlap.py": {"write_text": [STATE]},
    "collectors/nccl/ras.py": {"create_connection": [NETWORK]},
    "collectors/nccl_plugin/trial.py": {"CDLL": [OURS]},
    "collectors/node/gpu_nvidia.py": {"CDLL": [SYSTEM]},
    "collectors/probe/native/build.py": {
        "TemporaryDirectory": [SCRATCH, SCRATCH],
        "chmod": [STATE, STATE],
        "iterdir": [STATE],
        "read_bytes": [STATE],
        "read_text": [STATE],
        "rename": [STATE, STATE],
        "rmtree": [STATE],
        "run": [PROGRAM, PROGRAM],
        "unlink": [STATE],
        "write_text": [STATE, STATE],
    },
    "collectors/probe/native/library.py": {
        "CDLL": [OPENED],
        "iterdir": [OURS],
        "read_text": [OURS],
        "run_path": [SYSTEM],
    },
    "collectors/probe/torch_peers.py": {"connect": [NETWORK]},
    "collectors/probe/torch_profile.py": {
        "TemporaryDirectory": [SCRATCH],
        "copyfileobj": [SCRATCH, SCRATCH],
        "open": [SCRATCH, SCRATCH, SCRATCH, SCRATCH, SCRATCH],
        "rename": [SCRATCH],
    },
    "collectors/probe/torch_proof.py": {"write_bytes": [SCRATCH]},
    "collectors/probe/torch_python.py": {"unlink": [RING, RING]},
    "collectors/probe/torch_sweep.py": {"open": [SCRATCH], "write_text": [SCRATCH]},
    "collectors/probe/torch_timing.py": {"CDLL": [SYSTEM, SYSTEM]},
    "collectors/wire/descriptor.py": {"CDLL": [SYSTEM]},
    "collectors/wire/files.py": {"open": [KERNEL], "scandir": [KERNEL]},
    "collectors/wire/identity.py": {"chmod": [MADE], "chown": [MADE]},
    "collectors/wire/mapping.py": {"CDLL": [SYSTEM], "open": [RING], "unlink": [RING]},
    "collectors/wire/ring.py": {"rename": [RING, RING], "unlink": [RING, RING, RING, RING]},
    "collectors/wire/ring_reader.py": {"open": [OPENED]},
    "alerts/catalogue.py": {"read_text": [OURS]},
    "alerts/kept.py": {"fdopen": [OPENED], "replace": [STATE, STATE], "unlink": [STATE]},
    "alerts/receivers/command.py": {"Popen": [PROGRAM], "TemporaryFile": [SCRATCH]},
    "alerts/receivers/http.py": {"connect": [NETWORK], "create_default_context": [NETWORK]},
    "alerts/receivers/mail.py": {"connect": [NETWORK], "create_default_context": [NETWORK, NETWORK]},
    "dashboards/build.py": {"write_text": [TYPED]},
    "dashboards/export.py": {"read_text": [OURS]},
}

#: By file: the calls of the gate with their trust; folders and new files are checked one by one, or belong to this process.
GATE: dict[str, list[str]] = {
    "agent/alerting/alert_rules.py": ["read(operator)"],
    "agent/alerting/bundles.py": ["create()", "folder()", "open_file(own)", "read(own)"],
    "agent/alerting/marks.py": ["folder()", "read(ANYBODY)"],
    "agent/analysis/flight_recorder_analysis.py": ["open_file(trust)"],
    "agent/commands/output_filter.py": ["open_file(own)", "open_file(own)"],
    "agent/commands/run.py": ["create()", "folder()"],
    "agent/config.py": ["read(operator)"],
    "agent/history/job_exit.py": ["KeptFolder()", "read(trainers)", "write()"],
    "agent/history/opening.py": ["lock_file()", "look(ANYBODY)"],
    "agent/history/sharing.py": ["lock_file()"],
    "agent/ingest/intake.py": ["folder()"],
    "agent/ingest/rings/finding.py": ["KeptFolder()"],
    "agent/otlp/endpoint.py": ["read(operator)"],
    "agent/reference/references.py": ["read(ANYBODY)"],
    "agent/runtime/agents.py": ["read(operator)"],
    "agent/runtime/client.py": ["folder()"],
    "agent/runtime/client_tls.py": ["open_file(operator)"],
    "agent/runtime/run_lock.py": ["lock_file()", "lock_file()"],
    "agent/runtime/tokens.py": ["look(replace(trust, strict=False))", "read(trust)", "write()"],
    "agent/watchers/inspector.py": ["folder()", "open_file(trust)"],
    "agent/watchers/log_requests.py": ["folder()", "read(trainers)", "write()"],
    "agent/watchers/nccl.py": ["folder(own)", "folder(own)", "look(ANYBODY)"],
    "agent/watchers/nccl_archive.py": ["read(ANYBODY)", "write()"],
    "agent/watchers/profiles.py": ["folder()", "folder()", "folder()", "read(ANYBODY)", "read(own)"],
    "agent/watchers/stack_capture.py": ["look(self._trust)", "look(self._trust)", "open_file(self._trust)"],
    "agent/watchers/trace_files.py": ["folder()", "open_file(trainers)", "read(trainers)"],
    "collectors/nccl/follow.py": ["look(trust)", "open_file(trust)"],
    "collectors/nccl/matching.py": ["folder(ANYBODY)", "folder(ANYBODY)"],
    "collectors/probe/native/build.py": ["lock_file()"],
    "collectors/probe/native/library.py": ["read(operator)"],
    "collectors/probe/torch_profile.py": ["folder()", "make()"],
    "collectors/wire/announcement.py": [
        "folder()",
        "look(ANYBODY)",
        "look(operator)",
        "open_file(trust)",
        "read(trust)",
        "write()",
    ],
    "collectors/wire/identity.py": ["open_file(own)"],
    "collectors/wire/mapping.py": ["make()"],
    "collectors/wire/nccl_debug_file.py": ["read(ANYBODY)"],
    "collectors/wire/profile_files.py": ["read(trust)", "write()"],
    "collectors/wire/ring_reader.py": [
        "open_file(trainers)",
        "open_file(user(self.uid))",
        "open_file(user(self.uid))",
    ],
    "alerts/kept.py": ["create()", "read(own)", "read(read(self._path, _MOST_BYTES, own()).decode)"],
    "alerts/receivers/sending.py": ["read(operator)"],
}

#: Libraries that the native code loads by name, as the dynamic loader does for any program.
NATIVE: dict[str, list[str]] = {
    "collectors/nccl_plugin/chain.h": ["dlopen", "dlopen", "dlopen"],
    "collectors/nccl_plugin/plugin.c": ["dlopen"],
    "collectors/probe/native/nccl_plugin.h": ["dlopen"],
    "collectors/probe/native/runtime.h": ["dlopen", "dlopen"],
}
