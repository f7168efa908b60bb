# `make quickstart` trains, and resumes if it was stopped; `make test` tests. Both create .venv, and need only Python.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TRAIN = $(VENV)/.installed-train
DEV = $(VENV)/.installed-dev

.PHONY: quickstart test test-slow lint format docs clean

quickstart: $(TRAIN)
	$(BIN)/python -m train compare configs/quickstart.yaml \
		--strategies top_n,prism,unbiased,collective,dense \
		output=runs/quickstart --resume

test: $(DEV)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not federation"

test-slow: $(DEV)
	$(BIN)/python -m pytest -m slow

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DEV)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("this needs Python 3.11 or newer, and python3 is %d.%d; choose another with make PYTHON=python3.12 quickstart" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Installing torch and the training program into $(VENV). On Linux torch includes CUDA: 3 GB to download, 6 GB on disk."
	@echo "To avoid CUDA, stop here (Ctrl-C) and install the CPU build of torch first: see docs/guides/hardware.md."
	$(PYTHON) -m venv $(VENV)

$(TRAIN): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo "Installing what tests and documentation need into $(VENV), such as transformers, ONNX and Sphinx: 1.1 GB on disk."
	$(BIN)/python -m pip install --quiet --editable '.[train,wandb,dev]'
	@touch $(TRAIN) $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
