"""Damaged files, at random but the same every time: right values, those of h5py, or an error that names the file.

The tests run this module as a program, in a process with limits. With FOLDER FIRST COUNT it tries seeds FIRST to
FIRST + COUNT - 1, and prints the seed before each try, and seed and outcome after it. With FOLDER SEED h5py it only
reads the file with h5py, which shows whether libhdf5 itself crashes.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import traceback

import h5py
import numpy as np
import pytest

# -- damaging files ----------------------------------------------------------------------------------------------------

# Limits for one damaged file. The address space includes that of torch, which is large even when idle.
SECONDS = 60
MEMORY_BYTES = 12 * 2**30
ROWS = 23
# Signatures of HDF5 metadata blocks.
SIGNATURES = b"TREE SNOD HEAP OHDR FAHD FADB EAHD EAIB EADB BTHD BTLF \x89HDF".split()
LAYOUTS = {
    "contiguous": {},
    "big-endian": {"dtype": ">i4"},
    "compact": {"compact": True},
    "user block": {"chunks": (4, 6), "userblock": 512},
    "raw chunks": {"chunks": (4, 6)},
    "raw chunks, fixed array": {"chunks": (4, 6), "libver": "v110"},
    "raw chunks, extensible array": {"chunks": (4, 6), "libver": "v110", "maxshape": (None, 6)},
    "raw chunks, B-tree 2": {"chunks": (4, 4), "libver": "v110", "maxshape": (None, None)},
    "unlimited along the second axis": {"chunks": (4, 6), "maxshape": (ROWS, None)},
    "deflate": {"chunks": (4, 6), "compression": "gzip"},
    "deflate of single rows": {"chunks": (1, 6), "compression": "gzip", "libver": "v110", "maxshape": (None, 6)},
    "shuffle": {"chunks": (1, 6), "shuffle": True},
    "shuffle and deflate across": {"chunks": (4, 4), "compression": "gzip", "shuffle": True},
    "checksum": {"chunks": (4, 6), "fletcher32": True},
    "checksum and deflate": {"chunks": (4, 6), "fletcher32": True, "compression": "gzip", "libver": "v110"},
    "scale-offset": {"chunks": (4, 6), "scaleoffset": 0},
    "partly written": {"chunks": (4, 6), "compression": "gzip", "written": 12, "fillvalue": 7},
    "variable": {"group": "variable"},
    "sparse": {"group": "sparse"},
}
BOUNDARIES = [0, 1, 2, 2**7, 2**8 - 1, 2**15, 2**16 - 1]
BOUNDARIES += [2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


def write_file(path, name):
    """Writes a file of the named layout."""
    options = dict(LAYOUTS[name])
    values = np.random.default_rng(0).integers(0, 1000, (ROWS, 6))
    libver, userblock = options.pop("libver", "earliest"), options.pop("userblock", 0)
    group, compact, rows = options.pop("group", None), options.pop("compact", False), options.pop("written", ROWS)
    with h5py.File(path, "w", libver=(libver, "v110"), userblock_size=userblock) as file:
        file["labels"] = np.arange(ROWS)
        if group == "variable":
            file["data/values"] = values.ravel()
            file["data/offsets"] = np.append(np.sort(values[:ROWS, 0] % values.size), values.size)
            file["data/offsets"][0] = 0
        elif group == "sparse":
            file["data/data"] = values.ravel()[: 2 * ROWS].astype("f4")
            file["data/indices"] = np.tile([1, 4], ROWS)
            file["data/indptr"] = np.arange(ROWS + 1) * 2
            file["data"].attrs.update({"encoding-type": "csr_matrix", "shape": (ROWS, 6)})
        elif compact:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple(values.shape)
            dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT32, space, properties)
            h5py.Dataset(dataset)[...] = values
        else:
            dtype = options.pop("dtype", "i4")
            file.create_dataset("data", values.shape, dtype, **options)[:rows] = values[:rows]


def mutated(content, random):
    """Changes one to three parts of a file: a bit, a byte, an integer, a block, or the length."""
    data = bytearray(content)
    offsets = [offset for signature in SIGNATURES for offset in _offsets(content, signature)]
    for _ in range(random.integers(1, 4)):
        near = int(random.choice(offsets)) + int(random.integers(0, 160)) if random.random() < 0.6 else len(data)
        at = near if near < len(data) else int(random.integers(len(data)))
        size = int(random.choice([1, 2, 4, 8]))
        kind = random.integers(10)
        if kind < 3:
            data[at] ^= 1 << int(random.integers(8))
        elif kind < 4:
            data[at] = int(random.integers(256))
        elif kind < 8:
            number = BOUNDARIES[random.integers(len(BOUNDARIES))]
            if random.random() < 0.4:  # close to the stored number
                number = int.from_bytes(data[at : at + size], "little") + int(random.integers(-64, 65))
            data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")[: len(data) - at]
        elif kind < 9:
            other, length = int(random.integers(len(data))), int(random.choice([8, 16, 64, 512]))
            if random.random() < 0.5:
                data[at : at + length] = bytes(len(data[at : at + length]))
            else:
                length = min(length, len(data) - max(at, other), abs(at - other))
                here, there = slice(at, at + length), slice(other, other + length)
                data[here], data[there] = data[there], data[here]
        elif random.random() < 0.5:
            del data[at:]
            data += b"" if data else b"x"
        else:
            data += random.bytes(100)
    return bytes(data)


def _offsets(content, signature):
    offset = content.find(signature)
    while offset >= 0:
        yield offset
        offset = content.find(signature, offset + 1)


def write_damaged(folder, seed):
    """Writes the files of a seed; returns the layout and the paths of the undamaged and the damaged file."""
    name = list(LAYOUTS)[seed % len(LAYOUTS)]
    pristine, path = os.path.join(folder, "pristine.h5"), os.path.join(folder, "damaged.h5")
    write_file(pristine, name)
    with open(pristine, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(mutated(content, np.random.default_rng(seed)))
    return name, pristine, path


# -- reading a damaged file --------------------------------------------------------------------------------------------


def h5py_rows(path, key, numbers, name):
    """Rows as h5py reads them, one by one; None if it fails, or if reading all rows at once gives another value."""
    if "group" in LAYOUTS[name] and key != "labels":
        return dict.fromkeys(numbers)
    results = []
    for whole in (False, True):
        rows = {}
        try:
            with h5py.File(path) as file:
                dataset = file[key]
                values = dataset[...] if whole and dataset.size < 10**6 else dataset
                for number in numbers if not whole else reversed(numbers):
                    rows[number] = np.asarray(values[number])
        except Exception:  # noqa: BLE001 # any error means that h5py has no value
            rows = {}
        results.append(rows)
    one, two = results
    return {n: one[n] if n in one and n in two and one[n].tobytes() == two[n].tobytes() else None for n in numbers}


def loaded_batches(path):
    """Yields sample numbers and values of each batch: of a pass without a shuffle, and of one shuffled by chunks."""
    from lit_async_data import AsyncLoader, HDF5Source

    source = HDF5Source(path, {"data": "data", "labels": "labels"})
    try:
        for shuffle in ("none", "chunk"):
            options = {"batch_size": 5, "workers": 0, "shuffle": shuffle, "return_indices": True, "drop_last": False}
            with AsyncLoader(source, {**options, "memory_budget": 2**28}) as loader:
                for step, batch in enumerate(loader):
                    ids = batch["index"].tolist()
                    yield ids, {key: batch[key].numpy().copy() for key in batch if key != "index"}
                    if step > 20:
                        break
    finally:
        source.close()


def outcome(folder, seed):
    """The outcome of a seed: ``"value"``, the name of an error of the package, or ``"WRONG …"``."""
    from lit_async_data.errors import ConfigError, SourceError

    name, pristine, path = write_damaged(folder, seed)
    expected = {}
    for ids, batch in loaded_batches(pristine):
        for key, values in batch.items():
            expected |= {(key, number): value for number, value in zip(ids, values, strict=True)}
    try:
        for ids, batch in loaded_batches(path):
            for key, values in batch.items():
                changed = [n for n, value in zip(ids, values, strict=True) if not _same(expected.get((key, n)), value)]
                by_h5py = h5py_rows(path, key, changed, name) if changed else {}
                for number in changed:
                    value = values[ids.index(number)]
                    if "group" in LAYOUTS[name] and key != "labels":
                        continue  # a damaged offset selects other values of the file; nothing can detect that
                    if by_h5py[number] is None or not _same(by_h5py[number].astype(value.dtype), value):
                        return f"WRONG {name}: {key} {number}: {value.tolist()}, h5py {by_h5py[number]}"
    except (SourceError, ConfigError) as error:
        if path not in str(error) and not isinstance(error, ConfigError):
            return f"WRONG {name}: no file in {type(error).__name__}: {error}"
        return type(error).__name__
    except Exception:  # noqa: BLE001 # any other error is a bug
        return f"WRONG {name}: {''.join(traceback.format_exc())[-1500:]}"
    return "value"


def _same(one, other):
    return one is not None and one.shape == other.shape and one.tobytes() == other.tobytes()


def main(folder, first, count):
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.WARNING)
    if count == "h5py":
        name, _, path = write_damaged(folder, int(first))
        for key in ("data", "labels"):
            h5py_rows(path, key, list(range(ROWS)), name)
        return
    for seed in range(int(first), int(first) + int(count)):
        print(json.dumps([seed]), flush=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # ends the process even if it hangs
        print(json.dumps([seed, outcome(folder, seed)]), flush=True)


# -- the tests ---------------------------------------------------------------------------------------------------------


def program(*words):
    return [sys.executable, __file__, *map(str, words)]


def outcomes(folder, first, count):
    """The outcome of each seed. A process that dies is an outcome too, unless h5py alone dies of it."""
    found, end = {}, first + count
    while first < end:
        done = subprocess.run(program(folder, first, end - first), capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {line[0]: line[1] for line in lines if len(line) == 2}
        assert lines, done.stderr
        first = lines[-1][0] + 1
        if done.returncode:
            seed = lines[-1][0]
            alone = subprocess.run(program(folder, seed, "h5py"), capture_output=True, check=False).returncode
            found[seed] = "crash of libhdf5" if alone else f"WRONG: ended by {done.returncode}: {done.stderr[-500:]}"
    return found


def check(found, least):
    wrong = {seed: what for seed, what in found.items() if what.startswith("WRONG")}
    assert not wrong
    counts = collections.Counter(found.values())
    # Damage is detected, and much of it matters.
    assert counts["CorruptError"] + counts["FormatError"] > least < counts["value"], counts


def test_damaged_files_give_right_values_or_errors_that_name_them(tmp_path):
    check(outcomes(tmp_path, 0, 57), 12)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_many_damaged_files_give_right_values_or_errors_that_name_them(tmp_path, first):
    check(outcomes(tmp_path, first, 500), 100)


if __name__ == "__main__":
    main(*sys.argv[1:])
