# The two commands on a fresh machine: `make train` and `make test`. Each builds .venv where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := accelz accelz_cpu accelz_cuda accelz_xpu accelz_hpu zero
STAMP := $(VENV)/.installed
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
RELEASE := .venv-release
RELEASE_STAMP := $(RELEASE)/.installed
SIM := examples/sim_backend
SIM_STAMP := $(VENV)/.sim-installed
BROWSERS := chromium chromium-browser google-chrome
RANKS ?= 2
WORKERS ?= 3
ROOM ?=
ARGS ?=
# More workers than a small machine has processors: while one waits for ranks to fail, others have all of them.
# A file's tests stay together, and files begin in the order of tests/conftest.py: the slow ones first.
PYTEST_OPTIONS = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(PYTEST_OPTIONS)
# With AGAIN=1, as in CI: what has failed, which stays told, is run once more, alone. Other things than the code fail
# tests of many processes on a busy machine; what fails twice fails.
AGAIN ?=
again = $(if $(AGAIN),|| (echo "once more, alone, what failed above:" && \
	$(1) -m pytest -n 0 --last-failed --last-failed-no-failures none --maxfail 1 $(2)))

.PHONY: setup sim arguments train test quick environments frameworks browser docs release check lints format bench clean

setup: $(STAMP)

$(STAMP): constraints.txt $(PACKAGES:%=%/pyproject.toml) accelz_cpu/CMakeLists.txt $(wildcard accelz_cpu/csrc/*)
	@echo "building $(VENV), with torch and the tools of constraints.txt: a few minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r constraints.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps $(PACKAGES:%=-e ./%)
	touch $@

sim: $(SIM_STAMP)  ## the simulated accelerator, a vendor's package (needs a C++ compiler)

$(SIM_STAMP): $(STAMP) $(wildcard $(SIM)/csrc/*) $(SIM)/setup.py $(SIM)/pyproject.toml
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e ./$(SIM)
	touch $@

arguments:
	@$(PYTHON) examples/lm_settings.py $(RANKS) $(ARGS)

ifneq ($(filter -h --help,$(ARGS)),)
train: arguments  ## which print the help
else
train: arguments setup  ## a byte-level language model on Python's own sources, sharded over RANKS processes
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_lm.py $(ARGS)
endif

test quick frameworks: export PYTHONDONTWRITEBYTECODE =  # hundreds of processes import the packages: compiled once
test: setup sim  ## everything on the CPU, then the engine's tests once more on the simulated accelerator
ifeq ($(ROOM),)
	$(PYTEST) $(ARGS) $(call again,$(BIN)/python,)
	$(PYTEST) tests/zero --device sim --loop plain $(ARGS) $(call again,$(BIN)/python,tests/zero --device sim --loop plain)
else  ## with ROOM=gradients: one room of zero, or one folder of tests, on the CPU
	$(PYTEST) $(or $(wildcard tests/zero/$(ROOM) tests/$(ROOM)),$(error there is no tests/zero/$(ROOM) and no tests/$(ROOM))) $(ARGS)
endif

quick: WORKERS = 2
quick: setup  ## what to run at every change, in less than a minute: what one process tests at once
	$(PYTEST) --quick $(ARGS)

environments: $(FRAMEWORKS_STAMP) $(DOCS_STAMP) browser  ## what `make frameworks` and `make docs` need, ahead of them

frameworks: setup $(FRAMEWORKS_STAMP) browser  ## zero.integrations with the real frameworks, which .venv does without
	$(FRAMEWORKS)/bin/python -m pytest $(PYTEST_OPTIONS) tests/frameworks $(ARGS) \
		$(call again,$(FRAMEWORKS)/bin/python,tests/frameworks)

# Without one, and without root and apt to install it, those tests are skipped.
browser:  # in which the tests look at reports
	@$(foreach name,$(BROWSERS),command -v $(name) >/dev/null ||) \
	(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) >/dev/null 2>&1 || \
	echo "no browser of $(BROWSERS) is here, and apt-get cannot install one: reports are not looked at"

# Layered over .venv: a .pth file there adds what .venv has, torch and our packages among it. Of its 14,000 modules
# tests import a few hundred, which are compiled then.
$(FRAMEWORKS_STAMP): $(STAMP) constraints-frameworks.txt scripts/layer_venv.py
	@echo "building $(FRAMEWORKS), with the frameworks of constraints-frameworks.txt: a minute the first time"
	test -x $(FRAMEWORKS)/bin/python || $(BIN)/python -m venv --without-pip $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python scripts/layer_venv.py $(VENV)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-compile -c constraints.txt -r constraints-frameworks.txt
	touch $@

docs: $(DOCS_STAMP)  ## the documentation as a site, in build/site; a broken link or a missing name fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs --quiet build
	$(DOCS)/bin/python -m pytest -n 0 tests/docs $(ARGS) $(call again,$(DOCS)/bin/python,tests/docs)

$(DOCS_STAMP): $(STAMP) constraints-docs.txt scripts/layer_venv.py
	test -x $(DOCS)/bin/python || $(BIN)/python -m venv --without-pip $(DOCS)
	$(DOCS)/bin/python scripts/layer_venv.py $(VENV)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -r constraints-docs.txt
	touch $@

release: $(RELEASE_STAMP)  ## wheels, source archives and an SBOM in dist, tried; URL is the public repository's
	$(RELEASE)/bin/python -m scripts.release $(or $(URL),$(error URL=https://HOST/OWNER/NAME is missing)) --out dist
	$(RELEASE)/bin/python -m scripts.try_release dist $(ARGS)

$(RELEASE_STAMP): $(STAMP) constraints-release.txt scripts/layer_venv.py
	test -x $(RELEASE)/bin/python || $(BIN)/python -m venv --without-pip $(RELEASE)
	$(RELEASE)/bin/python scripts/layer_venv.py $(VENV)
	$(RELEASE)/bin/python -m pip install --quiet -c constraints.txt -r constraints-release.txt
	touch $@

check: setup lints  ## formatting, lint, types, and the project's own lints, one script each
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lints: setup
	$(BIN)/python scripts/lint_devices.py
	$(BIN)/python scripts/lint_rooms.py
	$(BIN)/python -m scripts.lint_paths
	$(BIN)/python -m scripts.lint_links
	$(BIN)/python scripts/lint_store.py
	$(BIN)/python scripts/lint_versions.py
	$(BIN)/python -m scripts.lint_tests
	$(BIN)/python scripts/lint_tiers.py
	$(BIN)/python -m scripts.device_table
	$(BIN)/python -m scripts.error_index

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) $(RELEASE) build dist runs
