# make train   trains the default agent on this machine     (ARGS="key=value ...")
# make test    runs the tests, in WORKERS=2 processes       (ARGS="tests/sched -k window")
#              (JAX_COMPILATION_CACHE_DIR=FOLDER keeps compiled programs for the next time)
# make lint    checks format, lint and types
PYTHON  ?= python3
VENV    ?= .venv
ARGS    ?=
WORKERS ?= 2

BIN := $(VENV)/bin

.PHONY: train test lint format clean

train: $(VENV)/run.stamp
	$(BIN)/python -m experiments.train $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A stamp is written only when the whole install succeeded, and is older than
# setup.cfg when the dependencies changed. The virtual environment remembers
# its Python: asking for another one makes it anew.
$(VENV)/python.stamp: FORCE
	@wanted="$$($(PYTHON) -c 'import sys; print(sys.version)')" || exit 1; \
	if [ "$$(cat $@ 2>/dev/null)" != "$$wanted" ]; then \
		$(PYTHON) -c 'import sys; sys.exit("forge_jax needs Python 3.11 or newer, not " + sys.version.split()[0]) if sys.version_info < (3, 11) else None' && \
		rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && printf '%s\n' "$$wanted" > $@; \
	fi

$(VENV)/run.stamp: $(VENV)/python.stamp setup.cfg pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/test.stamp: $(VENV)/python.stamp setup.cfg pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/run.stamp

clean:
	rm -rf $(VENV) outputs multirun

.PHONY: FORCE
FORCE:
