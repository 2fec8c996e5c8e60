# Every target creates .venv first where it is missing, and updates it when pyproject.toml has changed.

PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
# threads that spin while they wait make a demo ten times slower where the machine has other work to do
CALM := GOMP_SPINCOUNT=1000

.PHONY: help demo test lint format docs measure bench-import clean

help:
	@echo 'make demo          train cvt_ls_13 on the bundled sample, validate it, draw its oversmoothing curve (6 minutes on 2 cores)'
	@echo 'make test          check the style and run the test suite'
	@echo 'make lint          check the style only'
	@echo 'make format        correct the style'
	@echo 'make docs          write docs/mixers.md and the tables of models and of speed anew'
	@echo 'make measure       measure the tables of speed (25 minutes on 2 quiet cores)'
	@echo 'make bench-import  time `import vitzoo` against `import timm`'
	@echo 'make clean         remove .venv, caches and $(DEMO)'

demo: .venv/installed
	@rm -rf $(DEMO)
	$(CALM) $(BIN)/python train.py --config configs/quickstart.yaml --output $(DEMO)
	$(CALM) $(BIN)/python validate.py $(DEMO) --results-file $(DEMO)/results.csv --plot $(DEMO)/oversmoothing.png

test: lint
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/installed
	$(BIN)/python tools/docs_mixers.py
	$(BIN)/python tools/docs_models.py
	$(BIN)/python tools/docs_performance.py

measure: .venv/installed
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[bench]'
	PYTHON=$(BIN)/python tools/measure.sh

bench-import: .venv/installed
	$(BIN)/python tools/import_time.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info $(DEMO)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the stamp is written last, so that an interrupted installation is taken up again
.venv/installed: pyproject.toml
	@echo 'creating .venv and installing (about a minute, 6 GB) ...'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[test]'
	@touch $@
