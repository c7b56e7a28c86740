"""`HDF5Source` from outside: its fields and files, its handles, and files that change."""

import os
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.files.damage import patch
from support.files.values import some
from support.processes import in_fork
from support.sources.comparison import assert_same_samples
from support.sources.oracle import Model, read

from lit_async_data import AsyncLoader, ChangedError, ConfigError, HDF5Source, LoaderOptions, MissingError

ROWS = 23
SHAPE = (ROWS, 5, 6, 3)

# Arguments of create_dataset for data of this shape. No chunk shape divides it: there are edge chunks.
STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": (4, 2, 4, 2)},
    "gzip tiles": {"chunks": (3, 4, 4, 2), "compression": "gzip"},
    "scale-offset": {"chunks": (3, 4, 4, 2), "scaleoffset": 0},
}
SHUFFLED = np.random.default_rng(1).permutation(ROWS)


@pytest.mark.parametrize("side", [4, 80])  # below and above the size from which batches are views
@pytest.mark.parametrize(
    ("layout", "memory_format"), [("NHWC", torch.channels_last), ("NTHWC", torch.channels_last_3d)]
)
def test_channels_last_comes_out_of_the_loader_in_that_memory_format(h5, layout, memory_format, side):
    shape = {"N": 10, "T": 2, "H": side, "W": side, "C": 3}
    path = h5(data=some([shape[letter] for letter in layout]))
    with AsyncLoader(HDF5Source(path, ["data"], layout=layout), LoaderOptions(batch_size=5, shuffle=False)) as loader:
        batches = [x for (x,) in loader]
    for x in batches:
        assert x.is_contiguous(memory_format=memory_format)
        assert not x.is_contiguous()
    assert_same_samples(torch.cat(batches).numpy(), Model(path, {"x": "data"}, layout=layout).values["x"])


@pytest.fixture
def scans(h5):
    """Files scan1, scan2, scan10 with 3, 4 and 5 samples; sample n of them all has value and label n."""
    paths, first = [], 0
    for number, rows in ((1, 3), (2, 4), (10, 5)):
        values = np.arange(first, first + rows)
        paths.append(h5(f"scan{number}.h5", data=np.repeat(values.astype("u1")[:, None], 6, axis=1), labels=values))
        first += rows
    return paths


@pytest.mark.parametrize("sample", [-1, 12, 2**40])
def test_a_sample_that_is_not_there_is_an_index_error(scans, sample):
    source = HDF5Source(scans)
    for use in (source.locate, lambda samples: read(source, samples)):
        with pytest.raises(IndexError, match=f"{sample} of 12"):
            use([3, sample])


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, as torch does
def test_a_source_that_was_read_refuses_to_be_read_in_a_fork(h5, storage):
    path = h5(data={"data": some(SHAPE), **STORAGE[storage]})
    source = HDF5Source(path, ["data"])
    read(source, [1])
    assert in_fork(lambda: read(source, [1])) == 3
    assert in_fork(lambda: read(HDF5Source(path, ["data"]), [1])) == 0  # one that was never read
    assert_same_samples(read(source, SHUFFLED)["data"], some(SHAPE)[SHUFFLED])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_started_loader_refuses_to_continue_in_a_fork(images):
    with AsyncLoader(HDF5Source(images), LoaderOptions(batch_size=10, shuffle=False)) as loader:
        next(loader)
        assert in_fork(lambda: next(loader)) == 3
        assert next(loader)[0][0, 0, 0, 0] == 10


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(("act", "status"), [("close", 0), ("give room back", 0), ("reserve", 3)])
def test_a_fork_waits_for_no_lock_that_was_held_when_it_was_made(h5, act, status):
    """1. A thread holds the lock of the decoded chunks. 2. Another forks. 3. In the child, nobody releases it."""
    chunked = {"data": some(SHAPE), "chunks": (2, *SHAPE[1:]), "compression": "gzip"}
    source = HDF5Source(h5(data=chunked), ["data"])
    read(source, [1])
    room, held, over = source.reserve(0, 0), threading.Event(), threading.Event()

    def hold():
        with source._reader.cache.room.lock:
            held.set()
            over.wait(30)

    acts = {"close": source.close, "give room back": room, "reserve": lambda: source.reserve(0, 0)}
    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        assert in_fork(acts[act]) == status
    finally:
        over.set()
        thread.join()
        source.close()


def written_anew(path):
    with h5py.File(path, "w") as file:
        file["data"] = some(SHAPE, seed=1)


def replaced(path):
    """By one of the same size and time."""
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


CHANGES = {
    "cut by half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut a little": lambda path: os.truncate(path, path.stat().st_size * 999 // 1000),
    "lengthened": lambda path: os.truncate(path, path.stat().st_size + 1),
    "written to": lambda path: patch(path, path.stat().st_size - 1, "B", path.read_bytes()[-1] ^ 0xFF),
    "written anew": written_anew,
    "replaced": replaced,
}


@pytest.fixture
def old(h5):
    """Writes a file with an old mtime, so that any later write changes it."""

    def written(storage):
        path = Path(h5(data={"data": some(SHAPE), **STORAGE[storage]}))
        os.utime(path, ns=(10**18, 10**18))
        return path

    return written


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("storage", STORAGE)
def test_a_file_that_changes_after_the_source_was_built_is_refused(old, storage, change):
    path = old(storage)
    unread, used = (HDF5Source(path, ["data"]) for _ in range(2))
    if change not in {"written anew", "replaced"}:  # which h5py refuses while the file is open; the next test
        read(used, [1])
    CHANGES[change](path)
    for source in (unread, used):
        for samples in ([0], [1, 2], [ROWS - 1]):
            with pytest.raises(ChangedError, match=f"{path}: .*build the source again") as caught:
                read(source, samples)
            assert caught.value.file == str(path)
        source.close()


@pytest.mark.parametrize("storage", STORAGE)
def test_a_file_replaced_while_open_is_never_read_instead(old, storage):
    path = old(storage)
    source = HDF5Source(path, ["data"])
    read(source, [0])
    replaced(path)
    try:
        got = read(source, SHUFFLED)["data"]
    except ChangedError:
        pass
    else:
        assert_same_samples(got, some(SHAPE)[SHUFFLED])
    source.close()
    with pytest.raises(ChangedError, match="replaced"):
        read(source, [0])


def test_a_missing_file_is_named(images):
    source = HDF5Source(images)
    os.unlink(images)
    with pytest.raises(MissingError, match=images) as raised:
        read(source, [0])
    assert str(raised.value).count(images) == 1


def test_a_change_in_one_file_of_several_leaves_the_others_readable(scans):
    source = HDF5Source(scans)
    os.truncate(scans[1], 700)
    assert read(source, [0, 11])["labels"].tolist() == [0, 11]
    with pytest.raises(ChangedError) as caught:
        read(source, [0, 3])
    assert caught.value.file == scans[1]


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


@pytest.mark.parametrize("option", ["memory_map", "allow_external"])
@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_what_is_neither_true_nor_false_is_refused(h5, option, wrong):
    with pytest.raises(ConfigError, match=rf"^{option}: .* is not true or false"):
        HDF5Source(h5(data=some(SHAPE)), ["data"], **{option: wrong})


def test_who_excludes_samples_is_told_that_numbers_count_the_rest(h5):
    path = h5(x=np.arange(20))
    assert HDF5Source(path, ["x"]).chunks.left_out == ""
    line = "2 of 20 samples are left out, and sample numbers (`index`) count the rest"
    assert HDF5Source(path, ["x"], exclude=[3, 4]).chunks.left_out == line
