# `make quickstart` trains (stopped, it resumes when called again), `make test` tests; both set up .venv on a machine that has nothing but Python.
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

# One thread per test process: the models are small, and two processes on two cores are faster than two threads.
test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not federation"

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

$(TRAIN): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Installs torch and what training needs into $(VENV). On Linux torch brings CUDA: 3 GB to fetch, 7 GB on disk."
	@echo "Without CUDA it is 0.5 GB and 1.5 GB; stop here and install torch first, as docs/guides/hardware.md says."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	@touch $@

$(DEV): $(TRAIN) pyproject.toml
	@echo "Adds what tests and documentation need to $(VENV), e.g. transformers, ONNX, Sphinx: 0.3 GB to fetch, 1 GB on disk."
	$(BIN)/python -m pip install --quiet --editable '.[train,wandb,dev]'
	@touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
