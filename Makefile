# Everything runs inside .venv, which the first target that needs it makes.
PYTHON ?= python3
# Which build of torch: cpu, default (on Linux for CUDA, 5 GB), or unset: the CPU build where pip finds it.
export TORCH
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := .[lab,data,tensorboard,dev]
# Triton takes a gigabyte, and its interpreter half a minute: apart from the rest.
KERNELS_VENV := .venv-kernels
KERNELS_INSTALLED := $(KERNELS_VENV)/.installed
# Apart from the rest: a torchvision that cannot load its operators would break other packages' imports.
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS_INSTALLED := $(INTEGRATIONS_VENV)/.installed
NEWEST_VENV := .venv-newest
PACKAGE_VENV := .venv-package
DOCS_INSTALLED := $(VENV)/.installed-docs
WORKERS ?= 2
# Tests compiled once serve every worker, every process that a test starts, and the next time.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test check lint types pytest test-newest test-again test-slow test-gpu test-models
.PHONY: test-integrations test-browser test-kernels test-faults test-slurm test-package bench evidence docs docs-version clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 19

install: $(INSTALLED)  ## make .venv and install the project with pinned versions

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	.ci/install-torch $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '$(EXTRAS)'
	@touch $@

demo: install  ## constant against scaled decay on a small model, at a deliberately large lambda, 8 minutes
	@echo "The demo takes a deliberately large lambda, 1, at which the rules differ; 0.3 would suit its 420 steps."
	$(BIN)/muonsw compare --weight-decay 1 --control

test: lint types pytest  ## format, lint, types and the quick tests

check: test  ## the same as test, under the name that other projects use

lint: install  ## check format and style with ruff
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install  ## check types with mypy
	$(BIN)/mypy

# One thread for each worker: two workers with two threads each on two cores run many times slower. Work is stolen, not
# dealt out: the tests of a file stay together, so that what they share is made once.
QUICK := pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not gpu and not models and not integrations and not slurm and not browser"

pytest: install  ## the quick tests and the examples of the documentation
	OMP_NUM_THREADS=1 $(BIN)/python -m $(QUICK) -p no:randomly

# Nothing is pinned, and what is there already is upgraded: on Linux torch is the CUDA build, which needs no GPU.
test-newest:  ## the quick tests with what pip installs today, on the newest Python found (6 GB)
	"$$(.ci/newest-python)" -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install -q --upgrade --upgrade-strategy eager -e '$(EXTRAS)'
	$(NEWEST_VENV)/bin/python -c 'import sys, torch; print("Python", sys.version.split()[0], "with torch", torch.__version__)'
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m $(QUICK) -p no:randomly

# No result may rest on one machine's rounding and answers, or on the order of the tests; every name must be the same at
# each collection, or the workers refuse to share the tests. The seed of the order is printed; `--randomly-seed=N`
# repeats it.
test-again: install  ## the same tests as on another machine and in a random order
	PYTHONHASHSEED=1 $(BIN)/pytest -q --collect-only -p no:randomly > $(VENV)/collected-once
	PYTHONHASHSEED=2 $(BIN)/pytest -q --collect-only -p no:randomly > $(VENV)/collected-twice
	@grep -h :: $(VENV)/collected-once > $(VENV)/names && grep -h :: $(VENV)/collected-twice | diff $(VENV)/names - \
	  || { echo "the tests above have other names at each collection: give their parameters ids"; exit 1; }
	TEST_MACHINE="$$($(BIN)/python -m tests.other_machine)" CUDA_VISIBLE_DEVICES= FORCE_COLOR=1 COLUMNS=40 \
	  ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 $(BIN)/python -m $(QUICK)

test-browser: install  ## the pages of reports in a real Chromium
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:randomly -m browser tests/lab/test_report_in_browser.py

test-slow: install  ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) -p no:randomly -m slow

# In one process: kills and full disks happen in forked children.
test-faults: install  ## kill at every file operation, fill the disk and break every file; about half an hour
	MUONSW_FAULTS=long OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:randomly tests/lab/test_end_to_end.py

# The set-up script needs root; the Slurm that it makes stays, and serves the next time.
test-slurm: install  ## runs as jobs of a real Slurm: preempted, requeued, cancelled, killed, collected
	squeue > /dev/null 2>&1 || sh tests/slurm/setup.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:randomly -m slurm tests/slurm

# Only the files that have such tests, so that nothing is needed which those of the command line import.
test-gpu:  ## the tests that need a CUDA device, with the current python
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu $$(grep -rl --include='*.py' 'mark.gpu' tests)
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/kernels  # which run wherever they can

# Twice: with the Triton of the newest torch, and with that of the oldest that the library takes, which knows less, and
# whose interpreter reads numbers out of arrays as numpy will no longer allow.
test-kernels: $(KERNELS_INSTALLED)  ## the Triton kernels in its interpreter, and compiled for a GPU, on any CPU
	OMP_NUM_THREADS=1 $(KERNELS_VENV)/bin/python -m pytest -q -n $(WORKERS) tests/kernels
	PYTHONPATH=$(KERNELS_VENV)/oldest OMP_NUM_THREADS=1 $(KERNELS_VENV)/bin/python -m pytest -q -n $(WORKERS) \
	  -W 'ignore:Conversion of an array with ndim:DeprecationWarning' tests/kernels

$(KERNELS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERNELS_VENV)
	.ci/install-torch $(KERNELS_VENV)/bin/python
	$(KERNELS_VENV)/bin/python -m pip install -q -c constraints.txt -e . numpy triton pytest pytest-xdist hypothesis
	$(KERNELS_VENV)/bin/python -m pip install -q --no-deps --target $(KERNELS_VENV)/oldest triton==3.6.0 numpy==2.2.6
	@touch $@

test-models: $(INTEGRATIONS_INSTALLED)  ## routing of 147 models of transformers, timm, torchvision and PEFT
	OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/python -m pytest -q -n $(WORKERS) -m models tests/models

test-integrations: $(INTEGRATIONS_INSTALLED)  ## the optimizers in Trainer, Lightning, torchtitan, DeepSpeed and others
	OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/python -m pytest -q -n $(WORKERS) -m integrations tests/integrations

# DeepSpeed builds no operators: none are needed on CPUs. torchtitan asks for an older datasets than TRL needs.
$(INTEGRATIONS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	.ci/install-torch $(INTEGRATIONS_VENV)/bin/python
	{ DS_BUILD_OPS=0 $(INTEGRATIONS_VENV)/bin/python -m pip install -q -c constraints.txt -e '.[integrations]' pytest \
	    pytest-xdist && $(INTEGRATIONS_VENV)/bin/python -m pip install -q -c constraints.txt --no-deps torchtitan; } \
	  || { echo "the packages of the extra 'integrations' could not be installed, so nothing was tested"; exit 1; }
	@touch $@

test-package:  ## build wheel and sdist, check what they hold, use the wheel in an environment of its own
	$(PYTHON) -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install -q -c constraints.txt build cffconvert twine
	$(PACKAGE_VENV)/bin/python tests/package/check.py

bench: install  ## time our step against torch's, on this machine
	$(BIN)/python bench/step_time.py

evidence: install  ## rebuild the tables and figures of docs/evidence.md from research/runs.jsonl
	$(BIN)/python research/tables.py

docs: $(DOCS_INSTALLED)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# Versions of the site live side by side on the branch gh-pages, which this commits to and does not push.
docs-version: $(DOCS_INSTALLED)  ## add the documentation of this version to the branch that serves them all
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $$($(BIN)/python -c 'import muonsw; print(muonsw.__version__)') latest
	$(BIN)/mike set-default latest

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(NEWEST_VENV) $(KERNELS_VENV) $(INTEGRATIONS_VENV) $(PACKAGE_VENV) build dist site out .mypy_cache .pytest_cache .ruff_cache .hypothesis
