"""`HDF5Source` from outside: it reads the same bytes as plain h5py."""

from __future__ import annotations

import math
import os
import pickle
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files.values import some

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions
from lit_async_data.errors import ChangedError, CorruptError, FormatError, MissingError, WorkerError
from lit_async_data.sources.contract.reservations import Reservations
from lit_async_data.sources.contract.source import Source

ROWS = 23
SHAPE = (ROWS, 5, 6, 3)

# Arguments of create_dataset for data of this shape. No chunk shape divides it: there are edge chunks.
STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": (4, 2, 4, 2)},
    "row chunks": {"chunks": (1, 5, 6, 3)},
    "one chunk": {"chunks": (ROWS, 5, 6, 3)},
    "gzip": {"chunks": (7, 5, 6, 3), "compression": "gzip"},
    "gzip rows": {"chunks": (1, 5, 6, 3), "compression": "gzip"},
    "gzip tiles": {"chunks": (3, 4, 4, 2), "compression": "gzip"},
    "shuffle gzip": {"chunks": (5, 3, 6, 3), "compression": "gzip", "shuffle": True},
    "lzf": {"chunks": (6, 5, 4, 3), "compression": "lzf"},
    "fletcher32": {"chunks": (4, 5, 5, 3), "fletcher32": True},
    "all filters": {"chunks": (4, 5, 5, 3), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "resizable": {"chunks": (4, 2, 4, 2), "maxshape": (None, 5, None, 3)},
    "resizable inside": {"chunks": (4, 2, 4, 2), "maxshape": (ROWS, None, 6, 3), "compression": "gzip"},
}
FEW_STORAGE = ["contiguous", "chunked", "gzip tiles"]
INTEGERS = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", ">u2", ">u4", ">u8", ">i2", ">i4", ">i8"]
OTHERS = ["f2", "f4", "f8", ">f2", ">f4", ">f8", "?", "c8", "c16", ">c8"]
DTYPES = INTEGERS + OTHERS
LAYOUTS = ["NHWC", "NCHW", "HWCN", "CHWN", "NTHWC", "NCTHW", "NTCHW", "THWCN", "TNHWC", "HNWC", "WCNH"]
LAYOUTS += ["NC", "CN", "NL", "LN", "NHW", "HNW", "HWN", "N"]
ORDERS = {
    "as stored": np.arange(ROWS),
    "backwards": np.arange(ROWS)[::-1].copy(),
    "random": np.random.default_rng(1).permutation(ROWS),
    "repeated": np.random.default_rng(2).integers(0, ROWS, 50),
    "one again and again": np.full(5, ROWS - 1),
    "runs": np.array([7, 8, 9, 3, 4, 4, 5, 22, 0, 1]),
    "a single one": np.array([11]),
}


def stored_in_every_way(dtype):
    """The same values once for each kind of storage, for one file."""
    return {name: {"data": some(SHAPE, dtype), **arguments} for name, arguments in STORAGE.items()}


def by_h5py(path, name, layout=None):
    """The whole dataset as a batch should have it: N, then C, then the rest, in native byte order."""
    with h5py.File(path) as file:
        values = file[name][...]
    letters = layout or "N" + "abcdefg"[: values.ndim - 1]
    first = [letter for letter in "NC" if letter in letters]
    order = first + [letter for letter in letters if letter not in first]
    values = values.transpose([letters.index(letter) for letter in order])
    dtype = values.dtype.newbyteorder("=")
    return values.astype(np.int64 if values.ndim == 1 and dtype.kind in "iu" else dtype)


def read(source, samples, keys=None):
    """Samples read into arrays full of garbage, as delivered."""
    samples = np.asarray(samples, np.int64)
    out = {}
    for key in keys or source.spec.fields:
        shape = (len(samples), *source.spec[key].stored_shape)
        rubbish = np.full(math.prod(shape) * source.spec[key].dtype.itemsize, 0xA5, np.uint8)
        out[key] = rubbish.view(source.spec[key].dtype).reshape(shape)
    source.read_into(samples, out)
    return {key: source.spec[key].delivered(array) for key, array in out.items()}


def assert_same(got, wanted):
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert got.tobytes() == wanted.tobytes()


def assert_reads(source, key, wanted, orders=("as stored", "random", "repeated")):
    """Reads samples in several orders and compares; closes the source."""
    assert len(source) == len(wanted)
    assert source.spec[key].shape == wanted.shape[1:]
    assert source.spec[key].dtype == wanted.dtype
    for order in orders:
        samples = ORDERS[order] % len(wanted)
        assert_same(read(source, samples, [key])[key], wanted[samples])
    source.close()


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGE)
def test_samples_in_any_order_are_what_h5py_reads(h5, storage):
    path = h5(data={"data": some(SHAPE), **STORAGE[storage]}, labels=np.arange(ROWS))
    assert_reads(HDF5Source(path), "data", by_h5py(path, "data"), ORDERS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_number_comes_out_unchanged_in_native_byte_order(h5, dtype):
    path = h5(**stored_in_every_way(dtype))
    for name in STORAGE:
        assert_reads(HDF5Source(path, [name]), name, by_h5py(path, name))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_labels_without_other_axes_come_out_as_int64(h5, dtype):
    labels = some((ROWS,), dtype) >> 1  # int64 has one bit less than uint64
    path = h5(plain=labels.astype(dtype), chunked={"data": labels.astype(dtype), "chunks": (5,)})
    for name in ("plain", "chunked"):
        assert_reads(HDF5Source(path, [name]), name, labels.astype(np.int64))


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_labels_without_other_axes_keep_their_type(h5, dtype):
    labels = some((ROWS,), dtype)
    path = h5(plain=labels, chunked={"data": labels, "chunks": (5,)})
    for name in ("plain", "chunked"):
        assert_reads(HDF5Source(path, [name]), name, labels.astype(labels.dtype.newbyteorder("=")))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_labels_with_an_axis_keep_their_type(h5, dtype):
    labels = some((ROWS, 1), dtype)
    path = h5(plain=labels, chunked={"data": labels, "chunks": (5, 1)})
    for name in ("plain", "chunked"):
        assert_reads(HDF5Source(path, [name]), name, labels.astype(labels.dtype.newbyteorder("=")))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 4), (2, 3, 2, 2, 3)], ids=str)
def test_labels_may_have_any_rank(h5, shape):
    labels = some((ROWS, *shape), "f4")
    path = h5(data=some((ROWS, 3)), plain=labels, chunked={"data": labels, "chunks": (4, *shape)})
    for name in ("plain", "chunked"):
        assert_reads(HDF5Source(path, ["data", name]), name, labels)


def test_an_enumeration_is_its_numbers(h5):
    kinds = h5py.enum_dtype({"cat": 0, "dog": 1, "cow": 2}, "u1")
    path = h5(labels={"data": np.array([2, 0, 1]), "dtype": kinds})
    assert_reads(HDF5Source(path, ["labels"]), "labels", np.array([2, 0, 1]))


@pytest.mark.parametrize("chunks", [None, (4, 2)])
def test_what_was_never_written_is_the_fill_value_as_in_h5py(h5, chunks):
    path = h5(data={"shape": (ROWS, 3), "dtype": "f4", "chunks": chunks, "fillvalue": 7})
    with h5py.File(path, "r+") as file:
        file["data"][9:11] = 1
    assert_reads(HDF5Source(path, ["data"]), "data", by_h5py(path, "data"))


def test_values_in_the_header_of_a_compact_dataset_are_read(tmp_path):
    path = str(tmp_path / "compact.h5")
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((ROWS, 3))
        h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT16, space, properties)
        file["data"][...] = some((ROWS, 3), "i2")
    assert_reads(HDF5Source(path, ["data"]), "data", some((ROWS, 3), "i2"))


def test_numbers_of_twelve_bits_are_widened_as_h5py_does(tmp_path):
    path = str(tmp_path / "camera.h5")
    twelve = h5py.h5t.STD_U16LE.copy()
    twelve.set_precision(12)
    twelve.set_offset(4)
    values = np.zeros((ROWS, 3), "u2")
    values[1:-1] = some((ROWS - 2, 3), "u2") >> 4
    with h5py.File(path, "w") as file:
        h5py.h5d.create(file.id, b"data", twelve, h5py.h5s.create_simple(values.shape))
        file["data"][...] = values
    assert_reads(HDF5Source(path, ["data"]), "data", values)


@pytest.mark.parametrize("size", [512, 4096])
def test_a_user_block_before_the_data_moves_nothing(tmp_path, size):
    path = tmp_path / "block.h5"
    with h5py.File(path, "w", userblock_size=size) as file:
        for name, arguments in stored_in_every_way("f4").items():
            file.create_dataset(name, **arguments)
    with path.open("r+b") as raw:
        raw.write(b"what an instrument writes first".ljust(size, b"\xff"))
    for name in STORAGE:
        assert_reads(HDF5Source(path, [name]), name, some(SHAPE, "f4"))


@pytest.mark.parametrize("libver", ["earliest", "v108", "v110", "v112"])
def test_every_version_of_the_format_is_read(tmp_path, libver):
    path = tmp_path / "version.h5"
    with h5py.File(path, "w", libver=(libver, "v112")) as file:
        for name, arguments in stored_in_every_way(">i4").items():
            file.create_dataset(name, **arguments)
    for name in STORAGE:
        assert_reads(HDF5Source(path, [name]), name, some(SHAPE, ">i4").astype("i4"))


# -- layout ------------------------------------------------------------------------------------------------------------


def shape_for(layout):
    return tuple({"N": ROWS, "C": 3, "H": 5, "W": 6, "T": 2, "L": 4}[letter] for letter in layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_are_samples_then_channels_then_the_rest(h5, layout):
    data = some(shape_for(layout), "f4")
    chunked = {"data": data, "chunks": tuple(-(-n // 2) for n in data.shape)}
    path = h5(contiguous=data, chunked=chunked, gzip={**chunked, "compression": "gzip"})
    for name in ("contiguous", "chunked", "gzip"):
        assert_reads(HDF5Source(path, [name], layout=layout), name, by_h5py(path, name, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_delivering_moves_no_byte(h5, layout):
    field = HDF5Source(h5(data=some(shape_for(layout))), ["data"], layout=layout).spec["data"]
    stored = np.zeros((4, *field.stored_shape), field.dtype)
    assert np.shares_memory(field.delivered(stored), stored)
    assert field.delivered(stored).shape == (4, *field.shape)


def test_a_string_is_the_layout_of_the_first_field_and_a_mapping_names_them(h5):
    path = h5(data=some(SHAPE), masks=some((5, 6, ROWS)))
    alone = HDF5Source(path, {"x": "data"}, layout="NHWC")
    both = HDF5Source(path, {"x": "data", "m": "masks"}, layout={"x": "NHWC", "m": "HWN"})
    assert_reads(alone, "x", by_h5py(path, "data", "NHWC"))
    assert_reads(both, "m", by_h5py(path, "masks", "HWN"))
    assert both.spec["x"] == alone.spec["x"]


@pytest.mark.parametrize("side", [4, 80])  # below and above the size from which batches are views
@pytest.mark.parametrize(
    ("layout", "memory_format"), [("NHWC", torch.channels_last), ("NTHWC", torch.channels_last_3d)]
)
@pytest.mark.parametrize("chunked", [False, True])
def test_channels_last_comes_out_of_the_loader_in_that_memory_format(h5, layout, memory_format, side, chunked):
    shape = {"N": 10, "T": 2, "H": side, "W": side, "C": 3}
    data = some([shape[letter] for letter in layout])
    path = h5(data={"data": data, "chunks": (4, *data.shape[1:]) if chunked else None})
    with AsyncLoader(HDF5Source(path, ["data"], layout=layout), LoaderOptions(batch_size=5, shuffle=False)) as loader:
        batches = [x for (x,) in loader]
    for x in batches:
        assert x.is_contiguous(memory_format=memory_format)
        assert not x.is_contiguous()
    assert_same(torch.cat(batches).numpy(), by_h5py(path, "data", layout))


# -- fields and files --------------------------------------------------------------------------------------------------


def test_a_mapping_of_fields_gives_dicts_with_its_keys(h5):
    path = h5(images=some((ROWS, 5)), species=np.arange(ROWS))
    source = HDF5Source(path, {"y": "species", "x": "images"})
    with AsyncLoader(source, LoaderOptions(batch_size=ROWS, shuffle=False)) as loader:
        batch = next(loader)
    assert list(batch) == ["y", "x"]
    assert batch["y"].tolist() == list(range(ROWS))
    assert_same(batch["x"].numpy(), some((ROWS, 5)))


def test_a_sequence_of_fields_gives_tuples_in_its_order(h5):
    path = h5(images=some((ROWS, 5)), species=np.arange(ROWS))
    with AsyncLoader(HDF5Source(path, ["species", "images"]), LoaderOptions(batch_size=ROWS, shuffle=False)) as loader:
        labels, images = next(loader)
    assert labels.tolist() == list(range(ROWS))
    assert_same(images.numpy(), some((ROWS, 5)))


def test_a_path_alone_gives_data_and_labels(images):
    with AsyncLoader(HDF5Source(images), LoaderOptions(batch_size=100, shuffle=False)) as loader:
        data, labels = next(loader)
    assert data[:, 0, 0, 0].tolist() == list(range(100))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [number % 10 for number in range(100)]


def test_fields_may_lie_in_groups_and_behind_links_of_the_same_file(h5):
    path = h5(**{"raw/scan/images": some((ROWS, 5)), "labels": np.arange(ROWS)})
    with h5py.File(path, "r+") as file:
        file["soft"] = h5py.SoftLink("/raw/scan/images")
        file["hard"] = file["raw/scan/images"]
    for name in ("raw/scan/images", "/raw/scan/images", "soft", "hard"):
        assert_reads(HDF5Source(path, {"x": name}), "x", some((ROWS, 5)))


def test_the_same_dataset_may_be_two_fields(h5):
    source = HDF5Source(h5(data=some((ROWS, 5))), {"first": "data", "second": "data"})
    got = read(source, ORDERS["random"])
    assert_same(got["first"], got["second"])


def test_only_the_fields_asked_for_are_filled(images):
    source = HDF5Source(images)
    assert list(read(source, [3, 1], ["labels"])) == ["labels"]
    assert read(source, [3, 1], ["labels"])["labels"].tolist() == [3, 1]


@pytest.fixture
def scans(h5):
    """Files scan1, scan2, scan10 with 3, 4 and 5 samples; sample n of them all has value and label n."""
    paths, first = [], 0
    for number, rows in ((1, 3), (2, 4), (10, 5)):
        values = np.arange(first, first + rows)
        paths.append(h5(f"scan{number}.h5", data=np.repeat(values.astype("u1")[:, None], 6, axis=1), labels=values))
        first += rows
    return paths


def test_a_glob_takes_its_files_in_natural_order(scans):
    source = HDF5Source(Path(scans[0]).parent / "scan*.h5")
    assert len(source) == 12
    assert read(source, np.arange(12))["labels"].tolist() == list(range(12))


def test_a_list_takes_files_globs_and_path_objects_in_its_own_order(scans, tmp_path):
    source = HDF5Source([scans[2], Path(scans[0]), str(tmp_path / "scan[2].h5")])
    assert read(source, np.arange(12))["labels"].tolist() == [7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6]


def test_a_name_with_the_letters_of_a_glob_is_a_name_if_there_is_such_a_file(h5):
    assert len(HDF5Source(h5("scan[1]*.h5", data=np.arange(3)), ["data"])) == 3


@pytest.mark.parametrize("samples", [[11, 0, 7, 3, 2, 6], [5, 5, 11, 0, 5], [6], list(range(11, -1, -1))], ids=str)
def test_one_batch_may_come_from_several_files_in_any_order(scans, samples):
    got = read(HDF5Source(scans), samples)
    assert got["labels"].tolist() == samples
    assert_same(got["data"], np.repeat(np.array(samples, "u1")[:, None], 6, axis=1))


def test_files_may_differ_in_how_they_store_and_in_byte_order_and_type_of_labels(h5):
    parts = [some(SHAPE, "f4", seed) for seed in range(3)]
    paths = [
        h5("a.h5", data=parts[0], labels=np.arange(ROWS, dtype="u1")),
        h5("b.h5", data={"data": parts[1], **STORAGE["gzip tiles"]}, labels=np.arange(ROWS, dtype=">i4")),
        h5("c.h5", data=parts[2].astype(">f4"), labels={"data": np.arange(ROWS), "chunks": (4,)}),
    ]
    samples = np.random.default_rng(0).integers(0, 3 * ROWS, 100)
    got = read(HDF5Source(paths), samples)
    assert_same(got["data"], np.concatenate(parts)[samples])
    assert_same(got["labels"], samples % ROWS)


def test_locate_tells_file_group_and_row(scans):
    source = HDF5Source(scans)
    assert source.locate([0, 2, 3, 11, 7, 2]) == [
        (scans[0], "/", 0),
        (scans[0], "/", 2),
        (scans[1], "/", 0),
        (scans[2], "/", 4),
        (scans[2], "/", 0),
        (scans[0], "/", 2),
    ]
    assert source.locate(np.array([11]))[0].row == 4
    assert source.locate([]) == []


@pytest.mark.parametrize("sample", [-1, 12, 2**40])
def test_a_sample_that_is_not_there_is_an_index_error(scans, sample):
    source = HDF5Source(scans)
    for use in (source.locate, lambda samples: read(source, samples)):
        with pytest.raises(IndexError, match=f"{sample} of 12"):
            use([3, sample])


# -- handles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("storage", FEW_STORAGE)
def test_a_pickled_source_reads_the_same(h5, storage, used):
    path = h5(data={"data": some(SHAPE), **STORAGE[storage]}, labels=np.arange(ROWS))
    source = HDF5Source(path, {"x": "data", "y": "labels"}, layout="NHWC")
    if used:
        read(source, [1])
    copy = pickle.loads(pickle.dumps(source))
    assert isinstance(copy, Source)
    assert copy.spec == source.spec
    assert copy.locate([3]) == source.locate([3])
    assert_reads(copy, "x", by_h5py(path, "data", "NHWC"))


@pytest.mark.parametrize("storage", FEW_STORAGE)
def test_closing_twice_is_fine_and_reading_opens_again(h5, storage):
    path = h5(data={"data": some(SHAPE), **STORAGE[storage]})
    source = HDF5Source(path, ["data"])
    source.close()
    for _ in range(2):
        assert_same(read(source, ORDERS["random"])["data"], some(SHAPE)[ORDERS["random"]])
        source.close()
        source.close()


@pytest.mark.parametrize("storage", FEW_STORAGE)
def test_several_threads_may_read_at_once(h5, storage):
    path = h5(data={"data": some(SHAPE), **STORAGE[storage]}, labels=np.arange(ROWS))
    source = HDF5Source(path)
    requests = [np.random.default_rng(seed).integers(0, ROWS, 40) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda samples: read(source, samples), requests))
    for samples, got in zip(requests, answers, strict=True):
        assert_same(got["data"], some(SHAPE)[samples])
        assert_same(got["labels"], samples)


def in_fork(act):
    """Exit status of a forked child that does something: 0, or 3 where that raises `WorkerError`, or 1."""
    child = os.fork()
    if not child:
        status = 1
        try:
            act()
            status = 0
        except WorkerError as error:
            status = 3 if "fork" in str(error) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("storage", FEW_STORAGE)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, as torch does
def test_a_source_that_was_read_refuses_to_be_read_in_a_fork(h5, storage):
    path = h5(data={"data": some(SHAPE), **STORAGE[storage]})
    source = HDF5Source(path, ["data"])
    read(source, [1])
    assert in_fork(lambda: read(source, [1])) == 3
    assert in_fork(lambda: read(HDF5Source(path, ["data"]), [1])) == 0
    assert_reads(source, "data", by_h5py(path, "data"))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_started_loader_refuses_to_continue_in_a_fork(images):
    with AsyncLoader(HDF5Source(images), LoaderOptions(batch_size=10, shuffle=False)) as loader:
        next(loader)
        assert in_fork(lambda: next(loader)) == 3
        assert next(loader)[0][0, 0, 0, 0] == 10


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("act", "status"), [(lambda s: s.close(), 0), (lambda s: s.reserve(0, 0), 3)], ids=["close", "reserve"]
)
def test_a_fork_waits_for_no_lock_that_was_held_when_it_was_made(h5, act, status, monkeypatch):
    """1. A thread reserves memory, and holds the lock of the decoded chunks. 2. Another forks. 3. In the child, nobody
    releases it."""
    chunked = {"data": some(SHAPE), "chunks": (2, *SHAPE[1:]), "compression": "gzip"}
    source = HDF5Source(h5(data=chunked), ["data"])
    read(source, [1])
    held, over, set_ = threading.Event(), threading.Event(), Reservations.set

    def hold(given, owner, nbytes):
        if threading.current_thread() is thread:
            held.set()
            over.wait(30)
        set_(given, owner, nbytes)

    monkeypatch.setattr(Reservations, "set", hold)

    def acts():
        signal.alarm(10)
        act(source)

    thread = threading.Thread(target=source.reserve, args=(0, 0))
    thread.start()
    assert held.wait(10)
    try:
        assert in_fork(acts) == status
    finally:
        over.set()
        thread.join()
        source.close()


# -- files that change -------------------------------------------------------------------------------------------------


def cut(part):
    return lambda path: os.truncate(path, int(path.stat().st_size * part))


def lengthened(path):
    with path.open("ab") as file:
        file.write(b"\0")


def written_to(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0xFF]))


def written_anew(path):
    with h5py.File(path, "w") as file:
        file["data"] = some(SHAPE, seed=1)


def replaced(path):
    """By one of the same size and time."""
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


IN_PLACE = {
    "cut by half": cut(0.5),
    "cut to nothing": cut(0),
    "cut a little": cut(0.999),
    "lengthened": lengthened,
    "written to": written_to,
    "written anew": written_anew,
}


@pytest.fixture
def old(h5):
    """Writes a file with an old mtime, so that any later write changes it."""

    def written(storage):
        path = Path(h5(data={"data": some(SHAPE), **STORAGE[storage]}))
        os.utime(path, ns=(10**18, 10**18))
        return path

    return written


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("storage", FEW_STORAGE)
def test_a_file_that_changes_after_the_source_was_built_is_refused(old, storage, used, change):
    path = old(storage)
    source = HDF5Source(path, ["data"])
    if used and change != "written anew":  # which h5py refuses while the file is open
        read(source, [1])
    IN_PLACE[change](path)
    for samples in ([0], [1, 2], [ROWS - 1]):
        with pytest.raises(ChangedError, match="build the source again") as caught:
            read(source, samples)
        assert str(path) in str(caught.value)
        assert caught.value.file == str(path)
    source.close()


@pytest.mark.parametrize("storage", FEW_STORAGE)
def test_a_replaced_file_is_refused(old, storage):
    path = old(storage)
    source = HDF5Source(path, ["data"])
    replaced(path)
    with pytest.raises(ChangedError, match="replaced"):
        read(source, [0, 1])
    source.close()


@pytest.mark.parametrize("storage", FEW_STORAGE)
def test_a_file_replaced_while_open_is_never_read_instead(old, storage):
    path = old(storage)
    source = HDF5Source(path, ["data"])
    read(source, [0])
    replaced(path)
    try:
        got = read(source, ORDERS["random"])["data"]
    except ChangedError:
        pass
    else:
        assert_same(got, some(SHAPE)[ORDERS["random"]])
    source.close()
    with pytest.raises(ChangedError, match="replaced"):
        read(source, [0])
    source.close()


class Trap(np.ndarray):
    """An array that does something just before it is written to."""

    def __setitem__(self, where, values):
        self.act()
        super().__setitem__(where, values)


@pytest.mark.parametrize(("storage", "layout"), [("chunked", "NHWC"), ("gzip tiles", "NHWC"), ("contiguous", "HNWC")])
def test_a_file_that_changes_in_the_middle_of_a_read_is_refused(old, storage, layout):
    path = old(storage)
    source = HDF5Source(path, {"x": "data"}, layout=layout)
    out = np.zeros((2, *source.spec["x"].stored_shape), np.uint8).view(Trap)
    out.act = lambda: lengthened(path)
    with pytest.raises(ChangedError, match="grew"):
        source.read_into(np.array([0, 1]), {"x": out})
    source.close()


@pytest.mark.parametrize("storage", FEW_STORAGE)
def test_a_missing_file_is_named(old, storage):
    path = old(storage)
    source = HDF5Source(path, ["data"])
    path.unlink()
    with pytest.raises(MissingError) as caught:
        read(source, [0])
    assert str(path) in str(caught.value)


def test_a_change_in_one_file_of_several_leaves_the_others_readable(scans):
    source = HDF5Source(scans)
    os.truncate(scans[1], 700)
    assert read(source, [0, 11])["labels"].tolist() == [0, 11]
    with pytest.raises(ChangedError) as caught:
        read(source, [0, 3])
    assert caught.value.file == scans[1]


def test_a_change_reaches_the_user_of_a_loader(old):
    path = old("contiguous")
    source = HDF5Source(path, ["data"])
    with AsyncLoader(source, LoaderOptions(batch_size=1, shuffle=False, queue_depth=1)) as loader:
        next(loader)
        os.truncate(path, 700)
        with pytest.raises(ChangedError, match="shrank"):
            list(loader)


def test_a_changed_file_is_fine_for_a_new_source(old):
    path = old("contiguous")
    HDF5Source(path, ["data"])
    written_anew(path)
    assert_reads(HDF5Source(path, ["data"]), "data", some(SHAPE, seed=1))


@pytest.mark.parametrize("storage", ["fletcher32", "gzip", "shuffle gzip", "all filters", "gzip rows"])
def test_a_damaged_chunk_is_an_error_with_file_dataset_and_row(h5, storage):
    chunks = STORAGE[storage]["chunks"]
    path = h5(data={"data": np.zeros(SHAPE, "u1"), **STORAGE[storage]})
    with h5py.File(path) as file:
        stored = file["data"].id.get_chunk_info_by_coord((chunks[0], 0, 0, 0))
    with Path(path).open("r+b") as file:
        file.seek(stored.byte_offset)
        file.write(b"\xff" * (stored.size // 2))
    source = HDF5Source(path, ["data"])
    assert not read(source, [0])["data"].any()
    with pytest.raises(CorruptError) as caught:
        read(source, [0, chunks[0]])
    assert f"{path}:/data" in str(caught.value)
    assert (caught.value.file, caught.value.dataset) == (path, "data")
    source.close()


@pytest.mark.parametrize("chunks", [None, (2,)])
def test_a_label_that_no_int64_holds_is_refused(h5, chunks):
    path = h5(labels={"data": np.array([5, 2**63], np.uint64), "chunks": chunks})
    source = HDF5Source(path, ["labels"])
    assert read(source, [0])["labels"].tolist() == [5]
    with pytest.raises(FormatError, match=f"{path}:/labels, row 1: holds the label {2**63}"):
        read(source, [0, 1])
    source.close()


def test_a_file_replaced_between_two_fields_is_refused(h5):
    """1. The labels are read, and the file is open. 2. Another is put in its place. 3. The images are asked for, which
    h5py opens by path."""
    wanted = {"x": {"data": np.arange(5.0), "chunks": (2,), "scaleoffset": 1}, "y": np.arange(5.0)}
    path = h5("x.h5", **wanted)
    other = h5("other.h5", **wanted)
    source = HDF5Source(path, ["x", "y"])
    read(source, [0], ["y"])
    os.replace(other, path)
    with pytest.raises(ChangedError, match="replaced"):
        read(source, [0], ["x"])
    source.close()


def test_a_source_that_was_never_read_can_be_read_in_a_fork(scans):
    source = HDF5Source(scans)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if read(source, [3])["labels"].tolist() == [3] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- anything ----------------------------------------------------------------------------------------------------------


@st.composite
def datasets(draw):
    """Arguments for a dataset, and the letters of its axes."""
    letters = "".join(draw(st.permutations("N" + draw(st.sampled_from(["", "C", "T", "CH", "HW", "CHW", "CTH"])))))
    shape = tuple(draw(st.integers(1, 9 if letter == "N" else 4)) for letter in letters)
    values = some(shape, draw(st.sampled_from(DTYPES)), seed=len(letters))
    if values.ndim == 1 and values.dtype.kind == "u":
        values = values >> 1  # labels become int64; those that do not fit have a test of their own
    arguments = {"data": values}
    if draw(st.booleans()):
        arguments["chunks"] = tuple(draw(st.integers(1, n)) for n in shape)
        arguments["compression"] = draw(st.sampled_from([None, "gzip", "lzf"]))
        arguments["shuffle"] = draw(st.booleans())
        arguments["fletcher32"] = draw(st.booleans())
        arguments["maxshape"] = tuple(draw(st.sampled_from([n, None])) for n in shape)
    return arguments, letters


@settings(max_examples=300)
@given(
    parts=st.lists(datasets(), min_size=1, max_size=3),
    userblock=st.sampled_from([0, 512]),
    libver=st.sampled_from(["earliest", "v110"]),
    data=st.data(),
)
def test_any_source_is_read_as_h5py_reads_it(parts, userblock, libver, data):
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/any.h5"
        with h5py.File(path, "w", userblock_size=userblock, libver=(libver, "v110")) as file:
            for number, (arguments, _) in enumerate(parts):
                file.create_dataset(f"field{number}", **arguments)
        for number, (_, letters) in enumerate(parts):
            source = HDF5Source(path, {"x": f"field{number}"}, layout=letters)
            wanted = by_h5py(path, f"field{number}", letters)
            samples = np.array(data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1, max_size=12)))
            assert source.spec["x"].shape == wanted.shape[1:]
            assert_same(read(source, samples)["x"], wanted[samples])
            source.close()
