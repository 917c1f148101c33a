# Every target builds .venv by itself when it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
LOCKED := dev,hub,dp,certify,flower,site,play
EXTRAS ?= $(LOCKED)
# The files of the locked extras by their hashes, where this system and Python have such a list; `make LOCK=` goes without.
LOCK ?= $(if $(filter $(LOCKED),$(EXTRAS)),$(wildcard $(shell $(PYTHON) tools/lock.py --path)))
WORKERS ?= 2
FAULTS_MINUTES ?= 30
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: lock sbom release demo zoo test check fast deploy faults lint types imports house goldens bench site docs format clean

# pip compiles with one process; all cores do it in a part of the time. Without it every start of Python would.
$(STAMP): pyproject.toml constraints.txt $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py "$(EXTRAS)" $(LOCK)
	$(BIN)/python -m compileall -qq -j $(WORKERS) $(VENV)/lib || true
	@touch $(STAMP)

lock:
	$(PYTHON) tools/lock.py $(LOCKED)

sbom: $(STAMP)
	$(BIN)/python tools/sbom.py dist

release: $(STAMP)
	$(BIN)/python tools/release.py $(if $(DRAFT),--draft)
	$(BIN)/python tools/sbom.py dist

demo: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/gradveil audit --images 4 --out runs/demo --resume
	@echo "Open runs/demo/report.html in a browser: its first screen says what happened and what to do."

test: $(STAMP)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not deploy"

fast: $(STAMP)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not deploy"

deploy: $(STAMP)
	$(BIN)/pytest -q -m deploy -p no:xdist

# Each part is ended after its minutes, where a machine is too busy, and then fails.
faults: $(STAMP)
	GRADVEIL_FAULTS=long timeout -k 60 -s INT $(FAULTS_MINUTES)m $(BIN)/pytest -q -n $(WORKERS) --dist worksteal --timeout 1800 tests/faults
	GRADVEIL_TRIPLES=3000 timeout -k 60 -s INT $(FAULTS_MINUTES)m $(BIN)/pytest -q -n $(WORKERS) --dist worksteal --timeout 900 tests/certificates/test_sound.py

check: lint types imports house fast

lint: $(STAMP)
	$(BIN)/ruff format --check src tests studies tools examples conftest.py
	$(BIN)/ruff check src tests studies tools examples conftest.py

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

house: $(STAMP)
	$(BIN)/python tools/house.py

zoo: $(STAMP)
	$(BIN)/python tools/zoo.py

goldens: $(STAMP)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python tools/goldens.py check

format: $(STAMP)
	$(BIN)/ruff format src tests studies tools examples conftest.py
	$(BIN)/ruff check --fix src tests studies tools examples conftest.py

site: $(STAMP)
	$(BIN)/python tools/build_site.py
	@echo "Site: site/index.html"

bench: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/python studies/bench/run.py

docs: $(STAMP)
	$(BIN)/python tools/pages.py

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache
