# `make quickstart` and `make test` do everything on a fresh machine with Python 3.10 to 3.13 and git.

PYTHON ?= python3
# Pinned, so that the first run does what it did here. TORCH=torch takes the newest.
TORCH ?= torch==2.13.0
VENV := .venv
READY := $(VENV)/ready

# `make quickstart TARGET=… DRAFTER=… EAGLE=…` runs any pair: folders or Hub ids, a drafter or an EAGLE head or both.
PAIR := $(if $(TARGET), --target "$(TARGET)")$(if $(DRAFTER), --drafter "$(DRAFTER)")$(if $(EAGLE), --eagle "$(EAGLE)")

.PHONY: quickstart test test-all test-oldest compiler lint format clean

quickstart: $(READY) compiler
	$(if $(PAIR),,HF_HUB_OFFLINE=1 )$(VENV)/bin/python examples/quickstart.py$(PAIR)

test: $(READY) compiler
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest

# With every case of every family, which takes several times as long.
test-all: $(READY) compiler
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -m ""

# The oldest releases that setup.cfg allows of the libraries whose parts are used most closely.
test-oldest: $(READY)
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target build/oldest \
	$$(sed -nE 's/^ +((transformers|accelerate|peft|typer|triton)>=[0-9.]+).*/\1.*/p' setup.cfg | sed 's/>=/==/' | sort -u)
	PYTHONPATH=build/oldest HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/test_imports.py tests/alignment \
	tests/generation/test_exactness.py tests/generation/test_batches.py tests/drafters/test_dflash.py \
	tests/commands/test_commands.py tests/kernels/test_compiled_kernels.py

# Everything works without one, and what is worth having it for says so itself where it runs.
compiler:
	@command -v "$${CXX:-g++}" > /dev/null || echo "There is no C++ compiler: plain torch scores LM heads, slower where \
	they are large, and tests of the compiled kernels are left out. Install g++, or set CXX, to have them."

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --upgrade pip
	$(VENV)/bin/python -m pip install "$(TORCH)"
	$(VENV)/bin/python -m pip install --editable ".[test]"
	@# There are no wheels of it.
	$(VENV)/bin/python -m pip install --editable ".[retrieval]" || echo "hnswlib could not be built, which takes a C++ \
	compiler: tests of the semantic index are left out."
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache *.egg-info
