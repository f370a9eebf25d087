# Everything a person or CI does here; `make help` lists it. `make run` and `make test` first set up what they need.

# The environment is .venv, made once from PYTHON (3.11 or 3.12). A PYTHON that is given and already has vLLM is used as it
# is instead: nothing is installed, so a GPU host without network needs no more than `make run PYTHON=... MODEL=...`.
PYTHON_GIVEN := $(filter-out undefined,$(origin PYTHON))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	2>/dev/null && echo $$p && break; done)
# A model folder for `make run`; without one it serves a small model that it prepares itself.
MODEL ?=
# cpu or cuda: which build of vLLM goes into .venv; once one is there, it stays.
INSTALLED := $(shell cat .venv/ready 2>/dev/null)
ENGINE ?= $(or $(INSTALLED),cpu)
# Where pip finds the CPU build of torch, if its configured indexes do not have it: PyTorch's own index of CPU wheels.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Of KServe's client, which the tests of the Open Inference Protocol use.
KSERVE_VERSION := 0.21.0
# Further arguments for pytest, protos/generate.py and `oasiskv bench`.
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# A folder of ours must never hide a module of the standard library, wherever a command is started.
export PYTHONSAFEPATH := 1

ifneq ($(if $(PYTHON_GIVEN),$(shell $(PYTHON) -c 'from importlib.util import find_spec; print(find_spec("vllm") or "")' 2>/dev/null)),)
PY := $(PYTHON)
READY := build/metadata/ready
FOLDERS := $(patsubst %/oasiskv,$(CURDIR)/%,$(filter-out helm/oasiskv,$(wildcard */oasiskv)))
export PYTHONPATH := $(subst $() ,:,$(strip $(FOLDERS) $(CURDIR)/build/metadata $(PYTHONPATH)))
else
PY := .venv/bin/python
READY := .venv/ready
ifneq ($(ENGINE),$(or $(INSTALLED),$(ENGINE)))
ifeq ($(filter clean help,$(MAKECMDGOALS)),)
$(error ENGINE: expected $(INSTALLED), which .venv holds, got $(ENGINE); the two builds of vLLM overwrite one another, so `make clean` first)
endif
endif
endif

.PHONY: help install redis kserve check test soak protos crds locks sbom bench run clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10
	@echo 'variables: PYTHON= interpreter, MODEL= model folder, ENGINE= cpu or cuda, ARGS= for pytest, protos and bench, TORCH_INDEX='

install: $(READY) ## set up the environment; the first time takes a few minutes and 4.5 GB

.venv/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo 'error: no Python 3.11 or 3.12 found; name one with PYTHON=' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12) and \
		"error: PYTHON: expected Python 3.11 or 3.12, got " + sys.version.split()[0] + " (" + sys.executable + ")")'
	@echo 'Setting up .venv with vLLM for $(ENGINE): about 3 minutes and 4.5 GB the first time.'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --upgrade pip
	@install() { echo "pip install $$*"; $(PY) -m pip install "$$@"; }; \
		install -e '.[$(ENGINE),services,operator,nixl,dev]' || { \
			printf '\n%s\n' 'If the error above is about torch: trying again with the wheels at $(TORCH_INDEX)'; \
			install --extra-index-url '$(TORCH_INDEX)' -e '.[$(ENGINE),services,operator,nixl,dev]'; }
ifeq ($(ENGINE),cpu)
	@echo 'Removing three packages that do not import beside the CPU build of torch; text models need none of them.'
	$(PY) -m pip uninstall -y torchvision torchaudio torchcodec
endif
	@echo '$(ENGINE)' >$@

# The entry points of this checkout, for an interpreter in which it is not installed: vLLM finds its plugins by them.
define WRITE_METADATA
import pathlib, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
groups = project["entry-points"] | {"console_scripts": project["scripts"]}
folder = pathlib.Path("build/metadata", f"{project['name']}-{project['version']}.dist-info")
folder.mkdir(parents=True, exist_ok=True)
lines = [line for group, entries in groups.items() for line in [f"[{group}]", *(f"{k} = {v}" for k, v in entries.items())]]
(folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
endef
export WRITE_METADATA

build/metadata/ready: pyproject.toml
	@echo 'Using $(PYTHON) with its own vLLM; nothing is installed.'
	@rm -rf build/metadata
	@$(PY) -c "$$WRITE_METADATA"
	@touch $@

redis: ## install Debian's redis-server, which the tests of the directory start; they are skipped without it
	@command -v redis-server >/dev/null || { \
		if [ "$$(id -u)" = 0 ]; then apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server; \
		else echo 'error: redis-server is not installed, and this user may not install it. Ask for the Debian package redis-server' \
			'(sudo make redis), or go on without it: the tests of the directory are skipped then.' >&2; exit 1; fi; }

kserve: build/kserve/ready ## install KServe's own client for its tests; it does not go with vLLM's packages, so into build/kserve

build/kserve/ready:
	$(PYTHON) -m venv build/kserve
	build/kserve/bin/python -m pip install --quiet kserve==$(KSERVE_VERSION)
	@touch $@

check: $(READY) ## everything that needs no test run: lint, format, types, layers, spelling, layout
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint(["--no-logo"])'
	$(PY) -m codespell_lib
	$(PY) protos/generate.py --check
	$(PY) -m pytest -q tests/unit/test_layout.py

test: $(READY) ## all tests but the soak ones; ARGS= goes to pytest
	$(PY) -m pytest --ignore=tests/soak --durations=10 --durations-min=2 $(ARGS)

soak: $(READY) ## the tests that take minutes, and as many new examples as they allow for the property tests
	$(PY) -m pytest tests/property --hypothesis-profile=soak --timeout=7200 $(ARGS)
	$(PY) -m pytest tests/soak $(ARGS)

protos: $(READY) ## generate code from .proto files; refuses a change that breaks peers
	$(PY) protos/generate.py $(ARGS)

crds: $(READY) ## generate the operator's resource definitions and their reference page
	$(PY) -m oasiskv.operator.crds

locks: $(READY) ## write what the container images install, exact versions by hash, from the package index
	$(PY) services/images.py lock

sbom: $(READY) ## write a bill of materials (CycloneDX) of each container image to build/sbom
	$(PY) services/images.py sbom

bench: $(READY) ## measure; ARGS= goes to oasiskv bench
	$(PY) -m oasiskv.cli bench $(ARGS)

run: $(READY) ## answer a prompt with a model on this machine; MODEL= names a model folder
	$(PY) -m oasiskv.cli run $(if $(MODEL),'$(MODEL)')

clean: ## remove everything that was made here, .venv too
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
