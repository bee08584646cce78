# Every chore is one word; each makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := aiodigest tests examples benchmarks

.PHONY: demo test check coverage latency mutants format clean

demo: $(VENV)/.standard
	@$(BIN)/aiodigest demo

test: $(VENV)/.dev
	@$(BIN)/pytest -n auto --dist worksteal

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/mypy examples
	$(BIN)/lint-imports

coverage: $(VENV)/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n auto --dist worksteal
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

latency: $(VENV)/.dev
	@$(BIN)/python benchmarks/latency.py

mutants: $(VENV)/.dev
	@$(BIN)/python tests/mutants/run.py

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) .coverage* .hypothesis .pytest_cache .ruff_cache .mypy_cache .import_linter_cache dist

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.standard: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing aiodigest into $(VENV) ..."
	@$(BIN)/pip install -qq --disable-pip-version-check -e '.[standard]'
	@touch $@

# --group came with pip 25.1, so pip itself comes first
$(VENV)/.dev: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing aiodigest and its development tools into $(VENV) ..."
	@$(BIN)/pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/pip install -qq -e '.[standard]' --group dev
	@touch $@ $(VENV)/.standard
