"""`read` and `open_reader`: rows as numpy arrays, equal to those of h5py, decoded once each, without torch."""

import itertools
import threading

import h5py
import numpy as np
import pytest

from lit_async_data import ChangedError, ClosedError, ConfigError, FormatError, MissingError
from lit_async_data.reading import open_reader, read
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder

ROWS = 3000
DRAWN = np.random.default_rng(0).integers(-ROWS, ROWS, 200)
SELECTIONS = [None, slice(100, 2000), slice(None, None, -7), DRAWN, np.arange(ROWS) % 3 == 0, []]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("reading") / "x.h5")
    values = np.random.default_rng(0).integers(0, 50, (ROWS, 16, 16))
    with h5py.File(path, "w") as file:
        file["contiguous"] = values.astype("f4")
        for name, dtype, chunks, filters in (
            ("gzip", "f4", (64, 16, 16), {"compression": "gzip", "shuffle": True}),
            ("one per chunk", "u1", (1, 16, 16), {"compression": "lzf"}),
            ("cut across", ">i2", (64, 9, 16), {"compression": "gzip"}),
            ("raw chunks", "f8", (64, 16, 16), {}),
            ("by h5py", "i4", (64, 16, 16), {"scaleoffset": 0}),
        ):
            file.create_dataset(name, data=values.astype(dtype), chunks=chunks, **filters)
        file["labels"] = np.arange(ROWS, dtype="u2")
        file["text"] = [f"row {row}" for row in range(ROWS)]
        file["pairs"] = np.array([(row, row / 2) for row in range(ROWS)], [("a", "i4"), ("b", ">f8")])
        file["pair"] = file["pairs"][5]
        file["single"], file["word"] = 3.5, "word"
        file["none"], file["narrow"], file["null"] = np.zeros((0, 3)), np.zeros((4, 0)), h5py.Empty("f4")
    return path


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "name", ["contiguous", "gzip", "one per chunk", "cut across", "raw chunks", "by h5py", "labels", "text", "pairs"]
)
def test_rows_are_those_of_h5py(path, name, threads):
    with h5py.File(path) as file, open_reader(path, threads=threads) as reader:
        values = file[name][...]
        for rows in SELECTIONS:
            wanted = values[[] if isinstance(rows, list) else slice(None) if rows is None else rows][: len(values)]
            found = reader.read(name, rows)
            assert found.dtype == values.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found, wanted)
            out = np.empty_like(found)
            assert reader.read(name, rows, out) is out
            np.testing.assert_array_equal(out, wanted)


def test_a_dataset_without_axes_or_rows_is_read_as_a_whole(path):
    with open_reader(path) as reader:
        assert reader.read("single") == 3.5
        assert reader.read("word") == b"word"
        assert reader.read("none").shape == (0, 3)
        assert reader.read("narrow", [3, 3]).shape == (2, 0)
        with pytest.raises(FormatError, match="holds no value"):
            reader.read("null")
        with pytest.raises(ConfigError, match="single value"):
            reader.read("single", [0])


@pytest.mark.parametrize("rows", [None, np.random.default_rng(0).integers(0, ROWS, 700)])
def test_each_chunk_of_a_large_request_is_decoded_once_and_by_several_threads(path, rows, monkeypatch):
    decode, decoded, begun = IndexedSlabDecoder.decode, [], itertools.count()
    both = threading.Barrier(2)

    def counted(self, number):
        if next(begun) < 2:
            both.wait(60)  # passes only if two threads decode
        decoded.append(number)
        return decode(self, number)

    monkeypatch.setattr(IndexedSlabDecoder, "decode", counted)
    with open_reader(path, threads=2) as reader:
        reader.read("gzip", rows)
    assert sorted(decoded) == list(range(-(-ROWS // 64)))


@pytest.mark.parametrize("rows", [3, [[1]], [1.5], "x", [True]])
def test_what_is_no_choice_of_rows_is_refused(path, rows):
    with pytest.raises(ConfigError, match="not rows"):
        read(f"{path}:/labels", rows)


def test_a_member_of_records_is_read_with_them(path):
    with h5py.File(path) as file, open_reader(path) as reader:
        for rows in ([7, 0, -1], slice(2, 9), None):
            found, records = reader.read("pairs.b", rows), reader.read("pairs", rows)
            assert (found.dtype, found.flags.c_contiguous, found.tolist()) == ("=f8", True, records["b"].tolist())
        assert found.tolist() == file["pairs"]["b"].tolist()
        assert read(f"{path}:/pair.b") == 2.5


def test_errors_name_the_row_the_dataset_and_the_file(path):
    with open_reader(path) as reader:
        for error, said, given in [
            (IndexError, rf"row {ROWS} of {ROWS} in .*x\.h5:/labels", ("labels", [0, ROWS])),
            (MissingError, "did you mean labels", ("label",)),
            (MissingError, r"/pairs: has no member 'z'; its members are a, b", ("pairs.z",)),
            (ConfigError, r"^out: 'pairs\.a' is a member of records", ("pairs.a", [0], np.empty(1, "i4"))),
            *((ConfigError, "names no dataset; give a name in ", (name,)) for name in ("", "/", None)),
        ]:
            with pytest.raises(error, match=said):
                reader.read(*given)
        for out in (np.empty(1), [0], np.empty(1, "u2")[:0], np.broadcast_to(np.uint16(0), 1)):
            with pytest.raises(ConfigError, match=r"out: give an array of uint16 \(1,\) that is C-contiguous"):
                reader.read("labels", [0], out)
    with pytest.raises(ClosedError, match="its reader is closed"):
        reader.read("labels")
    with pytest.raises(ConfigError, match="FILE:/DATASET"):
        read("x.h5")
    with pytest.raises(ConfigError, match=r"threads: .* is not a whole number from 1 on"):
        open_reader(path, threads=0)


def test_a_dataset_of_h5py_is_read_if_its_file_is_open_for_reading_only(tmp_path):
    with h5py.File(tmp_path / "y.h5", "w") as file:
        data = file.create_dataset("a/b", data=np.arange(5))
        with pytest.raises(ConfigError, match="open for writing"):
            read(data)
    with h5py.File(tmp_path / "y.h5") as file:
        data = file["a/b"]
        assert read(data, [4, 0]).tolist() == [4, 0]
    with pytest.raises(ConfigError, match="is not an open dataset"):
        read(data)


def test_a_file_that_changes_under_its_reader_is_refused(tmp_path):
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["data"] = np.arange(500)
    with open_reader(tmp_path / "y.h5") as reader:
        reader.read("data")
        with open(tmp_path / "y.h5", "ab") as raw:
            raw.write(b"more")
        with pytest.raises(ChangedError):
            reader.read("data")
