# `make quickstart` trains (stopped, it goes on when called again), `make test` tests; both set up .venv on a machine that has nothing but Python.
PYTHON ?= python3
VENV ?= .venv
# What to install: `make test EXTRAS=train,wandb,dev,r` adds R's packages as oracle (needs R itself).
EXTRAS ?= train,wandb,dev
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed-$(EXTRAS)

.PHONY: quickstart test test-slow lint format docs clean

quickstart: $(INSTALLED)
	$(BIN)/python -m train compare configs/quickstart.yaml \
		--strategies top_n,prism,unbiased,collective,dense \
		output=runs/quickstart --resume

# One thread per test process: the models are small, and two processes on two cores are faster than two threads.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
