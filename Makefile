# Every command of the project; `make help` lists them.

# An existing environment to use as it is: nothing is installed into it and the code runs from this checkout.
PYTHON ?=
# Without it, make builds its own environment in VENV from BASE_PYTHON, at the versions of constraints.txt.
BASE_PYTHON ?= python3
VENV ?= .venv
# Studies to measure, by default all but the wide sweeps, which the guide lists.
ONLY ?=
# Options of JupyterLab for `make lab`, as --ip=0.0.0.0 --port=8899 in a container.
OPTIONS ?=
# Whose records to draw, as nvidia-h200; by default those of the GPU at hand, or of the first that has any.
GPU ?=
# Libraries of hundreds of MB for `make peers`: 1 fetches them, 0 does not; by default where there is an NVIDIA GPU.
LARGE ?=
# Everything generated goes here.
BUILD ?= build
# pip says nothing of its newer versions: this one is of constraints.txt.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What is committed at the top of this checkout: nothing is generated or removed there, whatever BUILD and VENV say.
COMMITTED := .ci .git .gitattributes .github .gitignore .pre-commit-config.yaml .pre-commit-hooks.yaml CHANGELOG.md \
  CITATION.cff CONTRIBUTING.md LICENSE MANIFEST.in Makefile README.md action.yml constraints.txt data examples \
  kernels notebooks pyproject.toml pytest_ropelab.py ropelab setup.py tests upstream

# Values are taken as they are typed: a dollar sign begins no expression of make.
SETTINGS := BUILD VENV BASE_PYTHON PYTHON GPU LARGE ONLY OPTIONS
$(foreach name,$(SETTINGS),$(eval override $(name) := $$(value $(name))))
$(foreach name,$(SETTINGS),$(if $(findstring ',$($(name))),$(error $(name): expected no quotes, got $($(name)))))
# One folder, program or name each: make itself would take a space for the end of the first.
one_word = $(if $(filter-out 1,$(words [$($(1))])),$(error $(1): expected one name or path without spaces, got '$($(1))'))
$(foreach name,BUILD VENV BASE_PYTHON PYTHON GPU LARGE,$(call one_word,$(name)))
$(foreach name,BUILD VENV BASE_PYTHON,$(if $($(name)),,$(error $(name): expected a path, got none)))
$(if $(filter-out 0 1,$(LARGE)),$(error LARGE: expected 0 or 1, got '$(LARGE)'))

# Where a path lies, links resolved: `inside` this checkout, `outside`, or `committed`, if the path is or holds
# something committed. A path that goes up from a folder that is not there counts as committed.
place = $(shell here=$$(pwd -P); there='$(1)'; rest=; \
  until test -d "$$there"; do rest="/$$(basename -- "$$there")$$rest"; there=$$(dirname -- "$$there"); done; \
  there=$$(cd -- "$$there" && pwd -P)$$rest; there="$${there%/}/"; \
  for name in $(COMMITTED); do case "$$there" in ("$$here/$$name/"*) echo committed; exit; esac; done; \
  case "$$here/$$rest/" in ("$$there"* | */../*) echo committed; exit; esac; \
  case "$$there" in ("$$here/"*) echo inside;; (*) echo outside; esac)
PLACES := $(foreach name,BUILD VENV,$(name)=$(call place,$($(name))))
$(foreach name,$(patsubst %=committed,%,$(filter %=committed,$(PLACES))),\
  $(error $(name): expected a folder for generated files, got '$($(name))', which is or holds what is committed))

ifeq ($(PYTHON),)
  RUN   := $(VENV)/bin/python
  READY := $(VENV)/.ready
else
  RUN   := $(PYTHON)
  READY := existing-environment
endif
# Modules come from this checkout. Files that need none run with -P and without it, so that no file here, as json.py,
# takes the place of a module of Python's library.
HERE = $(if $(PYTHON),PYTHONPATH="$$PWD$${PYTHONPATH:+:$$PYTHONPATH}")
STUDY = $(HERE) '$(RUN)' -m ropelab.study --build '$(BUILD)$(SMOKE)'

# A program that does nothing, as /bin/true, is no Python, although it ends without an error.
is_python = test "$$('$($(1))' -c 'import sys; print(sys.version_info >= (3, 11))')" = True || \
  { echo 'make: $(1): expected a Python >= 3.11, got $($(1)); set $(1)=/path/to/python'; exit 1; }

OF_GPU = $(if $(GPU),--gpu '$(GPU)')
LARGE_OR_NOT = $(if $(LARGE),$(if $(filter 0,$(LARGE)),--no-large,--large))

.DEFAULT_GOAL := help
.PHONY: help test check memcheck plugins smoke reproduce measure measure-all figures lab peers hub clean existing-environment

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=/path/to/python       use this environment as it is and install nothing into it"
	@echo "  BASE_PYTHON=python3.12       build the environment in $(VENV) from this Python (>= 3.11)"

test: NEEDS := study test
test: $(READY) ## the whole test suite (GPU tests only where there is a GPU)
	$(HERE) '$(RUN)' -m pytest --numprocesses auto --dist loadfile

check: NEEDS := cli study check
check: $(READY) ## ruff's rules and format, and the types of the library, in a minute
	$(HERE) '$(RUN)' -m ruff check .
	$(HERE) '$(RUN)' -m ruff format --check .
	$(HERE) '$(RUN)' -m mypy

memcheck: NEEDS := study test
memcheck: $(READY) ## every kernel under compute-sanitizer: bounds, races, reads before writes (GPU and CUDA's tools)
	for tool in memcheck racecheck initcheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(HERE) \
	    compute-sanitizer --tool $$tool --error-exitcode 1 '$(RUN)' -m tests.memcheck || exit 1; done

plugins: NEEDS :=
plugins: $(READY) ## hold the plugins to the classes of vLLM and SGLang, and say which of them this environment lacks
	$(HERE) '$(RUN)' -m pytest -rs tests/test_serving.py tests/test_plugins.py

reproduce: NEEDS := study
reproduce: $(READY) peers ## the whole study: measure (on a GPU), run every notebook, write the report
	$(STUDY) reproduce $(OF_GPU)

smoke: NEEDS := study
smoke: SMOKE := /smoke
smoke: $(READY) ## the same with tiny parameters, in a minute or two
	$(STUDY) reproduce --smoke

measure: NEEDS := study
measure: $(READY) peers ## measure on this GPU and replace its records under data/measurements/ (ONLY="te_layer tiles" for some)
	$(STUDY) measure -- $(foreach study,$(ONLY),'$(study)')

measure-all: NEEDS := study
measure-all: $(READY) peers ## measure the wide sweeps, too; after an interruption the same command goes on
	$(STUDY) measure --all

figures: NEEDS := study
figures: $(READY) ## redraw the figures from the committed records
	$(STUDY) figures $(OF_GPU)

lab: NEEDS := study lab
lab: $(READY) ## open the notebooks in JupyterLab (in a container: OPTIONS="--ip=0.0.0.0 --port=8899")
	$(STUDY) lab -- $(foreach option,$(OPTIONS),'$(option)')

hub: $(READY) ## write the package for the Hugging Face hub into build/hub, from the library's own sources
	'$(RUN)' -P ropelab/study/hub/build.py '$(BUILD)/hub'

clean: ## remove everything generated, the environment included
	@test -z '$(filter %=outside,$(PLACES))' || \
	  { echo "make: clean: expected BUILD and VENV to be folders inside this one, got $(BUILD) and $(VENV)"; exit 1; }
	rm -rf -- '$(BUILD)' '$(VENV)' *.egg-info

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(call is_python,BASE_PYTHON)
	@'$(BASE_PYTHON)' -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "make: $(BASE_PYTHON) lacks the venv module (on Debian and Ubuntu: apt-get install python3-venv)"; exit 1; }
	@echo "setting up $(VENV): torch is a large download, the first time takes minutes"
	@'$(BASE_PYTHON)' -m venv '$(VENV)'
	@'$(RUN)' -m pip install --quiet --constraint constraints.txt --upgrade pip && \
	'$(RUN)' -m pip install --quiet --constraint constraints.txt --editable '.[cli]' \
	  --group study --group lab --group test --group check --group hub --group peers || \
	  { echo "make: pip could not install the packages (see above). Without a network, use an environment"; \
	    echo "      that has them: make TARGET PYTHON=/path/to/python"; exit 1; }
	@touch '$@'

existing-environment:
	@$(call is_python,PYTHON)
	@'$(PYTHON)' -P ropelab/study/doctor.py $(NEEDS)

# Comparison packages are welcome, never required: the study lists a missing one as not run. With PYTHON they come to
# build/peers as well, and nothing comes into that environment. The files are run by their paths, because
# `-m ropelab.bench.fetch_peers` would import torch, which takes longer than all else where nothing is missing.
peers: $(READY) ## fetch the published code that the study compares with, as far as it can be had
	@'$(RUN)' -P ropelab/bench/fetch_peers.py $(LARGE_OR_NOT)
	@'$(RUN)' -P ropelab/bench/compile_peers.py
