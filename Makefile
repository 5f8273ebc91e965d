# `make demo` and `make test` need nothing but Python 3.11 or newer; they make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: demo test test-fast bench lint env clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rewardflow needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,tensorboard,wandb,mlflow,ray]'
	# Apart: PEFT would load it in every worker that makes a LoRA. Its tests put the folder on their path.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade --target $(VENV)/apart bitsandbytes
	touch $@

demo: env
	$(BIN)/rewardflow run shapes --as demo

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest

test-fast: lint
	$(BIN)/pytest -m 'not slow'

# What the framework costs beside the bare work, on all cores; BENCH chooses: make bench BENCH="sample update --check".
bench: env
	$(BIN)/python -m tests.bench.run $(BENCH)

clean:
	rm -rf $(VENV) build *.egg-info
