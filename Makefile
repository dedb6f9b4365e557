# Everything runs in .venv, created by the first target that needs it.
PYTHON ?= python3
# Build of torch: cpu, default (on Linux with CUDA, 5 GB), or unset: the CPU build if pip finds it.
export TORCH
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := .[lab,data,tensorboard,dev]
# A separate environment: Triton takes a gigabyte, its interpreter half a minute.
KERNELS_VENV := .venv-kernels
KERNELS_INSTALLED := $(KERNELS_VENV)/.installed
# A separate environment: a torchvision that cannot load its operators would break other packages' imports.
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS_INSTALLED := $(INTEGRATIONS_VENV)/.installed
NEWEST_VENV := .venv-newest
PACKAGE_VENV := .venv-package
DOCS_INSTALLED := $(VENV)/.installed-docs
WORKERS ?= 2
# Share compiled tests among workers, the processes that tests start, and later runs.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test check lint types pytest test-newest test-again test-slow test-gpu test-models
.PHONY: test-integrations test-browser test-kernels test-faults test-slurm test-package bench evidence docs docs-version clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 19

install: $(INSTALLED)  ## create .venv and install the project with pinned versions

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	.ci/install-torch $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '$(EXTRAS)'
	@touch $@

demo: install  ## compare constant and scaled decay on a small model, at a deliberately large lambda (8 minutes)
	@echo "The demo uses a deliberately large lambda, 1, so that the rules differ; 0.3 would suit its 420 steps."
	$(BIN)/muonsw compare --weight-decay 1 --control

test: lint types pytest  ## check format, lint and types; run the quick tests

check: test  ## the same as test

lint: install  ## check format and style with ruff
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install  ## check types with mypy
	$(BIN)/mypy

# One thread per worker: two workers with two threads each on two cores are many times slower. With worksteal the tests
# of a file stay together and share their fixtures.
QUICK := pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not gpu and not models and not integrations and not slurm and not browser"

pytest: install  ## run the quick tests and the examples of the documentation
	OMP_NUM_THREADS=1 $(BIN)/python -m $(QUICK) -p no:randomly

# Install the newest versions, unpinned; on Linux torch is then the CUDA build, which also runs without a GPU.
test-newest:  ## run the quick tests on the newest packages and Python (6 GB)
	"$$(.ci/newest-python)" -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install -q --upgrade --upgrade-strategy eager -e '$(EXTRAS)'
	$(NEWEST_VENV)/bin/python -c 'import sys, torch; print("Python", sys.version.split()[0], "with torch", torch.__version__)'
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m $(QUICK) -p no:randomly

# Results must not depend on one machine or on the order of the tests. Test names must be the same at each collection,
# or workers cannot share the tests. pytest prints the seed of the order; `--randomly-seed=N` repeats it.
test-again: install  ## run the quick tests as on another machine, in random order
	PYTHONHASHSEED=1 $(BIN)/pytest -q --collect-only -p no:randomly > $(VENV)/collected-once
	PYTHONHASHSEED=2 $(BIN)/pytest -q --collect-only -p no:randomly > $(VENV)/collected-twice
	@grep -h :: $(VENV)/collected-once > $(VENV)/names && grep -h :: $(VENV)/collected-twice | diff $(VENV)/names - \
	  || { echo "the names of the tests above change at each collection: give their parameters ids"; exit 1; }
	TEST_MACHINE="$$($(BIN)/python -m tests.other_machine)" CUDA_VISIBLE_DEVICES= FORCE_COLOR=1 COLUMNS=40 \
	  ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 $(BIN)/python -m $(QUICK)

test-browser: install  ## test report pages in Chromium
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:randomly -m browser tests/lab/test_report_in_browser.py

test-slow: install  ## run the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) -p no:randomly -m slow

# In one process, because kills and full disks happen in forked children.
test-faults: install  ## kill at every file operation, fill the disk, damage every file (half an hour)
	MUONSW_FAULTS=long OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:randomly tests/lab/test_end_to_end.py

# The setup script needs root; its Slurm stays installed for the next time.
test-slurm: install  ## train runs as jobs of a real Slurm: preempted, requeued, cancelled, killed, collected
	squeue > /dev/null 2>&1 || sh tests/slurm/setup.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:randomly -m slurm tests/slurm

# Only files with such tests, so that few packages are needed: pytest, hypothesis, numpy, and for the trainer tyro.
test-gpu:  ## run the tests that need a CUDA device, with the current python
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu $$(grep -rl --include='*.py' 'mark.gpu' tests)
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/kernels  # not marked gpu: they also run in Triton's interpreter

# Twice: with the Triton of the newest torch and of the oldest supported torch, whose interpreter converts arrays to
# scalars in a way that numpy deprecates.
test-kernels: $(KERNELS_INSTALLED)  ## test Triton kernels on any CPU: interpreted, and compiled for a GPU
	OMP_NUM_THREADS=1 $(KERNELS_VENV)/bin/python -m pytest -q -n $(WORKERS) tests/kernels
	PYTHONPATH=$(KERNELS_VENV)/oldest OMP_NUM_THREADS=1 $(KERNELS_VENV)/bin/python -m pytest -q -n $(WORKERS) \
	  -W 'ignore:Conversion of an array with ndim:DeprecationWarning' tests/kernels

$(KERNELS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERNELS_VENV)
	.ci/install-torch $(KERNELS_VENV)/bin/python
	$(KERNELS_VENV)/bin/python -m pip install -q -c constraints.txt -e . numpy triton pytest pytest-xdist hypothesis
	$(KERNELS_VENV)/bin/python -m pip install -q --no-deps --target $(KERNELS_VENV)/oldest triton==3.6.0 numpy==2.2.6
	@touch $@

test-models: $(INTEGRATIONS_INSTALLED)  ## test routing on 147 models of transformers, timm, torchvision and PEFT
	OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/python -m pytest -q -n $(WORKERS) -m models tests/models

test-integrations: $(INTEGRATIONS_INSTALLED)  ## test the optimizers in Trainer, Lightning, torchtitan, DeepSpeed and others
	OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/python -m pytest -q -n $(WORKERS) -m integrations tests/integrations

# DeepSpeed needs no compiled operators on CPUs. torchtitan pins an older datasets than TRL needs, hence --no-deps.
$(INTEGRATIONS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	.ci/install-torch $(INTEGRATIONS_VENV)/bin/python
	{ DS_BUILD_OPS=0 $(INTEGRATIONS_VENV)/bin/python -m pip install -q -c constraints.txt -e '.[integrations]' pytest \
	    pytest-xdist && $(INTEGRATIONS_VENV)/bin/python -m pip install -q -c constraints.txt --no-deps torchtitan; } \
	  || { echo "could not install the packages of the extra 'integrations'; nothing was tested"; exit 1; }
	@touch $@

test-package:  ## build wheel and sdist, check their contents, use the wheel in a fresh environment
	$(PYTHON) -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install -q -c constraints.txt build cffconvert twine
	$(PACKAGE_VENV)/bin/python tests/package/check.py

bench: install  ## time our step and torch's on this machine
	$(BIN)/python bench/step_time.py

evidence: install  ## rebuild the tables and figures of docs/evidence.md from research/runs.jsonl
	$(BIN)/python research/tables.py

docs: $(DOCS_INSTALLED)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# All versions of the site are on the branch gh-pages; this commits to it and does not push.
docs-version: $(DOCS_INSTALLED)  ## add this version's documentation to gh-pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $$($(BIN)/python -c 'import muonsw; print(muonsw.__version__)') latest
	$(BIN)/mike set-default latest

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

clean:  ## remove environments and build outputs
	rm -rf $(VENV) $(NEWEST_VENV) $(KERNELS_VENV) $(INTEGRATIONS_VENV) $(PACKAGE_VENV) build dist site out .mypy_cache .pytest_cache .ruff_cache .hypothesis
