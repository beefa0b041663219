PYTHON ?= $(shell command -v python3.11 || command -v python3)
export PYTHON
BIN := .venv/bin
STAMP := .venv/.installed
ALL_STAMP := .venv/.all-installed
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
DEMO := .venv/.demo
DEMO_STAMP := $(DEMO)/.installed

.PHONY: help venv venv-all postgresql object-servers torchtitan demo quick test test-long test-all stress check format clean
.PHONY: bench bench-smoke docs canary

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP) ## make .venv, with what check, test, docs and bench-smoke need

# The stamp is written last, so an install that broke off is taken up again by the next make.
$(STAMP): pyproject.toml setup.py setup.cfg constraints.txt $(wildcard tensorcas_mlflow/native/src/*)
	.ci/compiler
	$(PYTHON) -m venv .venv
	$(INSTALL) -e ".[test]"
	@# It depends on libraries for several GPUs, 469 MB, which it loads where it trains on them.
	$(INSTALL) --no-deps "xgboost>=2.1"
	@# pip would compile all of it, on one core. Nothing imports the left out; some packages ship templates, which fail.
	@$(BIN)/python -m compileall -qq -j 0 -x '/(tests|transformers/models|plotly|databricks/sdk)/' .venv/lib tensorcas_mlflow flavors || true
	touch $@

venv-all: $(ALL_STAMP) ## add to .venv what the other targets need: Ray, CatBoost, Lightning, transformers and more

$(ALL_STAMP): $(STAMP)
	$(INSTALL) -e ".[dev]"
	touch $@

postgresql: ## make sure that PostgreSQL is installed, which tests of servers need; installs Debian's package
	.ci/postgresql

object-servers: ## install what long tests of object stores run, below .venv: LocalStack's S3, and Azurite
	.ci/localstack
	.ci/azurite

torchtitan: $(STAMP) ## install torchtitan, which long tests of callbacks run, below .venv
	.ci/torchtitan

demo: $(DEMO_STAMP) ## run examples/quickstart.py, in an environment of its own
	$(DEMO)/bin/python examples/quickstart.py

$(DEMO_STAMP): pyproject.toml setup.py setup.cfg constraints.txt $(wildcard tensorcas_mlflow/native/src/*)
	.ci/compiler
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[torch,sklearn,xgboost]"
	touch $@

quick: $(STAMP) ## run the tests of a room and of the rooms on the line above it in the contract: ROOM=store
	folders=$$($(BIN)/python tests/quick.py $(ROOM)) && $(BIN)/python -m pytest $$folders

test: $(STAMP) postgresql ## run the tests
	$(BIN)/python -m pytest

test-long: $(ALL_STAMP) postgresql object-servers torchtitan ## run the tests that take long, all schedules and every mutant among them
	$(BIN)/python -m pytest -m long

test-all: test test-long ## run all tests

stress: $(STAMP) ## let processes race, and explore the save/collect protocol further than the tests do; an hour and more
	TENSORCAS_RACE_S=180 $(BIN)/python -m pytest -n 0 -m long tests/race
	TENSORCAS_SCHEDULES=100000 TENSORCAS_PREEMPTIONS=1 TENSORCAS_ALL_STATES=1 $(BIN)/python -m pytest -m '' tests/protocol

check: $(STAMP) ## lint, formatting, types, layers; changes nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## format the code and mend what the linter can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

CANARY := .venv/.canary

canary: ## test the integration with the newest MLflow and frameworks, below .venv. CANARY_CONSTRAINTS="FILE" caps some
	.ci/compiler
	$(PYTHON) -m venv $(CANARY)
	$(CANARY)/bin/python -m pip install -q --disable-pip-version-check --upgrade --upgrade-strategy eager \
		$(addprefix -c ,$(CANARY_CONSTRAINTS)) -e ".[test]" mlflow torch scikit-learn xgboost pyarrow numpy
	$(CANARY)/bin/python -m pip list | grep -iE '^(mlflow|torch|scikit-learn|xgboost|pyarrow|numpy) '
	$(CANARY)/bin/python -m pytest tests/integration

docs: $(STAMP) ## build the site of docs/ in build/docs; warnings are errors
	$(BIN)/python -m sphinx -q -W -b html docs build/docs

bench: $(STAMP) ## measure speed, size and memory beside other formats and tools; an hour. PARTS="save load" measures some
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python -m benchmarks $(PARTS)

bench-smoke: $(STAMP) ## see that the benchmark runs and that everybody gives back what it was given. PARTS as for bench
	$(BIN)/python -m benchmarks --smoke $(PARTS)

clean: ## remove what builds, checks and the demo leave; keep .venv
	rm -rf build dist *.egg-info flavors/*.egg-info demo
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
