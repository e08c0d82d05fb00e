# An environment to use as it is, with the code of this checkout; otherwise make builds .venv from BASE_PYTHON.
PYTHON ?=
BASE_PYTHON ?= python3
# The studies of `make measure`, as "te_layer lengths"; by default all but the wide sweeps.
ONLY ?=
# Whose committed records `make reproduce` draws, as nvidia-h200; by default this run's, or without a GPU an H100's.
GPU ?=
# Options of JupyterLab for `make lab`, as "--ip=0.0.0.0 --port=8899" in a container.
OPTIONS ?=

# Recipes read the settings, as they were typed, from the environment: neither make nor the shell runs a part of them.
SETTINGS := PYTHON BASE_PYTHON ONLY GPU OPTIONS
$(foreach name,$(SETTINGS),$(eval override $(name) := $$(value $(name))))
export $(SETTINGS)
HERE = $(if $(PYTHON),PYTHONPATH="$$PWD$${PYTHONPATH:+:$$PYTHONPATH}")
RUN = $(HERE) "$${PYTHON:-.venv/bin/python}" -m
STUDY = $(RUN) ropelab.study
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.NOTPARALLEL:
.PHONY: help test test-fast check smoke reproduce measure lab clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=/path/to/python   use this environment as it is, perhaps without a network"
	@echo "  BASE_PYTHON=python3.12   build the environment in .venv from this Python (>= 3.11)"
	@echo "  python -m ropelab.study  the other commands: peers, hub, memcheck, plugins"

test: has-study has-test ## the test suite; a GPU runs the tests that need one, too
	$(RUN) pytest -m 'not process' --junitxml=build/tests/parallel.xml --numprocesses auto --dist worksteal
	$(RUN) pytest -m process --junitxml=build/tests/process.xml

test-fast: has-study has-test ## in minutes: the first case of each test of the library that starts no programs
	$(RUN) pytest tests/unit tests/ops tests/laws --size=smoke -m 'not process and not peers' --numprocesses auto --dist worksteal

check: has-check ## ruff's rules and format, and the types of the library, in a minute
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

smoke: has-study ## the study with tiny parameters, in some minutes
	$(STUDY) --build build/smoke reproduce --smoke

reproduce: has-study has-peers ## the whole study: measure (on a GPU, into build/), run every notebook, write the report
	$(STUDY) peers
	$(STUDY) reproduce --gpu "$$GPU"

measure: has-study has-peers ## for maintainers: measure, and replace this GPU's records in data/measurements/
	$(STUDY) peers
	set -f; $(STUDY) measure -- $$ONLY

lab: has-study has-lab ## open the notebooks in JupyterLab
	set -f; $(STUDY) lab -- $$OPTIONS

clean: ## remove everything generated: build and .venv
	rm -rf build .venv

# Dependency groups of pyproject.toml. Packages to compare with are welcome in an existing environment, never required.
GROUPS := study test check lab peers hub
ifneq ($(PYTHON),)
has-peers: ;
has-%: ; @"$$PYTHON" -P ropelab/study/doctor.py $*
else
$(GROUPS:%=has-%): has-%: .venv/.has-%
endif

$(GROUPS:%=.venv/.has-%): .venv/.has-%: .venv/.has-package
	@$(PIP) --group $*
	@touch $@

.venv/.has-package: pyproject.toml constraints.txt
	@"$$BASE_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "BASE_PYTHON: expected Python >= 3.11")'
	@echo "setting up .venv: torch is a large download, the first time takes minutes"
	@"$$BASE_PYTHON" -m venv .venv
	@$(PIP) --upgrade pip
	@$(PIP) --editable '.[cli]'
	@touch $@
