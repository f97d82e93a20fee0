# make train   train the adult-income example on this machine
# make test    everything that must hold before a change is done
# make quick   the tests of one process each, in three minutes
# make system  install what tests use of Debian, as root
# make long    tests of many processes for one case, which make test leaves out
# make chaos  jobs whose processes are killed again and again
# make states  what status, page and metrics say of 200 random faults
# make fuzz   inputs that no client sends, 100,000 for each port and file format
# make soak   two jobs for an hour each, which must grow by nothing
# make resume  a training with every loader, stopped and resumed
# make differential  random models on servers and in plain TorchRec
# make cluster  jobs on Slurm, in Kubernetes and on several hosts
# make quality, make speed   what the PLE example learns, and how fast
# make prometheus  Debian's Prometheus beside running jobs
# make wheel       what a newcomer does: install the wheel, train, in a fresh environment
# make coverage    the lines of the package that no test runs
# make docs    the pages as a site, in build/site
#
# All start from nothing: they make .venv with what the machine needs. torch comes
# first and alone, because fbgemm has to fit it; torchrec's own metadata asks for the
# CUDA build of fbgemm, so that its needs are installed by name.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/installed
COVERAGE := $(CURDIR)/build/coverage
SCHEMAS := build/schemas/installed
CLIENTS := build/clients/installed
KSERVE := build/clients/kserve

# What components/Dockerfile says by itself: make install DEVICE=cuda EXTRAS=examples
DEVICE := $(if $(shell nvidia-smi >/dev/null 2>&1 && echo yes),cuda,cpu)
EXTRAS := dev
$(if $(filter cpu cuda,$(DEVICE)),,$(error DEVICE must be cpu or cuda. Received: $(DEVICE)))

# Python writes the bytecode of what it imports; pip would that of all there is.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile
# make install TORCH=2.14: another torch, with the fbgemm and TorchRec that fit it. The
# choice is kept in .venv. fbgemm 1.X loads only with torch 2.(X+5).
TORCHES := 2.11 2.12 2.13 2.14
CHOSEN := $(or $(shell cat $(VENV)/torch 2>/dev/null),2.13.0)
TORCH := $(CHOSEN)
PARTS := $(subst ., ,$(TORCH))
MINOR := $(word 2,$(PARTS))
$(if $(filter $(TORCHES),$(word 1,$(PARTS)).$(MINOR)),,$(error TORCH must be one of $(TORCHES), or a release of one. Received: $(TORCH)))
TWIN := 1.$(shell expr $(MINOR) - 5).*
FBGEMM := $(if $(filter cuda,$(DEVICE)),fbgemm-gpu,fbgemm-gpu-cpu)==$(TWIN)
TORCHREC_NEEDS := tensordict torchmetrics==1.0.3 tqdm pyre-extensions $(if $(filter 11 12,$(MINOR)),iopath)

# What tests use of Debian: a Slurm, network namespaces, Prometheus.
SYSTEM := slurmctld slurmd slurm-client iproute2 prometheus
APT := DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y --no-install-recommends \
	-o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60
LACKING = $$(for one in $(SYSTEM); do dpkg-query -W -f '$${Status}' $$one 2>/dev/null \
	| grep -q 'ok installed' || echo $$one; done)

# The census data of the example, where it lies beside the checkout.
ADULT := ../shared/datasets/adult
ifneq ($(wildcard $(ADULT)),)
export PERSIA_DATA_DIR ?= $(abspath $(ADULT))
endif

# Why the job has failed that began last, after what torchx says at its end.
CAUSE = find runs -path '*/coordinator/0/combined.log' -newer $(VENV)/began -exec tail -n 1 {} +

.PHONY: help install train system test quick long wheel test-versions lint unit cache chaos states fuzz soak cluster prometheus quality speed coverage docs dropin differential resume clean
.NOTPARALLEL:

# Three workers would rewrite each test file, and each process read each module.
unexport PYTHONDONTWRITEBYTECODE

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## make .venv; TORCH=2.14 chooses another torch, and what fits it

ifneq ($(CHOSEN),$(TORCH))
.PHONY: $(STAMP)
endif
$(STAMP): Makefile pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed. $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into $(VENV), with torch $(TORCH) and $(FBGEMM)"
	$(PYTHON) -m venv $(if $(filter-out $(TORCH),$(CHOSEN)),--clear) $(VENV)
	$(PIP) 'torch==$(TORCH)$(if $(word 3,$(PARTS)),,.*)'
	$(PIP) '$(FBGEMM)' $(TORCHREC_NEEDS)
	$(PIP) --no-deps 'torchrec==$(TWIN)'
	@rm -rf persia_torchrec.egg-info  # of a build: its entry points would hide those installed
	$(PIP) --editable '.[$(EXTRAS)]'
	@echo '$(TORCH)' > $(VENV)/torch
	@touch $(STAMP)

train: $(STAMP)  ## train the example; ARGS="--servers 3" overrides
	@touch $(VENV)/began
	PATH="$(BIN):$$PATH" TORCHXCONFIG=.torchxconfig $(BIN)/torchx run $(if $(ARGS),-- $(ARGS)) || { $(CAUSE); exit 1; }

system:  ## install what tests use of Debian, as root; says what it could not
	@lacking="$(LACKING)"; \
	if [ -n "$$lacking" ] && [ "$$(id -u)" = 0 ]; then \
		said=$$({ $(APT) update; $(APT) install $$lacking || \
			for one in $$lacking; do $(APT) install $$one; done; } 2>&1); \
		lacking="$(LACKING)"; \
	fi; \
	[ -z "$$lacking" ] || { echo "$$said" | grep '^[EW]:' | sort -u; \
		echo "not installed, so that tests skip:" $$lacking; \
			echo "make system installs it, as root of a Debian with a package index."; }

# The loops are compiled and clients installed while mypy looks.
test: $(STAMP)  ## check everything
	@$(BIN)/python -c "$(LOOPS)" & loops=$$!; \
	$(MAKE) --no-print-directory $(CLIENTS) & clients=$$!; \
	$(MAKE) --no-print-directory lint && wait $$loops && wait $$clients \
		&& $(MAKE) --no-print-directory unit
LOOPS := import torchrec; from persia_torchrec.cache import slot_map; from persia_torchrec.lookup import pooling; from persia_torchrec.store import warm_up; pooling.warm_up(); warm_up.warm_up(); slot_map.warm_up()

lint: $(STAMP)  ## format, lint, types, import rules, workflows, spelling of pages
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/codespell $(PROSE)
PROSE = $(shell git ls-files '*.md' '*.rst')

# Tests wait for processes half of the time: there are more of them than cores.
WORKERS = $(shell expr $$(env -u OMP_NUM_THREADS nproc) \* 2)
PYTEST = PATH="$(BIN):$$PATH" $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
unit: $(STAMP) $(CLIENTS)  ## the tests, benchmarks included; ARGS="-k rpc" chooses
	$(PYTEST) -m "not long" $(ARGS)

quick: $(STAMP)  ## the tests that take one process and little time
	$(PYTEST) -m "not multiprocess and not slow and not long" $(ARGS)

long: $(STAMP) $(KSERVE)  ## the tests marked long; not part of test
	$(PYTEST) -m long -p tests.support.long_table $(ARGS)

cache: $(STAMP)  ## cached rows: all tests, those marked long too; not part of test
	$(PYTEST) tests/cache tests/integration/test_cached_same_as_torchrec.py tests/integration/test_cached_kills.py $(ARGS)

wheel: $(STAMP)  ## build and install the wheel, and train, in a fresh environment; not part of test
	$(BIN)/python -m pytest tests/wheel -s -p no:cacheprovider $(ARGS)

# The oldest and the newest torch, each in an environment of its own. VERSIONS="2.12"
# chooses, and PYTHON=python3.13. Of most torches an index has CUDA builds alone, of some
# gigabytes; they run on a CPU too.
VERSIONS := $(firstword $(TORCHES)) $(lastword $(TORCHES))
test-versions: $(addprefix test-torch-,$(VERSIONS))  ## the tests with the oldest and the newest torch; not part of test

test-torch-%:
	@$(MAKE) --no-print-directory unit VENV=build/versions/$* TORCH=$* DEVICE=cpu

chaos: $(STAMP)  ## jobs whose processes are killed again and again; not part of test
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/chaos --timeout 3600 $(ARGS)

states: $(STAMP)  ## what status, page and metrics say of 200 random faults; not part of test
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/chaos/test_states.py --timeout 3600 $(ARGS)

# Clients of the inference protocol, whose protobuf does not fit that of torchx.
$(CLIENTS): Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(CLIENTS_PIP) 'tritonclient[http,grpc]==2.73.0' \
		open-inference-openapi==2.0.0.1 open-inference-grpc==2.0.0 \
		&& touch $@ || echo "not installed, so that their tests skip: tritonclient"
CLIENTS_PIP := $(dir $(CLIENTS))bin/python -m pip -qq --disable-pip-version-check install --no-compile

# KServe's, 400 MB, is of make long alone.
$(KSERVE): $(CLIENTS)
	$(CLIENTS_PIP) kserve==0.21.0 \
		&& touch $@ || echo "not installed, so that its test skips: kserve"

# The schemas of Kubernetes, 108 MB, in an environment of their own.
$(SCHEMAS): Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip -qq --disable-pip-version-check install kubernetes-validate==1.37.0 \
		&& touch $@ || echo "not installed, so that its test skips: kubernetes-validate"

cluster: $(STAMP) $(SCHEMAS)  ## jobs on Slurm, in Kubernetes and on several hosts; not part of test
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/cluster --timeout 3600 $(ARGS)

prometheus: $(STAMP)  ## Debian's Prometheus beside jobs: every metric, panel and alert; not part of test
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/prometheus --timeout 1200 $(ARGS)

fuzz: $(STAMP)  ## inputs that no client sends; ARGS="-k shard --inputs 5000" chooses
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/fuzz --timeout 7200 --inputs 100000 $(ARGS)

soak: $(STAMP)  ## two jobs for an hour each; ARGS="--minutes 10" for less
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest tests/soak --timeout 90000 --minutes 60 $(ARGS)

# Hugging Face's datasets are not among what make installs: they bring a dozen packages.
resume: $(STAMP)  ## stop and resume a training with every loader; ARGS="--only nodes" chooses
	$(PIP) 'datasets>=5,<6'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.resume.run $(ARGS)

differential: $(STAMP)  ## random models, plain and on servers; ARGS="--seed 7 --models 1"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.differential.run $(ARGS)

dropin: $(STAMP)  ## programs of others, plain and on servers; ARGS="--checkouts DIR"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.dropin.run $(ARGS)

quality: $(STAMP)  ## AUC of the PLE example against its bars; ARGS="--data_location DIR"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ple quality $(ARGS)

speed: $(STAMP)  ## steps a second of the PLE example; ARGS="--data_location DIR"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ple speed $(ARGS)

# Not among what make installs: numba imports it where it is, at each start of a process.
coverage: $(STAMP)  ## lines that no test runs, in any process; ARGS="tests/rpc" chooses
	$(PIP) 'coverage>=7.10.4'
	rm -rf $(COVERAGE)
	mkdir -p $(COVERAGE)
	PATH="$(BIN):$$PATH" COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage run -m pytest --numprocesses logical --dist loadfile --no-loadscope-reorder $(ARGS)
	COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage combine --quiet $(COVERAGE)
	COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage report

# A warning, as of a link that leads nowhere, is an error. ARGS="-b linkcheck" asks hosts.
$(VENV)/docs: $(STAMP)
	$(PIP) --editable '.[$(EXTRAS),docs]'
	@touch $@

docs: $(VENV)/docs  ## the pages as a site, in build/site; not part of test
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate.py --errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs $(ARGS) . build/site

clean:  ## remove all that the other targets made
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
