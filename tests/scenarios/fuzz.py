"""Damaged files, at random: right values, those of other libraries, or an error that names the file.

In the folder ``tests``: ``python -m scenarios.fuzz --seconds 600 --seed 0``. A seed draws an HDF5 file of any layout,
an image, an array or a table, and what is damaged of it. It is read in a process with limits; one that ends or hangs is
an outcome too, unless another library does the same.
"""

import argparse
import collections
import contextlib
import csv
import functools
import gzip
import itertools
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import h5py
import numpy as np
import pyarrow.parquet
from PIL import Image
from support.files.pictures import KINDS, stored

from lit_async_data import AsyncLoader, HDF5Source, ManifestSource
from lit_async_data.errors import ConfigError, SourceError

# Limits for one damaged file. The address space includes that of torch, which is large even when idle.
SECONDS = 60
MEMORY_BYTES = 12 * 2**30
# Signatures of HDF5 metadata blocks.
SIGNATURES = rb"TREE|SNOD|HEAP|OHDR|FAHD|FADB|EAHD|EAIB|EADB|BTHD|BTLF|\x89HDF"
# Suffixes of tables; and a value that cannot be told.
TABLES, ANY = ("csv", "tsv", "jsonl", "gz", "parquet"), np.zeros(0)
BOUNDARIES = [0, 1, 2, 2**7, 2**8 - 1, 2**15, 2**16 - 1]
BOUNDARIES += [2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


def mutated(content, random):
    """Changes one to three parts of a file: a bit, a byte, an integer, a block, or the length."""
    data = bytearray(content)
    offsets = [found.start() for found in re.finditer(SIGNATURES, content)]
    for _ in range(random.integers(1, 4)):
        near = len(data)
        if offsets and random.random() < 0.6:
            near = int(random.choice(offsets)) + int(random.integers(0, 160))
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


def write_hdf5(base, draw):
    path = f"{base}.h5"
    rows, trailing = int(draw.integers(1, 41)), tuple(draw.integers(1, 7, draw.integers(1, 3)).tolist())
    shape, form = (rows, *trailing), draw.choice(["plain", "compact", "variable", "sparse"], p=[0.85, 0.05, 0.05, 0.05])
    values = draw.integers(0, 100, shape).astype(draw.choice(["u1", "i2", ">i4", "i8", "f4", ">f8"]))
    options = {}
    if draw.random() < 0.8:
        options["chunks"] = tuple(int(draw.integers(1, length + 1)) for length in shape)
        options["maxshape"] = tuple(None if draw.random() < 0.3 else length for length in shape)
        options["shuffle"], options["fletcher32"] = bool(draw.random() < 0.3), bool(draw.random() < 0.3)
        options["compression"] = draw.choice([None, "gzip", "lzf"], p=[0.4, 0.5, 0.1])
        if values.dtype.kind in "iu" and draw.random() < 0.1:
            options["scaleoffset"], options["fletcher32"] = 0, False
    written = rows if draw.random() < 0.8 else int(draw.integers(rows))
    latest, userblock = draw.choice(["earliest", "v110"]), int(draw.choice([0, 512], p=[0.9, 0.1]))
    with h5py.File(path, "w", libver=(latest, "v110"), userblock_size=userblock) as file:
        file["labels"] = np.arange(rows)
        if form == "variable":
            file["data/values"] = values.ravel()
            file["data/offsets"] = np.sort([0, *draw.integers(0, values.size, rows - 1), values.size])
        elif form == "sparse":
            file["data/data"] = np.arange(2 * rows, dtype="f4")
            file["data/indices"] = np.tile([1, 4], rows)
            file["data/indptr"] = np.arange(rows + 1) * 2
            file["data"].attrs.update({"encoding-type": "csr_matrix", "shape": (rows, 6)})
        elif form == "compact":
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple(shape)
            dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.py_create(values.dtype), space, properties)
            h5py.Dataset(dataset)[...] = values
        else:
            file.create_dataset("data", shape, values.dtype, fillvalue=7, **options)[:written] = values[:written]
    return path


def write_picture(base, draw):
    pixels = draw.integers(0, 256, (*draw.integers(4, 30, 2), 3)).astype("u1")
    kind = draw.choice([*KINDS, "png", "png", "npy", "npy"])
    if kind == "npy":
        np.save(f"{base}.npy", pixels.astype(draw.choice(["u1", "f4"])))
        return f"{base}.npy"
    name, options = KINDS[kind]
    image = Image.fromarray(pixels).resize((40, 30)).convert(draw.choice(["RGB", "L"]))
    path = f"{base}.{name.lower()}"
    with open(path, "wb") as file:
        file.write(stored(image, name, **options))
    return path


def write_table(base, draw):
    count = int(draw.integers(1, 30))
    rows = [{"y": int(y), "v": float(v)} for y, v in zip(draw.integers(-9, 999, count), draw.random(count).round(3))]
    suffix = draw.choice(["csv", "tsv", "csv.gz", "jsonl", "jsonl.gz", "parquet"])
    path = f"{base}.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, write_page_checksum=True)
        return path
    with (gzip.open if suffix.endswith("gz") else open)(path, "wt", newline="") as file:
        if "json" in suffix:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            table = csv.DictWriter(file, ["y", "v"], delimiter="\t" if suffix == "tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def opened(path):
    if path.endswith("h5"):
        return HDF5Source(path, {"data": "data", "labels": "labels"})
    if path.endswith(TABLES):
        return ManifestSource(path, {key: {"name": key, "kind": "number"} for key in ("y", "v")})
    table = pyarrow.table({"x": [os.path.basename(path)]})
    return ManifestSource(table, {"x": "x"}, root=os.path.dirname(path), check_files="none")


def by_others(path, key, number):
    """What h5py, numpy, Pillow, pyarrow or Python read; None if it is no value."""
    if path.endswith("h5"):
        with h5py.File(path) as file:
            if isinstance(file.get(key), h5py.Group | None):
                return ANY  # a damaged offset or type selects other values of the file; nothing can detect that
            one = np.asarray(file[key][number])
        with h5py.File(path) as file:
            whole = file[key][...] if file[key].size < 10**6 else file[key]
            return one if same(one, np.asarray(whole[number])) else None
    if path.endswith(("npy", "png")):  # all damage of a PNG shows in its checksums
        return np.load(path, allow_pickle=False) if path.endswith("npy") else None
    if path.endswith("parquet"):
        return np.asarray(pyarrow.parquet.read_table(path)[key][number])
    if not path.endswith(TABLES):
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    with (gzip.open if path.endswith("gz") else open)(path, "rt", encoding="utf-8", newline="") as file:
        lines = (line for line in file if line.strip())
        text = csv.DictReader(file, delimiter="\t" if path.endswith("tsv") else ",", strict=True)
        rows = list(map(json.loads, lines) if "json" in os.path.basename(path) else text)
        return np.asarray(float(str(rows[number][key]).strip()))  # more than float() strips


def written(folder, seed):
    draw = np.random.default_rng(seed)
    path = (write_hdf5, write_picture, write_hdf5, write_table)[seed % 4](os.path.join(folder, "pristine"), draw)
    damaged = path.replace("pristine", "damaged")
    with open(path, "rb") as file, open(damaged, "wb") as other:
        other.write(mutated(file.read(), draw))
    return path, damaged


def values(source):
    """Yields key, number and value of each sample: of a pass without a shuffle, and of one shuffled by chunks."""
    with contextlib.closing(source):
        for shuffle in ("none", "chunk"):
            options = {"batch_size": 5, "workers": 0, "shuffle": shuffle, "return_indices": True}
            with AsyncLoader(source, {**options, "memory_budget": 2**28}) as loader:
                for batch in itertools.islice(loader, 20):
                    for key in batch.keys() - {"index"}:
                        rows = zip(batch["index"].tolist(), batch[key].numpy(), strict=True)
                        yield from ((key, number, value.copy()) for number, value in rows)


def same(one, other):
    return one is not None and one.shape == other.shape and one.tobytes() == other.tobytes()


def outcome(folder, seed):
    """The outcome of a seed: ``"value"``, the name of an error of the package, or ``"WRONG …"``."""
    pristine, path = written(folder, seed)
    expected = {(key, number): value for key, number, value in values(opened(pristine))}
    try:
        for key, number, value in values(opened(path)):
            if not same(expected.get((key, number)), value):
                other = by_others(path, key, number)
                if other is None or not (other is ANY or same(other.astype(value.dtype), value)):
                    return f"WRONG: {path}: {key} {number}: {value.tolist()}, others {other}"
    except (SourceError, ConfigError) as error:
        named = os.path.basename(path) in str(error) or isinstance(error, ConfigError)
        return type(error).__name__ if named else f"WRONG: no file in {type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 # any other error is a bug
        return f"WRONG: {''.join(traceback.format_exc())[-1500:]}"
    return "value"


def read(folder, first, count, *, others):
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.WARNING)
    for seed in range(first, first + count):
        print(json.dumps([seed]), flush=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # ends the process even if it hangs
        path = written(folder, seed)[1] if others else ""
        for key, number in itertools.product(("data", "labels", "y", "v"), range(40)) if others else ():
            with contextlib.suppress(Exception):
                by_others(path, key, number)
        print(json.dumps([seed, None if others else outcome(folder, seed)]), flush=True)


def outcomes(folder, first, count):
    """The outcome of each seed. A process that dies is an outcome too, unless another library dies of it, too."""
    found, end = {}, first + count
    while first < end:
        program = [sys.executable, "-m", "scenarios.fuzz", "--folder", str(folder), "--seed"]
        options = {"env": os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}, "text": True}
        run = functools.partial(subprocess.run, capture_output=True, check=False, **options)
        done = run([*program, str(first), "--count", str(end - first)])
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stderr
        found |= {line[0]: line[1] for line in lines if len(line) == 2}
        last = lines[-1][0]
        if done.returncode:
            alone = run([*program, str(last), "--count", "1", "--others"]).returncode
            found[last] = "crash of another library" if alone else f"WRONG: {done.returncode}: {done.stderr[-500:]}"
        first = last + 1
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--others", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder:
        read(given.folder, given.seed, given.count, others=given.others)
        return
    counts, began, seed = collections.Counter(), time.monotonic(), given.seed
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < began + given.seconds:
            for number, what in outcomes(folder, seed, 200).items():
                counts[what.partition(":")[0]] += 1
                if what.startswith("WRONG"):
                    print(number, what, flush=True)
            seed += 200
    print(f"{seed - given.seed} files in {time.monotonic() - began:.0f} s:", dict(counts))
    sys.exit(counts["WRONG"] > 0)


if __name__ == "__main__":
    main()
