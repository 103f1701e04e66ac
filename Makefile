# Each target first installs what it needs into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
export OMP_NUM_THREADS ?= 1
# Containers often set it. Then each of the thousands of processes of the tests would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long lint editor format bench parts dashboards dashboards-types dist docs clean frameworks hooks newcomer test-cuda test-gpu test-nccl-example test-traces bench-cuda mutations faults faults-nodes faults-links advice pictures image-proof lengths

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# Dependencies, and commwatch itself in editable mode, are installed when pyproject.toml changes.
.stamps/venv: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@# Python compiles what a process imports first: a tenth of what is installed.
	$(BIN)/python -m pip install --quiet --no-compile torch==$(TORCH)
	@# Left by earlier states of this repository: the entry point in it would fail every import of torch in this folder.
	rm -rf build/__editable__* *.egg-info
	$(BIN)/python -m pip install --quiet --no-compile --group dev --editable '.[examples]'
	mkdir -p .stamps && touch $@

# Builds the native hook, because otherwise these jobs would wait for the build or record nothing.
.PHONY: hook
hook: .stamps/venv
	@$(BIN)/commwatch native build > /dev/null

demo: .stamps/venv  ## train a small transformer on two ranks, watch it, and report
	$(BIN)/commwatch run -- $(BIN)/torchrun --nproc-per-node 2 examples/train_ddp.py

parts:  ## install Prometheus, Chromium and the network tools that the tests use (as root, on Debian)
	@sh tests/parts.sh

# Runs the tests $(2) with the flags $(1), and once more alone those that failed: many jobs at a time overload a small
# machine. A test that fails twice fails the run. What failed once is printed, and must be fixed. Status 1: all tests ran, and some failed.
define tested
$(BIN)/python -m pytest --cache-clear $(1) $(2) || { test $$? -eq 1 && echo "again, one by one:" && \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --exitfirst --verbose $(2); }
endef

# The native hook of the tests, whose build would keep all workers waiting.
.PHONY: tested-hook
tested-hook: .stamps/venv
	@XDG_CACHE_HOME=$(CURDIR)/.stamps/cache $(BIN)/python -m commwatch.probe.native.build build > /dev/null

# What pytest makes of the asserts is kept on the disk: otherwise each worker would compile all modules.
.PHONY: compiled
compiled: .stamps/venv
	-@$(BIN)/python -m pytest --collect-only -qq $(TESTED) > /dev/null

TESTED := -m 'not frameworks and not cuda_rig and not public_traces and not nccl_example and not image_proof and not by_the_clock and not long' tests

# All that the tests need before they begin.
.PHONY: ready
ready: .stamps/venv parts tested-hook compiled

# Five at a time, in the order of tests/conftest.py: they wait half of their time. Tests that compare times run afterwards, two at a time.
test: ready  ## run all tests
	$(call tested,--numprocesses 5 --dist loadfile --no-loadscope-reorder --keep-lengths,$(TESTED))
	$(call tested,--numprocesses 2 --dist loadfile,-m by_the_clock tests/e2e)

test-long: .stamps/venv parts tested-hook  ## run the tests of hostile users and files, chaos, full disks and load, and further variants
	$(call tested,--numprocesses 5 --dist loadfile --no-loadscope-reorder,-m long tests)

lengths:  ## record how long the modules of tests took in the last run, for the order in which fresh clones run them
	$(BIN)/python -m tests.lengths

# The packages of the frameworks, in a separate environment: several gigabytes, and half an hour on an idle machine.
FRAMEWORKS := .venv-frameworks
PACKAGES := tests/frameworks/requirements.txt tests/frameworks/torchrec.txt
.stamps/frameworks: pyproject.toml $(PACKAGES)
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(FRAMEWORKS)/bin/python -m pip install --quiet torch==$(TORCH) hypothesis pytest pytest-timeout -r $(word 1,$(PACKAGES)) --editable .
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps -r $(word 2,$(PACKAGES))
	mkdir -p .stamps && touch $@

frameworks: .stamps/frameworks  ## run jobs of Lightning, transformers, DeepSpeed, Ray and others under the probe
	$(FRAMEWORKS)/bin/python -m pytest -m frameworks tests/frameworks

faults: .stamps/venv hook  ## run small jobs with one fault each that have no result yet, and print the verdicts (WORDS="fsdp late": only these; RUNS=3, BUSY=2)
	$(BIN)/python -m tests.faults.run $(WORDS)

faults-nodes: .stamps/venv hook  ## run the same jobs on two hosts (network namespaces, as root), judged by rules of Prometheus
	$(BIN)/python -m tests.faults.nodes $(WORDS)

faults-links: .stamps/venv hook  ## run jobs on hosts whose links are shaped (network namespaces, as root), and print which link is named, and when
	$(BIN)/python -m tests.faults.links $(WORDS)

advice: .stamps/venv hook  ## follow each piece of advice in a real job, and compare its gain with the predicted gain (as root)
	$(BIN)/python -m tests.advice.run $(WORDS)

pictures: .stamps/venv hook  ## make the pictures of jobs with faults in docs/images (4 min)
	$(BIN)/python -m tests.faults.pictures docs/images

TORCHES ?= 2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
hooks: .stamps/venv  ## build the wheel with the native hooks for many versions of torch (downloads 9 GB; TORCHES=DIR: for an installed torch)
	$(BIN)/python -m commwatch_agent.deploy.hooks_wheel --out dist $(TORCHES)

# With a wheel of `make hooks` in the folder HOOKS, else without.
newcomer: .stamps/venv  ## play a newcomer and an ML engineer from a fresh clone and an empty home, and print how long each step takes (HOOKS=DIR)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m tests.first_minutes.play $(if $(HOOKS),--hooks $(HOOKS)) --starts 5

# The CUDA build of torch, in a separate environment for each version: 7 GB, most of it NVIDIA's libraries.
CUDA_TORCH ?= 2.14.1
CUDA := .venv-cuda-$(CUDA_TORCH)
CUDA_READY := .stamps/cuda-$(CUDA_TORCH)
$(CUDA_READY): pyproject.toml
	test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(CUDA)/bin/python -m pip install --quiet torch==$(CUDA_TORCH) $(shell grep ^deepspeed tests/frameworks/requirements.txt) numpy hypothesis pytest pytest-timeout pytest-xdist --editable .
	mkdir -p .stamps && touch $@

test-cuda: $(CUDA_READY)  ## run the CUDA build of PyTorch and NCCL on a simulated driver, without a GPU
	$(CUDA)/bin/python -m pytest -m cuda_rig tests/cuda_rig

test-gpu: $(CUDA_READY)  ## run those jobs on the machine's NVIDIA GPU (two ranks share it: NCCL 2.30 and an MPS server)
	REAL_GPU=1 $(CUDA)/bin/python -m pytest -n 3 -m real_gpu tests/cuda_rig

test-nccl-example: $(CUDA_READY)  ## chain the example plugin of the NCCL sources in NCCL_SOURCES (a checkout of NVIDIA/nccl), on the simulated driver
	$(CUDA)/bin/python -m pytest -m nccl_example tests/cuda_rig/test_nccl_example.py

image-proof: .stamps/venv  ## build the image on a base of Debian's packages, and run it beside a trainer; watch a job of another Python (as root, on Debian, 4 min)
	@sh tests/image/parts.sh
	$(BIN)/python -m pytest -m image_proof tests/image

test-traces: .stamps/venv  ## measure the traces in TRACES, HolisticTraceAnalysis's tests/data, and compare with its figures
	$(BIN)/python -m pytest -m public_traces tests/agent/sources/test_public_traces.py

mutations: .stamps/venv parts  ## break the core in eighty places, and check that the tests find each (as root, 8 min)
	$(BIN)/python -m tests.mutations

bench-cuda: $(CUDA_READY)  ## measure what timing adds to an NCCL operation, on the simulated driver
	@$(CUDA)/bin/commwatch native build > /dev/null
	$(CUDA)/bin/python bench/cuda_cost.py

lint: .stamps/venv $(LINT_AFTER)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p commwatch -p commwatch_collectors -p commwatch_agent -p commwatch_alerts -p commwatch_dashboards
	$(BIN)/mypy tests bench
	@# One cache for all folders, because otherwise mypy would check the types of torch again for each.
	for scripts in examples tests/e2e/jobs tests/faults/jobs; do \
		(cd $$scripts && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache .) || exit; done

editor: .stamps/venv  ## check that an editor can follow every import (with basedpyright)
	$(BIN)/python -m pip install --quiet basedpyright
	$(BIN)/basedpyright --level error

format: .stamps/venv  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench:  ## measure costs against the budgets, and against DeepSpeed's logger and torch.profiler
	sh bench/run.sh

dashboards: .stamps/venv  ## generate the JSON of the dashboards
	$(BIN)/python -m commwatch_dashboards.build dashboards/commwatch_dashboards

settings: .stamps/venv  ## generate the table of docs/settings.md from the declarations of the settings
	$(BIN)/python -m docs.settings_table

# The daemonset and the sidecar of the Kustomize bases share rules and dashboards.
K8S := $(BIN)/commwatch manifest k8s
.PHONY: chart
chart: .stamps/venv  ## generate the Helm chart's templates, the Kustomize bases and the examples for launchers
	$(BIN)/python -m commwatch_agent.deploy.chart deploy/helm/commwatch
	$(K8S) --daemonset --only DaemonSet --only Service --only ServiceMonitor --only NetworkPolicy > deploy/kustomize/base/daemonset/commwatch.yaml
	$(K8S) --only Job --only PodMonitor --only NetworkPolicy > deploy/kustomize/base/sidecar/commwatch.yaml
	$(K8S) --only PrometheusRule --only ConfigMap > deploy/kustomize/base/monitoring/commwatch.yaml
	$(K8S) --launcher jobset --only JobSet > deploy/examples/jobset.yaml
	$(K8S) --launcher trainjob --only TrainingRuntime --only TrainJob > deploy/examples/trainjob.yaml
	$(K8S) --launcher pytorchjob --only PyTorchJob > deploy/examples/pytorchjob.yaml
	$(K8S) --launcher volcano --only Job > deploy/examples/volcano.yaml

dashboards-types: .stamps/venv  ## check the dashboards against Grafana's own types (needs npm)
	$(BIN)/python -m pytest tests/dashboards/test_types.py

dist: .stamps/venv  ## build wheel and sdist
	$(BIN)/python -m build --quiet

docs: .stamps/venv  ## build the documents as a site with search, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove all generated files and environments
	rm -rf $(VENV) $(FRAMEWORKS) $(CUDA) .stamps build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
