# Every target builds .venv by itself when it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
EXTRAS ?= dev,hub,dp,certify,flower
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo zoo test check fast deploy faults lint types imports lengths house goldens bench docs format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $(STAMP)

demo: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/gradveil audit --out runs/demo --resume
	@echo "Report: runs/demo/report.html"

test: $(STAMP)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not deploy"

fast: $(STAMP)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not deploy"

deploy: $(STAMP)
	$(BIN)/pytest -q -m deploy -p no:xdist

faults: $(STAMP)
	GRADVEIL_TRIPLES=3000 $(BIN)/pytest -q -n $(WORKERS) --dist worksteal --timeout 3600 tests/certificates/test_sound.py

check: lint types imports lengths house fast

lint: $(STAMP)
	$(BIN)/ruff format --check src tests bench tools examples
	$(BIN)/ruff check src tests bench tools examples

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

lengths: $(STAMP)
	$(BIN)/python tools/file_lengths.py

house: $(STAMP)
	$(BIN)/python tools/house.py

zoo: $(STAMP)
	$(BIN)/python tools/zoo.py

goldens: $(STAMP)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python tools/goldens.py check

format: $(STAMP)
	$(BIN)/ruff format src tests bench tools examples
	$(BIN)/ruff check --fix src tests bench tools examples

bench: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/python bench/run.py

docs: $(STAMP)
	$(BIN)/python tools/make_docs.py
	$(BIN)/python tools/compatibility_page.py
	$(BIN)/python tools/speed_page.py
	$(BIN)/python tools/malicious_page.py
	$(BIN)/python tools/paper_page.py
	$(BIN)/python tools/leaderboard_page.py
	$(BIN)/python tools/leakage_tables.py
	$(BIN)/python tools/theory_tables.py

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache
