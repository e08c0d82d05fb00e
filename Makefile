# Every command of the project; `make help` lists them.

# An existing environment to use as it is: nothing is installed and the code runs from this checkout.
PYTHON ?=
# Without it, make builds its own environment in VENV from BASE_PYTHON, at the versions of constraints.txt.
BASE_PYTHON ?= python3
VENV ?= .venv
# Studies to measure, by default all but the sweep of tiles.
ONLY ?=
# Everything generated goes here.
BUILD ?= build

ifeq ($(PYTHON),)
  RUN   := $(VENV)/bin/python
  READY := $(VENV)/.ready
else
  RUN   := $(PYTHON)
  READY := existing-environment
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif
STUDY = $(RUN) -m ropelab.study --build $(BUILD)

# Packages the study compares with, each version in a folder of its own, without its dependencies.
PEERS := torchembed==0.2.4 torchembed==0.3.0 torchembed==0.3.1 torchembed==0.3.2 \
         liger-kernel==0.8.5 flash-attn==2.8.3.post2 deepspeed==0.19.8 fairseq2==0.8.1 \
         flashinfer-python==0.5.3 flashinfer-python==0.6.13 \
         rotary-embedding-torch==0.9.1 einops==0.8.2

.DEFAULT_GOAL := help
.PHONY: help test memcheck smoke reproduce measure figures lab peers clean existing-environment

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=/path/to/python       use this environment as it is and install nothing"
	@echo "  BASE_PYTHON=python3.12       build the environment in $(VENV) from this Python (>= 3.11)"

test: EXTRAS := study test
test: $(READY) ## the whole test suite (GPU tests only where there is a GPU)
	$(RUN) -m pytest --numprocesses auto --dist loadfile

memcheck: EXTRAS := study test
memcheck: $(READY) ## the kernels under compute-sanitizer: nothing out of bounds (needs a GPU and CUDA's tools)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(RUN) tests/memcheck.py

reproduce: EXTRAS := study
reproduce: $(READY) peers ## the whole study: measure (on a GPU), run every notebook, write the report
	$(STUDY) reproduce

smoke: EXTRAS := study
smoke: $(READY) ## the same with tiny parameters, in a minute or two
	$(STUDY)/smoke reproduce --smoke

measure: EXTRAS := study
measure: $(READY) peers ## measure on this GPU and replace its records under data/measurements/ (ONLY="te_layer tiles" for some)
	$(STUDY) measure $(ONLY)

figures: EXTRAS := study
figures: $(READY) ## redraw the figures from the committed records
	$(STUDY) figures

lab: EXTRAS := study lab
lab: $(READY) ## open the notebooks in JupyterLab
	$(STUDY) lab

clean: ## remove everything generated, the environment included
	rm -rf $(BUILD) $(VENV) *.egg-info

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v $(BASE_PYTHON) >/dev/null || \
	  { echo "make: no '$(BASE_PYTHON)' here; install Python >= 3.11 or set BASE_PYTHON=/path/to/python"; exit 1; }
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(BASE_PYTHON) is $$($(BASE_PYTHON) -V 2>&1), Python >= 3.11 is needed; set BASE_PYTHON"; exit 1; }
	@$(BASE_PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "make: $(BASE_PYTHON) lacks the venv module (on Debian and Ubuntu: apt-get install python3-venv)"; exit 1; }
	@echo "setting up $(VENV): torch is a large download, the first time takes minutes"
	@$(BASE_PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[cli,study,lab,test,peers]' || \
	  { echo "make: pip could not install the packages (see above). Without a network, use an environment"; \
	    echo "      that has them: make TARGET PYTHON=/path/to/python"; exit 1; }
	@touch $@

existing-environment:
	@command -v $(PYTHON) >/dev/null || { echo "make: PYTHON=$(PYTHON) is not there or cannot be run"; exit 1; }
	@$(PYTHON) ropelab/study/doctor.py $(EXTRAS)

# Comparison packages are welcome, never required: what is missing is listed by the study as not run.
peers: $(READY) ## fetch the packages that the study compares with, as far as they can be had
ifeq ($(PYTHON),)
	@for peer in $(PEERS); do \
	  folder=build/peers/$${peer%%==*}-$${peer##*==}; \
	  test -d $$folder && continue; \
	  rm -rf $$folder.partial; \
	  FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE \
	  $(RUN) -m pip install --quiet --retries 0 --no-deps --no-build-isolation --target $$folder.partial $$peer \
	    && mv $$folder.partial $$folder && echo "peers: $$peer" \
	    || { echo "peers: $$peer cannot be had; the study goes on without what is missing"; break; }; \
	done
else
	@echo "peers: PYTHON is set, so nothing is installed; using what build/peers holds"
endif
