# TESTS are arguments of pytest for test-slow and test-matrix, such as TESTS=tests/mixers; CELL=lowest or CELL=newest runs one.
# Targets create .venv if it is missing, and update it if pyproject.toml has changed.

PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
TEACHER := cvt_softmax_nano.vz_cifar10

.PHONY: help demo test test-slow test-gpu test-matrix lint style format docs site dist measure measure-gpu bench-import clean

help:
	@echo 'make demo          train a model on the bundled sample, convert another to its attention, and compare them on a page (6 minutes on 2 cores)'
	@echo 'make test          check the style and run the tests'
	@echo 'make test-slow     run the tests that take minutes'
	@echo 'make test-gpu      run the tests of mixers, kernels and compiled models on an NVIDIA GPU'
	@echo 'make test-matrix   run the tests with the lowest and with the newest versions of Python, torch, timm and others'
	@echo 'make lint          check the style and the types'
	@echo 'make format        fix the style'
	@echo 'make docs          write docs/mixers.md, docs/api.md, CITATION.cff and the tables of docs/models.md, performance.md, targets.md, gpu.md, export.md, swap.md, transfer.md, study.md'
	@echo 'make site          build the documentation as a site in build/site'
	@echo 'make dist          build the sdist and the wheel in dist, and test them'
	@echo 'make measure       append to weights/benchmarks.csv (over half an hour on 2 idle cores)'
	@echo 'make measure-gpu   the same on an NVIDIA GPU, for docs/gpu.md (under 30 minutes)'
	@echo 'make bench-import  time `import vitzoo` against `import timm`'
	@echo 'make clean         remove .venv, caches, dist and $(DEMO)'

demo: .venv/installed
	@rm -rf $(DEMO)
	$(BIN)/python train.py --config quickstart.yaml --output $(DEMO)/scratch
	$(BIN)/python -m vitzoo transfer $(TEACHER) --config transfer/sample.yaml --output $(DEMO)/converted
	$(BIN)/python validate.py $(TEACHER) $(DEMO)/converted $(DEMO)/scratch --data-dir sample --results-file $(DEMO)/results.csv
	$(BIN)/python -m vitzoo report $(TEACHER) $(DEMO)/converted $(DEMO)/scratch --data-dir sample --out $(DEMO)/report

test: style
	$(BIN)/python -m pytest

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow $(TESTS)

test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu

test-matrix:
	$(PYTHON) tools/matrix.py $(CELL:%=--cell %) $(TESTS)

lint: style
	$(BIN)/mypy

style: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/installed
	$(BIN)/python tools/docs_mixers.py
	$(BIN)/python tools/docs_models.py
	$(BIN)/python tools/docs_performance.py
	$(BIN)/python tools/docs_targets.py
	$(BIN)/python tools/docs_gpu.py
	$(BIN)/python tools/docs_export.py
	$(BIN)/python tools/docs_transfer.py
	$(BIN)/python tools/docs_study.py
	$(BIN)/python tools/docs_swap.py
	$(BIN)/python tools/docs_citation.py
	$(BIN)/python tools/docs_api.py

site: .venv/installed
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[docs]'
	@# the variable turns off an advertisement for a successor of mkdocs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: .venv/installed
	@rm -rf dist
	$(BIN)/python -m pip install -qq --disable-pip-version-check build
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest -n 0 -m slow tests/test_distribution.py

measure: .venv/installed
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[bench]'
	PYTHON=$(BIN)/python tools/measure.sh

measure-gpu: .venv/installed
	$(BIN)/python tools/measure_gpu.py

bench-import: .venv/installed
	$(BIN)/python tools/import_time.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info $(DEMO)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the stamp is written last, so that an interrupted installation is repeated
.venv/installed: pyproject.toml
	@echo 'creating .venv and installing (about a minute, 6 GB) ...'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[test]'
	@touch $@
