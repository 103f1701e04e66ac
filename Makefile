# One verb per need. Each installs what it needs into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test lint format bench parts dashboards dashboards-types dist clean sync frameworks torch-builds test-cuda faults faults-nodes advice pictures

help:  ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# Dependencies are installed when pyproject.toml changes. The package itself is synced each time (2 s): a strict
# editable install does not see new files by itself.
.stamps/venv: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --group dev
	mkdir -p .stamps && touch $@

# Installs commwatch into the environment $(1).
define install
@rm -rf build/__editable__*
@$(1)/bin/python -m pip install --quiet --editable '$(2)' --config-settings editable_mode=strict \
	> .stamps/sync.log 2>&1 || { cat .stamps/sync.log; exit 1; }
@# Left here, it would announce our entry point to every other Python that is started in this folder.
@rm -rf commwatch.egg-info
endef

sync: .stamps/venv  ## install commwatch into .venv, new files too (demo, test and lint do so by themselves)
	$(call install,$(VENV),.[examples])

# What these jobs run with; without it they would wait for a build or record nothing.
.PHONY: hook
hook: sync
	@$(BIN)/commwatch native build > /dev/null

demo: sync  ## train a small transformer on two ranks, watch it, and report
	$(BIN)/commwatch run -- $(BIN)/torchrun --nproc-per-node 2 examples/train_ddp.py

parts:  ## install Prometheus, Chromium and the network tools that the tests use (as root, on Debian)
	@sh tests/parts.sh

# Tests with jobs come first, because they wait much of their time, and those that compare times have no neighbours.
test: sync parts  ## run all tests
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder \
		-m 'not frameworks and not cuda_rig and not by_the_clock' tests/e2e tests
	$(BIN)/python -m pytest -m by_the_clock tests/e2e

# The frameworks' own packages, in an environment of their own: several gigabytes, and half an hour on an idle machine.
FRAMEWORKS := .venv-frameworks
PACKAGES := tests/frameworks/requirements.txt tests/frameworks/torchrec.txt
.stamps/frameworks: pyproject.toml $(PACKAGES)
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(FRAMEWORKS)/bin/python -m pip install --quiet torch==$(TORCH) hypothesis pytest pytest-timeout -r $(word 1,$(PACKAGES))
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps -r $(word 2,$(PACKAGES))
	mkdir -p .stamps && touch $@

frameworks: .stamps/frameworks  ## run jobs of Lightning, transformers, DeepSpeed, Ray and others under the probe
	$(call install,$(FRAMEWORKS),.)
	$(FRAMEWORKS)/bin/python -m pytest -m frameworks tests/frameworks

faults: sync hook  ## run small jobs with one fault each, and print what is concluded of them (WORDS="fsdp late": only these)
	$(BIN)/python -m tests.faults.run $(WORDS)

faults-nodes: sync hook  ## the same jobs on two hosts (network namespaces, as root): whom the rules of a Prometheus name
	$(BIN)/python -m tests.faults.nodes $(WORDS)

advice: sync hook  ## follow each piece of advice in a real job, and compare its gain with the promised one (as root)
	$(BIN)/python -m tests.advice.run $(WORDS)

pictures: sync hook  ## make the pictures of a job with a late rank in docs/images (7 min)
	$(BIN)/python -m tests.faults.pictures docs/images

TORCH_VERSIONS ?= 2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
torch-builds: sync  ## build the native hook with the headers of many versions of torch (downloads 9 GB)
	$(BIN)/python -m tests.frameworks.torch_builds $(TORCH_VERSIONS)

# The CUDA build of torch, in an environment of its own: 7 GB, most of it libraries of NVIDIA's.
CUDA := .venv-cuda
CUDA_TORCH ?= 2.14.1
.stamps/cuda: pyproject.toml
	test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(CUDA)/bin/python -m pip install --quiet torch==$(CUDA_TORCH) numpy hypothesis pytest pytest-timeout pytest-xdist
	mkdir -p .stamps && touch $@

test-cuda: .stamps/cuda  ## run the CUDA build of PyTorch and NCCL on a simulated driver, without a GPU
	$(call install,$(CUDA),.)
	$(CUDA)/bin/python -m pytest -m cuda_rig tests/cuda_rig

lint: sync  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p commwatch
	$(BIN)/mypy tests bench
	@# One cache: each folder of scripts would check the types of torch again.
	for scripts in examples tests/e2e/jobs tests/faults/jobs; do \
		(cd $$scripts && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache .) || exit; done

format: sync  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench:  ## measure the budgets, beside DeepSpeed's logger and torch.profiler
	sh bench/run.sh

dashboards: sync  ## make the JSON of the dashboards out of their builders
	$(BIN)/python -m commwatch.dashboards.build dashboards

dashboards-types: sync  ## hold the dashboards to Grafana's own types (needs npm)
	$(BIN)/python -m pytest tests/dashboards/test_types.py

dist: .stamps/venv  ## build wheel and sdist
	$(BIN)/python -m build --quiet

clean:  ## remove everything that was made
	rm -rf $(VENV) $(FRAMEWORKS) $(CUDA) .stamps build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
