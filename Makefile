PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export DELAYQ_VENV := $(CURDIR)/$(VENV)

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all oracle test-matrix matrix guarantees reference lint docs docs-links bench chaos coverage mutants messages screenshots clean

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

demo: ## Watch a shop whose orders cancel themselves (ORDERS=... REVIEWS=... for recorded orders)
	@$(PYTHON) tools/environment.py demo
	@$(BIN)/python example_project/demo.py

check: ## Before each commit: style, types, and the tests that are not slow, on SQLite; four minutes
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tests/servers.py run --only redis -- $(BIN)/python tools/suite.py check

test: ## Set up, then run all tests on SQLite, and on each server those marked dialect (STAGES="lint sqlite": only these)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tests/servers.py run -- $(BIN)/python tools/suite.py $(STAGES)

test-all: ## All tests on each database, and on the newest Python and Django (DAY=leap: as if it were the next 29 February)
	@DELAYQ_TEST_DAY=$(DAY) $(MAKE) --no-print-directory test STAGES="all $(STAGES)"

oracle: ## The tests that a change of the structure must leave as they are, on every database this machine has
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tests/servers.py run -- $(BIN)/python tools/suite.py oracle-sqlite oracle-postgresql oracle-mariadb

test-matrix: ## Unit tests and most integration tests on the newest Python and Django found here (SQLite)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tests/servers.py run --only redis -- $(BIN)/python tools/suite.py newest

matrix: ## The built wheel on each supported Python and Django, installed and used (ONLY="3.12 6.0" or ONLY=lowest, a few minutes)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tests/servers.py run --only redis -- $(BIN)/python tools/matrix.py $(ONLY)

guarantees: ## Write the results of the last `make test` into docs/guarantees-tests.md
	@$(BIN)/python tools/guarantees.py fill

reference: ## Write docs/reference.md from the code
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tools/reference.py

lint: ## Style, types, import rules, migrations, the site of the docs
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tools/suite.py lint

docs: ## Build the site into build/docs; broken internal links and other warnings are errors
	@DELAYQ_VENV=$(CURDIR)/.venv-docs $(PYTHON) tools/environment.py docs
	@.venv-docs/bin/sphinx-build -W --keep-going -q -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

docs-links: ## Check the links of the site to other sites (needs the internet)
	@DELAYQ_VENV=$(CURDIR)/.venv-docs $(PYTHON) tools/environment.py docs
	@.venv-docs/bin/sphinx-build -b linkcheck -q -d build/doctrees docs build/links

bench: ## Measure the library and seven task queues side by side (ONLY=schedule,lag QUICK=1 BUSY=1 AGAINST=../checkout ORDERS=...)
	@DELAYQ_VENV=$(CURDIR)/.venv-bench $(PYTHON) tools/environment.py bench
	@.venv-bench/bin/python -m benchmarks $(if $(QUICK),--quick) $(if $(BUSY),--busy) $(if $(ONLY),--only "$(ONLY)") $(if $(AGAINST),--against "$(AGAINST)")

chaos: ## Real processes under seeded faults, and a verdict (MINUTES=1, RUNS=1, DB=postgresql|mariadb|sqlite, SEED=...)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python -m tests.e2e.chaos.run --minutes $(or $(MINUTES),1) --runs $(or $(RUNS),1) --db $(or $(DB),postgresql) $(if $(SEED),--seed $(SEED))

coverage: ## Which lines and branches the tests run, on SQLite and PostgreSQL (about a quarter of an hour)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/coverage erase
	@DELAYQ_TEST_DB=sqlite $(BIN)/python tests/servers.py run -- $(BIN)/coverage run -m pytest -q -n 2 -p no:randomly -m "not browser and not real_orders" tests/unit tests/engine tests/integration tests/e2e/crashes tests/e2e/test_worker_log.py
	@DELAYQ_TEST_DB=postgresql $(BIN)/python tests/servers.py run -- $(BIN)/coverage run -m pytest -q -n 2 -p no:randomly -m "not browser and not real_orders" tests/integration
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

mutants: ## Plant small faults in the Python core and in the Lua files: each must fail a test (ONLY=..., a quarter of an hour)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tests/servers.py run -- $(BIN)/python tools/mutants.py $(if $(ONLY),--only "$(ONLY)")
	$(if $(ONLY),,@$(BIN)/python tests/servers.py run --only redis -- $(BIN)/pytest -q -n 2 tests/engine/test_mutants.py)

messages: ## Bring every language's catalogue up to the sources and compile it (needs gettext)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/python tools/messages.py

screenshots: ## Take the pictures of README and docs again (needs Chromium)
	@$(PYTHON) tools/environment.py test
	@$(BIN)/pytest -n 0 tests/e2e/admin/screenshots.py

clean: ## Remove what the other commands created
	rm -rf $(VENV) .venv-newest .venv-bench .venv-docs .demo .results build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
