# Every command of the project; `make help` lists them.

# An existing environment to use as it is: nothing is installed into it and the code runs from this checkout.
PYTHON ?=
# Without it, make builds its own environment in VENV from BASE_PYTHON, at the versions of constraints.txt.
BASE_PYTHON ?= python3
VENV ?= .venv
# Studies to measure, by default all but the wide sweeps, which the guide lists.
ONLY ?=
# Whose records to draw, as nvidia-h200; by default those of the GPU at hand, or of the first that has any.
GPU ?=
# Libraries of hundreds of MB for `make peers`: 1 fetches them, 0 does not; by default where there is an NVIDIA GPU.
LARGE ?=
# Everything generated goes here.
BUILD ?= build
# pip says nothing of its newer versions: this one is of constraints.txt.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Folders of this checkout that are never removed, whatever BUILD and VENV say.
SOURCES := .ci .git data kernels notebooks ropelab tests

# One folder or program each: make itself would take a space for the end of the first.
define plain
ifneq ($$(words $$($(1))),$(2))
  $$(error $(1): expected one path without spaces, got '$$($(1))')
endif
ifneq ($$(findstring ',$$($(1))),)
  $$(error $(1): expected a path without quotes, got $$($(1)))
endif
endef
$(foreach name,BUILD VENV BASE_PYTHON,$(eval $(call plain,$(name),1)))
$(if $(PYTHON),$(eval $(call plain,PYTHON,1)))

ifeq ($(PYTHON),)
  RUN   := $(VENV)/bin/python
  READY := $(VENV)/.ready
else
  RUN   := $(PYTHON)
  READY := existing-environment
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif
STUDY = '$(RUN)' -m ropelab.study --build '$(BUILD)$(SMOKE)'

OF_GPU = $(if $(GPU),--gpu '$(GPU)')
LARGE_OR_NOT = $(if $(LARGE),$(if $(filter 0,$(LARGE)),--no-large,--large))

.DEFAULT_GOAL := help
.PHONY: help test check memcheck smoke reproduce measure figures lab peers hub clean existing-environment

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=/path/to/python       use this environment as it is and install nothing into it"
	@echo "  BASE_PYTHON=python3.12       build the environment in $(VENV) from this Python (>= 3.11)"

test: NEEDS := study test
test: $(READY) ## the whole test suite (GPU tests only where there is a GPU)
	'$(RUN)' -m pytest --numprocesses auto --dist loadfile

check: NEEDS := cli study check
check: $(READY) ## ruff's rules and format, and the types of the library, in a minute
	'$(RUN)' -m ruff check .
	'$(RUN)' -m ruff format --check .
	'$(RUN)' -m mypy

memcheck: NEEDS := study test
memcheck: $(READY) ## the kernels under compute-sanitizer: nothing out of bounds (needs a GPU and CUDA's tools)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 '$(RUN)' tests/memcheck.py

reproduce: NEEDS := study
reproduce: $(READY) peers ## the whole study: measure (on a GPU), run every notebook, write the report
	$(STUDY) reproduce $(OF_GPU)

smoke: NEEDS := study
smoke: SMOKE := /smoke
smoke: $(READY) ## the same with tiny parameters, in a minute or two
	$(STUDY) reproduce --smoke

measure: NEEDS := study
measure: $(READY) peers ## measure on this GPU and replace its records under data/measurements/ (ONLY="te_layer tiles" for some)
	$(STUDY) measure $(ONLY)

figures: NEEDS := study
figures: $(READY) ## redraw the figures from the committed records
	$(STUDY) figures $(OF_GPU)

lab: NEEDS := study lab
lab: $(READY) ## open the notebooks in JupyterLab
	$(STUDY) lab

hub: $(READY) ## write the package for the Hugging Face hub into build/hub, from the library's own sources
	'$(RUN)' ropelab/study/hub/build.py '$(BUILD)/hub'

clean: ## remove everything generated, the environment included
	@here=$$(pwd -P); \
	for folder in '$(BUILD)' '$(VENV)'; do \
	  test -e "$$folder" || continue; \
	  there=$$(cd -- "$$folder" && pwd -P) || exit 1; \
	  case "$$there" in \
	    "$$here"/*) ;; \
	    *) echo "make: clean: expected BUILD and VENV to be folders inside this one, got $$folder"; exit 1 ;; \
	  esac; \
	  for kept in $(SOURCES); do \
	    case "$$there/" in "$$here/$$kept/"*) \
	      echo "make: clean: expected BUILD and VENV to be generated folders, got $$folder"; exit 1 ;; \
	    esac; \
	  done; \
	done
	rm -rf -- '$(BUILD)' '$(VENV)' *.egg-info

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v '$(BASE_PYTHON)' >/dev/null || \
	  { echo "make: no '$(BASE_PYTHON)' here; install Python >= 3.11 or set BASE_PYTHON=/path/to/python"; exit 1; }
	@'$(BASE_PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(BASE_PYTHON) is $$('$(BASE_PYTHON)' -V 2>&1), Python >= 3.11 is needed; set BASE_PYTHON"; exit 1; }
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
	@command -v '$(PYTHON)' >/dev/null || { echo "make: PYTHON=$(PYTHON) is not there or cannot be run"; exit 1; }
	@'$(PYTHON)' ropelab/study/doctor.py $(NEEDS)

# Comparison packages are welcome, never required: the study lists a missing one as not run. With PYTHON they come to
# build/peers as well, and nothing comes into that environment. The file is run by its path, because
# `-m ropelab.bench.fetch_peers` would import torch, which takes longer than all else where nothing is missing.
peers: $(READY) ## fetch the published code that the study compares with, as far as it can be had
	@'$(RUN)' -P ropelab/bench/fetch_peers.py $(LARGE_OR_NOT)
