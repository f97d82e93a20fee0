# `make` lists the targets. Those that need .venv make it first.

PYTHON ?= python3
VENV := .venv
# Of the command line alone: components/install.sh says what they are.
TORCH :=
DEVICE :=
EXTRAS :=
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile
TESTS := PATH="$(BIN):$$PATH" $(BIN)/python -m pytest

# The census data of the example, where it lies beside the checkout.
ADULT := ../shared/datasets/adult
ifneq ($(wildcard $(ADULT)),)
export PERSIA_DATA_DIR ?= $(abspath $(ADULT))
endif

.NOTPARALLEL:
# A folder has the name of a target: docs.
.PHONY: $(shell awk -F: '/^[a-z-]+:.*\#\# / {print $$1}' Makefile)
# Without bytecode, three workers would rewrite each test file and parse each module.
unexport PYTHONDONTWRITEBYTECODE

help:  ## show this list
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} \
		/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

##@ Install and train

install: $(STAMP)  ## make .venv; TORCH=2.14 chooses another torch, and what fits it

ifneq ($(or $(TORCH),$(shell cat $(VENV)/torch 2>/dev/null)),$(shell cat $(VENV)/torch 2>/dev/null))
.PHONY: $(STAMP)
endif
$(STAMP): components/install.sh pyproject.toml setup.py
	@PYTHON="$(PYTHON)" components/install.sh $(VENV) "$(TORCH)" "$(DEVICE)" "$(EXTRAS)"
	@touch $@

system:  ## install what tests use of Debian, as root; says what it could not
	@tests/system.sh

train: $(STAMP)  ## train the example; ARGS="--servers 3" overrides
	@touch $(VENV)/began
	PATH="$(BIN):$$PATH" TORCHXCONFIG=.torchxconfig $(BIN)/torchx run $(if $(ARGS),-- $(ARGS)) || { $(CAUSE); exit 1; }
# The last line of the coordinator, which says why the job failed, after torchx's own.
CAUSE = find runs -path '*/coordinator/0/combined.log' -newer $(VENV)/began -exec tail -n 1 {} +

clean:  ## remove all that the other targets made
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments of their own, for packages that do not fit those of .venv: clients of the
# inference protocol, KServe's (400 MB), and the schemas of Kubernetes (108 MB).
CLIENTS := build/clients/installed
KSERVE := build/clients/kserve
SCHEMAS := build/schemas/installed
$(CLIENTS): PACKAGES = 'tritonclient[http,grpc]==2.73.0' open-inference-openapi==2.0.0.1 open-inference-grpc==2.0.0
$(KSERVE): PACKAGES = kserve==0.21.0
$(SCHEMAS): PACKAGES = kubernetes-validate==1.37.0
$(CLIENTS) $(SCHEMAS): Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(BESIDE)
$(KSERVE): $(CLIENTS)
	$(BESIDE)
BESIDE = $(@D)/bin/python -m pip -qq --disable-pip-version-check install --no-compile $(PACKAGES) \
	&& touch $@ || echo "not installed, so that tests skip:" $(PACKAGES)

##@ Before a change is done

# Two environments are installed at once; while mypy runs, two processes compile the loops,
# from both ends.
test:  ## check everything
	@$(MAKE) --no-print-directory $(CLIENTS) & clients=$$!; \
	$(MAKE) --no-print-directory $(STAMP) || { wait; exit 1; }; \
	$(BIN)/python -c "$(LOOPS)" 1 & first=$$!; \
	$(BIN)/python -c "$(LOOPS)" -1 & second=$$!; \
	$(MAKE) --no-print-directory lint && wait $$first && wait $$second && wait $$clients \
		&& $(MAKE) --no-print-directory unit
LOOPS := import sys, torchrec; from persia_torchrec.cache import slot_map; from persia_torchrec.lookup import pooling; from persia_torchrec.store import warm_up; [one.warm_up() for one in (warm_up, pooling, slot_map)[::int(sys.argv[1])]]

lint: $(STAMP)  ## format, lint, types, import rules, workflows, spelling of pages
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/codespell $$(git ls-files '*.md' '*.rst')

# Tests wait for processes half of the time, but those of quick: so many workers a core.
A_CORE := 2
quick: A_CORE := 3 / 2
WORKERS = --numprocesses $(shell expr $$(env -u OMP_NUM_THREADS nproc) \* $(A_CORE)) --dist loadfile --no-loadscope-reorder
unit: $(STAMP) $(CLIENTS)  ## the tests, benchmarks included; ARGS="-k rpc" chooses
	$(TESTS) $(WORKERS) -m "not long" $(ARGS)

quick: $(STAMP)  ## the tests that take one process and little time
	$(TESTS) $(WORKERS) -m "not multiprocess and not slow and not long" $(ARGS)

##@ Longer tests, which make test leaves out

long: $(STAMP) $(KSERVE)  ## tests of many processes for one case
	$(TESTS) $(WORKERS) -m long -p tests.support.long_table $(ARGS)

cache: $(STAMP)  ## cached rows: all tests
	$(TESTS) $(WORKERS) tests/cache tests/integration/test_cached_same_as_torchrec.py tests/integration/test_cached_kills.py $(ARGS)

chaos: $(STAMP)  ## jobs whose processes are killed again and again
	$(TESTS) tests/chaos --timeout 3600 $(ARGS)

states: $(STAMP)  ## what status, page and metrics say of 200 random faults
	$(TESTS) tests/chaos/test_states.py --timeout 3600 $(ARGS)

fuzz: $(STAMP)  ## inputs that no client sends; ARGS="-k shard --inputs 5000" chooses
	$(TESTS) tests/fuzz --timeout 7200 --inputs 100000 $(ARGS)

soak: $(STAMP)  ## two jobs for an hour each; ARGS="--minutes 10" for less
	$(TESTS) tests/soak --timeout 90000 --minutes 60 $(ARGS)

# Hugging Face's datasets bring a dozen packages: .venv has them from here on.
resume: $(STAMP)  ## stop and resume a training with every loader; ARGS="--only nodes" chooses
	$(PIP) 'datasets>=5,<6'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.resume.run $(ARGS)

##@ Beside other programs

differential: $(STAMP)  ## random models, plain and on servers; ARGS="--seed 7 --models 1"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.differential.run $(ARGS)

dropin: $(STAMP)  ## programs of others, plain and on servers; ARGS="--checkouts DIR"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.dropin.run $(ARGS)

cluster: $(STAMP) $(SCHEMAS)  ## jobs on Slurm, in Kubernetes and on several hosts
	$(TESTS) tests/cluster --timeout 3600 $(ARGS)

prometheus: $(STAMP)  ## Debian's Prometheus beside jobs: every metric, panel and alert
	$(TESTS) tests/prometheus --timeout 1200 $(ARGS)

wheel: $(STAMP)  ## install the wheel and train, in a fresh environment
	$(BIN)/python -m pytest tests/wheel -s -p no:cacheprovider $(ARGS)

VERSIONS ?= 2.11 2.14
test-versions: $(addprefix test-torch-,$(VERSIONS))  ## the tests with the oldest and the newest torch; VERSIONS="2.12"
test-torch-%:
	@$(MAKE) --no-print-directory unit VENV=build/versions/$* TORCH=$* DEVICE=cpu

##@ Measure, and write pages

quality: $(STAMP)  ## AUC of the PLE example against its bars; ARGS="--data_location DIR"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ple quality $(ARGS)

speed: $(STAMP)  ## steps a second of the PLE example; ARGS="--data_location DIR"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ple speed $(ARGS)

COVERAGE := $(CURDIR)/build/coverage
# Not among what .venv has: numba imports it at each start of a process.
coverage: $(STAMP)  ## lines that no test runs, in any process; ARGS="tests/rpc" chooses
	$(PIP) 'coverage>=7.10.4'
	rm -rf $(COVERAGE)
	mkdir -p $(COVERAGE)
	PATH="$(BIN):$$PATH" COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage run -m pytest --numprocesses logical --dist loadfile --no-loadscope-reorder $(ARGS)
	COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage combine --quiet $(COVERAGE)
	COVERAGE_FILE=$(COVERAGE)/data $(BIN)/python -m coverage report

docs: $(VENV)/docs  ## the pages as a site, in build/site; ARGS="-b linkcheck" asks hosts
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate.py --errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs $(ARGS) . build/site
$(VENV)/docs: $(STAMP)
	$(PIP) --editable '.[dev,docs]'
	@touch $@
