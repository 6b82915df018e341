# Every target sets up what it needs: a virtual environment in .venv with every member of this tree, editable.
# Nothing is needed beforehand but make, python3 and its venv module; no target needs root.
#
#   make demo                                   trains a small GPT-2 and goes on from its checkpoint
#   make demo DEMO_NPROC=4                      on four ranks
#   make test PYTEST_ARGS="-k checkpoint -x"    what pytest is given in addition ("-n 0": one process, for a debugger)
#   make test WORKERS=4                         in four processes, each of which starts ranks of its own
#   make venv TORCH="torch==2.11.0"             another torch; pip's own variables (PIP_INDEX_URL, ...) pass through

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
WORKERS ?= 2
# What is compiled is kept with the virtual environment, not in the user's cache folder.
POLYSCALE_CACHE ?= $(abspath $(VENV))/cache
export DEMO_NPROC DEMO_ACCELERATOR POLYSCALE_CACHE

BIN := $(VENV)/bin
MEMBERS := core $(wildcard accelerators/* plugins/*) $(patsubst %/pyproject.toml,%,$(wildcard csrc/*/pyproject.toml)) entrypoints .
# In this order, so that no long file is left to one process at the end.
TESTS := $(wildcard tests entrypoints/tests accelerators/*/tests plugins/*/tests csrc/*/tests core/tests)
PACKAGES := $(filter-out %/tests,$(patsubst %/__init__.py,%,$(wildcard $(addsuffix /*/__init__.py,$(filter-out .,$(MEMBERS))))))
# One thread per process: tests and their ranks share the cores. A file is one process's: its tests share ranks and builds.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help venv kernels demo test verify test-long lint format types wheels gpu-wheels gpu-check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1|/p' Makefile | while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

venv: ## the virtual environment; done by every target that needs it
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "Error: $(PYTHON) is not there. Install Python 3.10 or newer (Debian: apt-get install python3-venv), or name one with PYTHON=." >&2; exit 2; }
	@$(PYTHON) tools/setup_venv.py "$(VENV)" --torch "$(TORCH)"

kernels: venv ## compile the kernels for this machine ahead of their first use
	@$(BIN)/scale build --all

demo: venv ## train a small GPT-2 on this machine, save it, load it elsewhere, go on (DEMO_NPROC, DEMO_ACCELERATOR)
	@$(BIN)/python tools/demo.py

test: venv ## what is tested at every change (at most 12 minutes)
	$(PYTEST) -m "not long and not gpu" $(TESTS)

verify: test ## make test, then record in the members that it passed on this hardware
	$(BIN)/python tools/record_verified.py

test-long: venv ## repetitions and long runs (at most 30 minutes)
	$(PYTEST) -m "long and not gpu" $(TESTS)

lint: venv ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv ## ruff: apply rules and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv ## mypy: strict on core, as configured on the rest
	$(BIN)/mypy --strict core/polyscale
	$(BIN)/mypy $(PACKAGES) tools

wheels: venv ## a wheel of every member in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $(addprefix ./,$(MEMBERS))
	@ls dist

gpu-wheels: venv ## fetch into .whl/ what a GPU machine without network lacks
	@bash tools/gpu_check.sh --fetch "$(BIN)/python"

gpu-check: ## on a GPU machine without network: GPU tests and the demo (under 5 minutes)
	@bash tools/gpu_check.sh

clean: ## remove what targets made, the virtual environment excepted
	rm -rf dist runs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
