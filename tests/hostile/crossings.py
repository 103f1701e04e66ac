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
    "agent/commwatch_agent/__init__.py": {"read_bytes": [OURS, OURS], "rglob": [OURS, OURS]},
    "agent/commwatch_agent/notify/bundles.py": {
        "fdopen": [OPENED],
        "glob": [STATE],
        "rename": [STATE],
        "unlink": [STATE, STATE, STATE],
    },
    "agent/commwatch_agent/notify/delivery_setup.py": {"connect": [NETWORK]},
    "agent/commwatch_agent/analysis/flight_recorder_analysis.py": {"open": [OPENED]},
    "collectors/commwatch/api/watching.py": {"Popen": [PROGRAM]},
    "agent/commwatch_agent/cli/command_line.py": {"open": [KERNEL, KERNEL]},
    "agent/commwatch_agent/cli/manifests/folder.py": {"read_bytes": [TYPED], "chmod": [TYPED]},
    "agent/commwatch_agent/proof/bench.py": {
        "bind": [NETWORK],
        "open": [TYPED],
        "read_text": [TYPED, TYPED],
        "unlink": [SCRATCH],
    },
    "agent/commwatch_agent/cli/settings.py": {"scandir": [TYPED]},
    "agent/commwatch_agent/commands/doctor.py": {"bind": [NETWORK]},
    "agent/commwatch_agent/commands/explain.py": {"glob": [TYPED]},
    "agent/commwatch_agent/proof/gpu_proof.py": {
        "NamedTemporaryFile": [SCRATCH],
        "TemporaryDirectory": [SCRATCH],
        "glob": [SCRATCH],
        "open": [SCRATCH],
        "read_bytes": [SCRATCH],
        "run": [PROGRAM],
        "write_text": [SCRATCH],
    },
    "agent/commwatch_agent/proof/gpu_proof_rows.py": {"run": [PROGRAM]},
    "agent/commwatch_agent/commands/log_files.py": {"glob": [TYPED], "open": [TYPED], "walk": [TYPED]},
    "agent/commwatch_agent/commands/native_hook.py": {"Popen": [OURS], "open": [TYPED], "run": [OURS]},
    "agent/commwatch_agent/commands/nccl_debug.py": {"read_text": [KERNEL], "rmdir": [STATE, STATE]},
    "agent/commwatch_agent/commands/output_filter.py": {"CDLL": [SYSTEM], "listdir": [STATE]},
    "agent/commwatch_agent/commands/progress.py": {"open": [KERNEL]},
    "agent/commwatch_agent/commands/run.py": {
        "Popen": [PROGRAM, PROGRAM],
        "mkdtemp": [SCRATCH],
        "open": [KERNEL],
        "rmtree": [SCRATCH, STATE],
        "unlink": [STATE],
    },
    "agent/commwatch_agent/model/unpacking.py": {"GzipFile": [OPENED]},
    "agent/commwatch_agent/daemon.py": {"unlink": [STATE]},
    "agent/commwatch_agent/deploy/chart.py": {"read_text": [OURS], "write_text": [TYPED]},
    "agent/commwatch_agent/deploy/hooks_wheel.py": {
        "TemporaryDirectory": [TYPED],
        "glob": [TYPED],
        "read_bytes": [TYPED, TYPED, TYPED],
        "run": [PROGRAM, PROGRAM, PROGRAM],
        "run_path": [TYPED],
        "unlink": [TYPED],
        "write_text": [TYPED],
    },
    # In the folder that was typed, or in the user's cache, which the gate has checked.
    "agent/commwatch_agent/deploy/probe_folder.py": {
        "chmod": [TYPED, TYPED, TYPED],
        "mkdtemp": [TYPED],
        "mkstemp": [TYPED],
        "open": [TYPED],
        "read_bytes": [OURS, TYPED],
        "read_text": [TYPED],
        "rename": [TYPED, TYPED, TYPED],
        "rglob": [OURS, OURS],
        "rmtree": [TYPED, TYPED],
        "symlink_to": [TYPED],
        "unlink": [TYPED, TYPED, TYPED],
        "walk": [TYPED],
        "write_bytes": [TYPED],
    },
    "agent/commwatch_agent/deploy/prometheus.py": {"read_text": [OURS]},
    "agent/commwatch_agent/deploy/templates.py": {"read_text": [OURS]},
    "agent/commwatch_agent/history/examination.py": {"connect": [STATE], "touch": [STATE]},
    "agent/commwatch_agent/history/opening.py": {"connect": [STATE, STATE], "open": [STATE]},
    "agent/commwatch_agent/history/sharing.py": {"unlink": [STATE]},
    "agent/commwatch_agent/history/soundness.py": {"rename": [STATE], "unlink": [STATE]},
    "agent/commwatch_agent/history/store.py": {"touch": [STATE]},
    "agent/commwatch_agent/history/wal.py": {"open": [STATE, STATE]},
    "agent/commwatch_agent/reference/links.py": {"read_text": [OURS]},
    "agent/commwatch_agent/reference/references.py": {
        "link": [STATE],
        "replace": [STATE],
        "scandir": [STATE],
        "unlink": [STATE, STATE],
        "write_text": [STATE, STATE],
    },
    "agent/commwatch_agent/report/profile_trace.py": {"open": [STATE, STATE]},
    "agent/commwatch_agent/report/table_export.py": {"open": [TYPED], "replace": [TYPED], "unlink": [TYPED]},
    "collectors/commwatch/api/client_tls.py": {"create_default_context": [OPENED], "load_cert_chain": [OPENED]},
    "agent/commwatch_agent/runtime/memory.py": {"CDLL": [OURS]},
    "agent/commwatch_agent/runtime/run_lock.py": {"chmod": [STATE], "unlink": [STATE]},
    "agent/commwatch_agent/runtime/sighup.py": {"open": [KERNEL]},
    "agent/commwatch_agent/runtime/whole_files.py": {"open": [TYPED, TYPED], "replace": [TYPED], "unlink": [TYPED]},
    "agent/commwatch_agent/questions/worker.py": {"Popen": [OURS]},
    "agent/commwatch_agent/questions/worker_process.py": {"write_text": [KERNEL]},
    "agent/commwatch_agent/questions/trace_files.py": {"GzipFile": [MEMORY]},
    "agent/commwatch_agent/web/listener.py": {"bind": [NETWORK, NETWORK]},
    "agent/commwatch_agent/web/tls.py": {"load_cert_chain": [OPENED], "load_verify_locations": [OPENED]},
    "agent/commwatch_agent/sources/nccl.py": {"rmdir": [STATE]},
    "agent/commwatch_agent/sources/profiles.py": {
        "glob": [STATE, STATE, STATE, STATE],
        "replace": [STATE],
        "rmtree": [STATE, STATE],
        "write_bytes": [STATE],
    },
    "agent/commwatch_agent/sources/stack_capture.py": {
        "TemporaryFile": [SCRATCH],
        "open": [KERNEL, KERNEL, KERNEL, KERNEL],
        "run": [PROGRAM],
    },
    "agent/commwatch_agent/sources/trace_files.py": {
        "open": [OPENED, OPENED],
        "replace": [STATE],
        "run": [OURS],
        "unlink": [STATE],
        "write_text": [STATE],
    },
    "agent/commwatch_agent/sources/trace_overlap.py": {"write_text": [STATE]},
    "collectors/commwatch_collectors/nccl/ras.py": {"create_connection": [NETWORK]},
    "collectors/commwatch/nccl_plugin/trial.py": {"CDLL": [OURS]},
    "collectors/commwatch_collectors/node/gpu_nvidia.py": {"CDLL": [SYSTEM]},
    "collectors/commwatch_collectors/node/tcp_connections.py": {"CDLL": [SYSTEM], "open": [KERNEL]},
    "collectors/commwatch/probe/native/beside.py": {
        "Popen": [OURS],
        "read_text": [KERNEL, KERNEL, KERNEL],
        "write_text": [KERNEL],
    },
    "collectors/commwatch/probe/native/build.py": {
        "TemporaryDirectory": [SCRATCH, SCRATCH],
        "chmod": [STATE, STATE],
        "glob": [STATE],
        "iterdir": [STATE],
        "read_bytes": [STATE],
        "read_text": [STATE],
        "rename": [STATE, STATE],
        "rmtree": [STATE, STATE],
        "run": [PROGRAM, PROGRAM],
        "unlink": [STATE],
        "write_text": [STATE, STATE],
    },
    "collectors/commwatch/probe/native/library.py": {
        "CDLL": [OPENED],
        "iterdir": [OURS],
        "read_text": [OURS],
        "run_path": [SYSTEM],
    },
    "collectors/commwatch/probe/torch_outside.py": {"read_bytes": [SYSTEM]},
    "collectors/commwatch/probe/torch_peers.py": {"connect": [NETWORK]},
    "collectors/commwatch/probe/torch_profile.py": {
        "TemporaryDirectory": [SCRATCH],
        "copyfileobj": [SCRATCH, SCRATCH],
        "open": [SCRATCH, SCRATCH, SCRATCH, SCRATCH, SCRATCH],
        "rename": [SCRATCH],
    },
    "collectors/commwatch/probe/torch_proof.py": {"write_bytes": [SCRATCH]},
    "collectors/commwatch/probe/torch_probe.py": {"unlink": [RING, RING]},
    "collectors/commwatch/probe/torch_sweep.py": {"open": [SCRATCH], "write_text": [SCRATCH]},
    "collectors/commwatch/probe/torch_timing.py": {"CDLL": [SYSTEM, SYSTEM]},
    "collectors/commwatch/wire/descriptor.py": {"CDLL": [SYSTEM]},
    "collectors/commwatch/wire/files.py": {"open": [KERNEL], "scandir": [KERNEL]},
    "collectors/commwatch/wire/identity.py": {"chmod": [MADE], "chown": [MADE]},
    "collectors/commwatch/wire/mapping.py": {"CDLL": [SYSTEM], "open": [RING], "unlink": [RING]},
    "collectors/commwatch/wire/ring.py": {"rename": [RING, RING], "unlink": [RING, RING, RING, RING]},
    "collectors/commwatch/wire/ring_reader.py": {"open": [OPENED]},
    "alerts/commwatch_alerts/catalogue.py": {"read_text": [OURS]},
    "alerts/commwatch_alerts/kept.py": {"fdopen": [OPENED], "replace": [STATE, STATE], "unlink": [STATE]},
    "alerts/commwatch_alerts/receivers/command.py": {"Popen": [PROGRAM], "TemporaryFile": [SCRATCH]},
    "alerts/commwatch_alerts/receivers/http.py": {"connect": [NETWORK], "create_default_context": [NETWORK]},
    "dashboards/commwatch_dashboards/build.py": {"write_text": [TYPED]},
    "dashboards/commwatch_dashboards/export.py": {"read_text": [OURS]},
}

#: By file: the calls of the gate with their trust; folders and new files are checked one by one, or belong to this process.
GATE: dict[str, list[str]] = {
    "agent/commwatch_agent/deploy/probe_folder.py": ["folder(operator)"],
    "agent/commwatch_agent/notify/bundles.py": ["create()", "folder()", "open_file(own)", "read(own)"],
    "agent/commwatch_agent/analysis/flight_recorder_analysis.py": ["open_file(trust)"],
    "agent/commwatch_agent/commands/output_filter.py": ["open_file(own)", "open_file(own)"],
    "agent/commwatch_agent/commands/run.py": ["create()", "folder()"],
    "agent/commwatch_agent/config_sources.py": ["read(operator)"],
    "agent/commwatch_agent/history/job_exit.py": ["KeptFolder()", "read(trainers)", "write()"],
    "agent/commwatch_agent/history/opening.py": ["lock_file()", "look(ANYBODY)"],
    "agent/commwatch_agent/history/sharing.py": ["lock_file()"],
    "agent/commwatch_agent/ingest/intake.py": ["folder()"],
    "agent/commwatch_agent/ingest/rings/finding.py": ["KeptFolder()"],
    "agent/commwatch_agent/otlp/endpoint.py": ["read(operator)"],
    "agent/commwatch_agent/reference/references.py": ["read(ANYBODY)", "read(ANYBODY)"],
    "agent/commwatch_agent/runtime/agents.py": ["read(operator)"],
    "collectors/commwatch/api/client.py": ["folder()"],
    "collectors/commwatch/api/client_tls.py": ["open_file(operator)"],
    "agent/commwatch_agent/runtime/run_lock.py": ["lock_file()", "lock_file()"],
    "collectors/commwatch/wire/tokens.py": ["look(replace(trust, strict=False))", "read(trust)", "write()"],
    "agent/commwatch_agent/sources/log_requests.py": ["folder()", "read(trainers)", "write()"],
    "agent/commwatch_agent/sources/nccl.py": ["folder(own)", "folder(own)", "look(ANYBODY)"],
    "agent/commwatch_agent/sources/nccl_archive.py": ["read(ANYBODY)", "write()"],
    "agent/commwatch_agent/sources/profiles.py": ["folder()", "folder()", "folder()", "read(ANYBODY)", "read(own)"],
    "agent/commwatch_agent/sources/stack_capture.py": [
        "look(self._trust)",
        "look(self._trust)",
        "open_file(self._trust)",
    ],
    "agent/commwatch_agent/sources/trace_files.py": ["folder()", "open_file(trainers)", "read(trainers)"],
    "collectors/commwatch_collectors/nccl/follow.py": ["look(trust)", "open_file(trust)"],
    "collectors/commwatch_collectors/nccl/matching.py": ["folder(ANYBODY)", "folder(ANYBODY)"],
    "collectors/commwatch/probe/native/build.py": ["lock_file()"],
    "collectors/commwatch/probe/native/library.py": ["read(operator)"],
    "collectors/commwatch/probe/torch_profile.py": ["folder()", "make()"],
    "collectors/commwatch/wire/announcement.py": [
        "folder()",
        "look(ANYBODY)",
        "look(operator)",
        "open_file(trust)",
        "read(trust)",
        "write()",
    ],
    "collectors/commwatch/wire/identity.py": ["open_file(own)"],
    "collectors/commwatch/wire/mapping.py": ["make()"],
    "collectors/commwatch/wire/nccl_debug_file.py": ["read(ANYBODY)"],
    "collectors/commwatch/wire/profile_files.py": ["read(trust)", "write()"],
    "collectors/commwatch/wire/ring_reader.py": [
        "open_file(trainers)",
        "open_file(user(self.uid))",
        "open_file(user(self.uid))",
    ],
    "alerts/commwatch_alerts/kept.py": ["create()", "read(own)", "read(read(self._path, _MOST_BYTES, own()).decode)"],
    "alerts/commwatch_alerts/receivers/sending.py": ["read(operator)"],
}

#: Libraries that the native code loads by name, as the dynamic loader does for any program.
NATIVE: dict[str, list[str]] = {
    "collectors/commwatch/nccl_plugin/chain.h": ["dlopen", "dlopen", "dlopen"],
    "collectors/commwatch/nccl_plugin/plugin.c": ["dlopen"],
    "collectors/commwatch/probe/native/nccl_plugin.h": ["dlopen"],
    "collectors/commwatch/probe/native/runtime.h": ["dlopen", "dlopen"],
}
