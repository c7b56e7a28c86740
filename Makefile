# Targets for people and for CI. ARGS passes overrides: make train ARGS="loader.workers=2 trainer.max_epochs=2"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train docs test test-fast test-long test-lowest test-gpu fuzz soak check format bench-hdf5 bench-cloud bench-encoded bench-manifest bench-shapes bench-overlap bench-beside bench-workers bench-gpu clean

train: $(VENV)/ready
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

# The tests of one process, without a Trainer and without large files.
test-fast: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not gpu and not long and not processes" tests/order tests/batch tests/engine/pipeline tests/engine/device tests/engine/prefetch tests/engine/loader/test_async_loader.py tests/engine/loader/test_base_loader.py tests/test_house.py $(ARGS)

test-long: $(VENV)/installed
	$(BIN)/python -m pytest -m long $(ARGS)

# Damaged files, and interrupted loaders, at random: ARGS="--seconds 600 --seed 0"; of soak also "--kills 200".
fuzz soak: $(VENV)/installed
	cd tests && ../$(BIN)/python -m scenarios.$@ $(ARGS)

# On a machine with a CUDA device.
test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -m gpu $(ARGS)

# The tests with a Trainer, under the other name of Lightning.
test-lightning: $(VENV)/installed
	LIT_ASYNC_DATA_LIGHTNING=lightning.pytorch $(BIN)/python -m pytest $(addprefix tests/lightning/,trainer/test_trainer.py trainer/test_bad_samples.py test_prefetcher.py test_display.py) $(ARGS)

# The site, in build/site; a warning is an error.
docs: $(VENV)/installed
	$(BIN)/python docs/site/build.py

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -m long -k type_checker tests/scenarios/test_examples.py

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Against h5py and other loaders, at most 15 minutes; ARGS="--quick" in one. Other loaders take part if installed:
# .venv/bin/pip install --constraint constraints.txt --requirement benchmarks/readers/requirements.txt
bench-hdf5: $(VENV)/installed
	$(BIN)/python benchmarks/loading/hdf5.py $(ARGS)

# HDF5 files behind a web server, against the line, the disk, h5py over fsspec, and Lance where pylance is installed:
# about 6 minutes and 2 GB.
bench-cloud: $(VENV)/installed
	$(BIN)/python benchmarks/loading/cloud.py $(ARGS)

# JPEGs in HDF5 files, against DataLoaders over h5py, a table of files, and LanceDB where it is installed: about 12 minutes.
bench-encoded: $(VENV)/installed
	$(BIN)/python benchmarks/loading/encoded.py $(ARGS)

# Tables of images, arrays and 50 million rows, against other loaders: at most 10 minutes and 6 GB.
bench-manifest: $(VENV)/installed
	$(BIN)/python benchmarks/loading/manifest.py $(ARGS)

# Windows of frames and patches of volumes against DataLoaders over h5py, LanceDB, TorchIO and MONAI where they are
# installed, and a mixture of three sources against its parts: about 20 minutes.
bench-shapes: $(VENV)/installed
	$(BIN)/python benchmarks/loading/shapes.py $(ARGS)

# Loading, copying and training at the same time, through the Trainer: about 3 minutes.
bench-overlap: $(VENV)/installed
	$(BIN)/python benchmarks/waiting/overlap.py $(ARGS)

# Steps of a training loop beside threads, a reader process and other loaders: about 40 minutes.
bench-beside: $(VENV)/installed
	$(BIN)/python benchmarks/waiting/beside.py $(ARGS)

# Python code per sample in worker processes, against those of a DataLoader: about 8 minutes.
bench-workers: $(VENV)/installed
	$(BIN)/python benchmarks/waiting/workers.py $(ARGS)

# Every hazard and every figure of copies to a GPU, on a machine with a CUDA device: about 5 minutes.
bench-gpu: $(VENV)/installed
	$(BIN)/python benchmarks/waiting/gpu.py $(ARGS)

# The oldest versions that pyproject.toml allows, in an environment of its own. With another torch than the CPU builds,
# pip also fetches its CUDA libraries: some 3 GB.
test-lowest: .venv-lowest/installed
	.venv-lowest/bin/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

# An environment in folder $1. --clear where another Python made it: without it, that Python would stay.
define new_venv
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: %s is Python %d.%d; lit_async_data needs 3.11 or later: make PYTHON=python3.11 TARGET" % (sys.executable, v[0], v[1]))'
	$(PYTHON) -m venv $$(test "$$($1/bin/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" || echo --clear) $1
endef

# What training needs; the targets that check need more.
$(VENV)/ready: pyproject.toml constraints.txt
	$(call new_venv,$(VENV))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt
	$(call new_venv,$(VENV))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,test,check,docs]'
	touch $@

.venv-lowest/installed: pyproject.toml constraints-lowest.txt
	$(call new_venv,.venv-lowest)
	.venv-lowest/bin/pip install --quiet --constraint constraints-lowest.txt --editable '.[demo,test]'
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest build data logs
