PYTHON ?= python3
BIN := .venv/bin
# Two workers: what a laptop has. Results do not depend on it. A worker that is done takes tests from the other.
XDIST := -n 2 --dist worksteal
# With NVIDIA's driver the recipes train on the GPU, which TensorFlow sees with its CUDA wheels. `make train CUDA=` does
# without them.
NVIDIA_DRIVER ?= /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so.1
CUDA ?= $(if $(wildcard $(NVIDIA_DRIVER)),tensorflow[and-cuda])
PYTEST := $(BIN)/python -m pytest $(XDIST)
# The Python of Colab's images, where this machine has it: on PATH, or one of pyenv's.
COLAB_PYTHON ?= $(shell python3.13 -c "" 2> /dev/null && echo python3.13 || ls $(HOME)/.pyenv/versions/3.13*/bin/python3.13 2> /dev/null | tail -1)
# TensorFlow keeps what XLA compiled until the process ends: the tests in parts, so that a worker stays below 4 GB.
THIRDS := "tests/[b-k]*/" "tests/[l-q]*/" "tests/[r-z]*/ tests/test_*.py"
SIXTHS := "tests/[b-e]*/" "tests/[f-k]*/" "tests/[l-m]*/" "tests/[n-q]*/" "tests/[r-s]*/" "tests/[t-z]*/ tests/test_*.py"

.PHONY: train test test-rest bench test-all test-tensorflow test-jax test-oldest test-colab test-notebook bundle docs notebooks lint sweep tasks parity clean

train: .venv/train  ## Train the digits recipe and export it as a float32 SavedModel.
	$(BIN)/python -m recipes digits

test: lint test-tensorflow test-jax  ## What tells within ten minutes that a change is right.

test-tensorflow: .venv/test
	for part in $(THIRDS); do KERAS_BACKEND=tensorflow $(PYTEST) -m "not ci and not slow" $$part || exit 1; done

test-jax: .venv/test
	KERAS_BACKEND=jax $(PYTEST) -m "not ci and not slow and not once"

test-rest: .venv/test test-notebook  ## What continuous integration runs after `make test`.
	for part in $(SIXTHS); do KERAS_BACKEND=tensorflow $(PYTEST) -m "ci and not slow" $$part || exit 1; done
	KERAS_BACKEND=jax $(PYTEST) -m "ci and not slow and not once"

test-all: test test-rest sweep tasks parity test-oldest test-colab  ## Also what takes longer; see docs/ for the last output.
	KERAS_BACKEND=tensorflow $(PYTEST) -m slow
	KERAS_BACKEND=jax $(PYTEST) -m "slow or once"

bench: .venv/test  ## A training step of three models beside their peers; the tables go to docs/results.
	$(BIN)/python benchmarks/peers.py --out docs/results

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

sweep: .venv/test  ## export_float32 on every architecture of keras.applications and on KerasHub backbones.
	$(BIN)/python tests/sweep.py --markdown docs/export-sweep.md

tasks: .venv/test  ## Every task of KerasHub through the kit; rows that are there already are kept.
	$(BIN)/python tests/task_sweep.py --markdown docs/kerashub-tasks.md

parity: .venv/train  ## The digits recipe in three precisions, three seeds each.
	$(BIN)/python -m recipes.parity digits --seeds 3 --out docs/digits-parity.md

test-oldest: .venv-oldest/test  ## The same tests on the oldest Keras, TensorFlow and JAX supported.
	KERAS_BACKEND=tensorflow .venv-oldest/bin/python -m pytest $(XDIST) -m "not slow"
	KERAS_BACKEND=jax .venv-oldest/bin/python -m pytest $(XDIST) -m "not slow"

test-colab: .venv-colab/test  ## The tests on the versions of Colab's TPU image, without TensorFlow.
	KERAS_BACKEND=jax .venv-colab/bin/python -m pytest $(XDIST) -m "not slow"

test-notebook: .venv/test .venv-colab-tpu/ready  ## The TPU notebook in an empty folder, with what Colab's image has.
	$(BIN)/python -m pytest -m slow tests/colab -k train_on_tpu

docs: .venv/docs  ## The site, in build/site; a warning is an error.
	$(BIN)/python -m mkdocs build

bundle:  ## build/keras_mp.zip: the repository without its tests and history, for a notebook.
	$(PYTHON) colab/bundle.py

notebooks: .venv/test .venv-colab-tpu/ready .venv-colab-cpu/ready  ## Make the notebooks from their sources, and run them.
	$(BIN)/python colab/build.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/train .venv/test .venv/docs: .venv/%: pyproject.toml constraints.txt | .venv/bin/python
	$(if $(CUDA),@echo "NVIDIA driver found: $(CUDA) is installed as well (several GB). To leave it out: make $@ CUDA=")
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]" $(if $(CUDA),"$(CUDA)")
	touch $@

.venv-oldest/test: pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e ".[test]"
	touch $@

.venv-colab/test: pyproject.toml constraints-colab.txt
	test -x .venv-colab/bin/python || $(PYTHON) -m venv .venv-colab
	.venv-colab/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-colab.txt -e ".[colab]"
	touch $@

.venv-colab-tpu/ready .venv-colab-cpu/ready: .venv-colab-%/ready: colab/image-%.txt
	test -x .venv-colab-$*/bin/python || $(or $(COLAB_PYTHON),$(PYTHON)) -m venv .venv-colab-$*
	.venv-colab-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-colab .venv-colab-tpu .venv-colab-cpu runs build *.egg-info
