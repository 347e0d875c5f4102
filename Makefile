PYTHON ?= python3
BIN := .venv/bin
# Two workers: what a laptop has. Results do not depend on it. A worker that is done takes tests from the other.
XDIST := -n 2 --dist worksteal
# With NVIDIA's driver the recipes train on the GPU, which TensorFlow sees with its CUDA wheels. `make train CUDA=` does
# without them.
NVIDIA_DRIVER ?= /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so.1
CUDA ?= $(if $(wildcard $(NVIDIA_DRIVER)),tensorflow[and-cuda])
PYTEST := $(BIN)/python -m pytest $(XDIST)
# The newest Python that this machine has, on PATH or pyenv's: that of Colab's images, and of `make test-newest`.
newest = $(shell for v in $(1); do python$$v -c "" 2> /dev/null && echo python$$v && break; ls -d $(HOME)/.pyenv/versions/$$v.*/bin/python$$v 2> /dev/null | tail -1 | grep . && break; done)
COLAB_PYTHON ?= $(call newest,3.13)
NEWEST_PYTHON ?= $(call newest,3.13 3.12)
on_newest = $(if $(NEWEST_PYTHON),KERAS_BACKEND=$(1) .venv-newest/bin/python -m pytest $(XDIST) -m "$(2)" $(3),@echo "$@: not run, for this machine has no Python 3.12 or 3.13, on PATH or of pyenv")
# On TensorFlow a worker keeps what XLA compiled for it: in one go it would hold more than 4 GB.
PARTS := "tests/[a-f]*/" "tests/[g-z]*/ tests/test_*.py"
# Folders, or files and tests of a folder, whose slow tests continuous integration has the time for, in parts for the same reason.
SLOW := "fp8 lean" "qat" "promises loss_scaling stability rebuild training" "backend cli export models bench planner/fit/test_kept_figures.py::test_models_that_differ_in_one_thing_do_not_share recipes/datasets recipes/test_cifar10.py system planner/test_assigned.py planner/test_lean_vocabulary.py"
# A file of each room whose code is other code on JAX: what a new version of Keras or JAX breaks.
NEWEST := backend/test_keras_patches.py export/test_saved_model.py fp8/test_layers.py lean/test_make_lean.py loss_scaling/test_optimizer_as_keras.py models/test_rotary.py numerics/test_nonfinite.py parallel/test_distribute.py planner/test_compile_report.py cli/test_environment.py promises qat/test_keras_modes.py rebuild/test_rebuild.py recipes/test_digits.py stability/test_stabilize.py training/test_prepare.py treatment/test_in_place.py
SLOW_ON_JAX := parallel fp8 lean promises loss_scaling stability rebuild training backend export models numerics planner/fit/test_advise.py planner/fit/test_advise_several_chips.py planner/test_fp8.py planner/test_lean_vocabulary.py

.PHONY: train test test-slow bench test-all test-tensorflow test-jax test-long test-oldest test-newest test-newest-jax newest test-colab test-notebook bundle docs notebooks lint sweep tasks parity clean

train: .venv/train  ## Train the digits recipe and export it as a float32 SavedModel.
	$(BIN)/python -m keras_mp.cli train digits

test: lint test-tensorflow test-jax  ## The tests that are not slow; of these JAX runs those marked `jax`.

test-tensorflow: .venv/test
	for part in $(PARTS); do KERAS_BACKEND=tensorflow $(PYTEST) -m "not slow" $$part || exit 1; done

test-jax: .venv/test
	KERAS_BACKEND=jax $(PYTEST) -m "jax and not slow" --ignore=tests/qat
	KERAS_BACKEND=jax $(PYTEST) -m "jax and not slow" tests/qat

test-slow: .venv/test  ## What continuous integration runs after `make test`: slow tests, by folder.
	for part in $(SLOW); do KERAS_BACKEND=tensorflow $(PYTEST) -m "slow and not rare" $$(printf "tests/%s " $$part) || exit 1; done
	KERAS_BACKEND=jax $(PYTEST) -m "jax and slow and not rare" $(addprefix tests/,$(SLOW_ON_JAX))
	KERAS_BACKEND=jax $(PYTEST) -m "jax and slow and not rare" tests/qat

test-long: .venv/test  ## The other slow tests, every test on JAX, compiled as users do, and tests/long, whose tests take minutes each.
	for folder in $$(ls -d tests/*/) tests/test_*.py; do KERAS_BACKEND=tensorflow $(PYTEST) -m "slow" $$folder || [ $$? = 5 ] || exit 1; done
	for folder in $$(ls -d tests/*/) tests/test_*.py; do XLA_FLAGS= KERAS_BACKEND=jax $(PYTEST) -m "slow or not jax" $$folder || [ $$? = 5 ] || exit 1; done

test-all: test test-long test-notebook sweep tasks parity test-oldest test-newest test-colab  ## All; see docs/ for the last output.

bench: .venv/test  ## A training step of three models beside their peers; the tables go to docs/results.
	$(BIN)/python benchmarks/peers.py --out docs/results

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

sweep: .venv/test  ## export_float32 on every architecture of keras.applications.
	$(BIN)/python benchmarks/sweep.py --markdown docs/tables/export-sweep.md

tasks: .venv/test  ## Every task of KerasHub through the kit; rows that are there already are kept.
	$(BIN)/python benchmarks/task_sweep.py --markdown docs/tables/kerashub-tasks.md

parity: .venv/train  ## The digits recipe in three precisions, three seeds each.
	$(BIN)/python benchmarks/recipe_parity.py digits --seeds 3 --out docs/tables/digits-parity.md

test-oldest: .venv-oldest/test  ## The same tests on the oldest Keras, TensorFlow and JAX supported.
	KERAS_BACKEND=tensorflow .venv-oldest/bin/python -m pytest $(XDIST) --ignore tests/long --ignore tests/planner/long
	KERAS_BACKEND=jax .venv-oldest/bin/python -m pytest $(XDIST) --ignore tests/long --ignore tests/planner/long

test-newest: $(if $(NEWEST_PYTHON),.venv-newest/test)  ## `make test` on the newest Python here and the newest of everything.
	$(call on_newest,tensorflow,not slow)
	$(call on_newest,jax,jax and not slow)

test-newest-jax: $(if $(NEWEST_PYTHON),.venv-newest/test)  ## What continuous integration runs of it.
	$(call on_newest,jax,jax and not slow,$(addprefix tests/,$(NEWEST)))

newest: .venv-newest/test  ## constraints-newest.txt anew: the newest versions that pip finds today.
	.venv-newest/bin/python -m pip install --upgrade --upgrade-strategy eager -e ".[test]"
	.venv-newest/bin/python -m pip freeze --exclude-editable > constraints-newest.txt

test-colab: .venv-colab/test  ## The tests on the versions of Colab's TPU image, without TensorFlow.
	KERAS_BACKEND=jax .venv-colab/bin/python -m pytest $(XDIST) -m "not slow"

test-notebook: .venv/test .venv-colab-tpu/ready  ## The TPU notebook in an empty folder, with what Colab's image has.
	$(BIN)/python -m pytest tests/long -k train_on_tpu

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

.venv-newest/test: pyproject.toml constraints-newest.txt
	test -x .venv-newest/bin/python || $(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-newest.txt -e ".[test]"
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
	rm -rf .venv .venv-oldest .venv-newest .venv-colab .venv-colab-tpu .venv-colab-cpu runs build *.egg-info
