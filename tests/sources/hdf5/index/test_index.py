"""What libhdf5 lists and does not find is damage; what an index might read wrongly is left to h5py; cached indexes."""

import contextlib
import logging
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.hdf5 import WAYS, create, needs_libhdf5, numbered
from support.sources.oracle import check, read, read_from, refused

from lit_async_data import ConfigError, CorruptError, Field, HDF5Source
from lit_async_data.sources import local_files
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.index.index import IndexCache, IndexKey
from lit_async_data.sources.hdf5.storage.codecs import is_found

ROWS, OPENINGS, SHAPE = 20, 2, (13, 7, 5)
VALUES = np.arange(1, ROWS * 6 + 1, dtype="i4").reshape(ROWS, 6)


def agree(path, name):
    """Whether libhdf5 finds the chunks that it lists and no others; None if it cannot list them."""
    with h5py.File(path) as file:
        dataset, listed = file[name], []
        try:
            dataset.id.chunk_iter(lambda info: listed.append(info.chunk_offset))
            corners = [(row, 0)[: dataset.ndim] for row in range(0, ROWS, 4)]
            return {corner for corner in corners if is_found(dataset, corner)} == set(listed)
        except (OSError, RuntimeError):
            return None


def damaged(content, name, path):
    """Writes the file again and again, with other bytes in the node of a B-tree; yields where they disagree."""
    node = content.rindex(b"TREE")  # of the dataset written last
    for at in range(node, node + 24 + 6 * 40):
        Path(path).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        if agree(path, name) is False:
            yield at


def check_damaged(path, name, fields, **options):
    """Whether a wrong node of an index brings errors that name the dataset, or the right values."""
    right = read_from(path, fields, **options)["x"]
    errors = found = 0
    for place in damaged(Path(path).read_bytes(), name, path):
        found += 1
        for _ in range(OPENINGS):
            try:
                assert (read_from(path, fields, **options)["x"] == right).all(), place
            except CorruptError as error:
                errors += (error.file, error.dataset) == (path, name)
    assert found > 9
    assert errors > OPENINGS * found / 2


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_chunk_that_is_listed_and_not_found_is_damage_or_read_right(h5, options):
    check_damaged(h5(data={"data": VALUES, "chunks": (4, 6), **options}), "data", {"x": "data"})


@pytest.mark.parametrize(
    ("fields", "options"),
    [({"x": "data"}, {"rows": "wanted"}), ({"x": Field("data", lookup="wanted")}, {})],
    ids=["rows", "lookup"],
)
def test_row_numbers_are_not_zeros_either(h5, fields, options):
    path = h5(data={"data": VALUES, "chunks": (4, 6)}, wanted={"data": np.arange(1, ROWS), "chunks": (4,)})
    check_damaged(path, "wanted", fields, **options)


def test_a_dataset_of_too_many_chunks_is_left_to_h5py(h5, monkeypatch):
    monkeypatch.setattr(index, "MOST_CHUNKS", 4)
    assert HDF5Source(h5(data={"data": VALUES, "chunks": (4, 6)}), ["data"]).chunks.reading == "locked"


FILTERS = [["gzip"], ["shuffle", "gzip"], ["gzip", "fletcher32"], ["lzf"], ["shuffle"], ["fletcher32", "shuffle"]]
FILTERS.append(["fletcher32"])
CHUNKS = [(4, 7, 5), (4, 3, 2), (13, 7, 3), (4, 4, 5)]
MAXSHAPES = [SHAPE, (None, None, 5), (None, 7, 5), (40, 40, 40), (13, None, 5)]


@needs_libhdf5
@pytest.mark.usefixtures("no_extra_codecs")
@pytest.mark.parametrize(("filters", "chunks", "maxshape"), [*zip(FILTERS * 2, CHUNKS * 4, MAXSHAPES * 3)], ids=str)
def test_edge_chunks_may_be_left_unfiltered(new, path, filters, chunks, maxshape):
    """The index says that they were filtered. Unshuffling never fails: it would give wrong values silently."""
    with new() as file:
        arguments = {"chunks": chunks, "maxshape": maxshape, "filters": filters, "raw_edges": True}
        create(file, "data", SHAPE, "i4", **arguments)[...] = numbered(SHAPE)
        create(file, "equal", SHAPE, "i4", **arguments)[...] = numbered(SHAPE) * (np.arange(13) < 12)[:, None, None]
    check(path, {"x": "data"}, reading="locked")
    check(path, {"x": "equal"})  # bytes that are alike look the same either way, and prove nothing
    check(path, {"x": "data"}, layout="HNW")


@pytest.mark.parametrize(("libver", "filters"), [("earliest", ["gzip"]), ("v110", [])])
@pytest.mark.parametrize("maxshape", [(13, None, 5), (20, 9, None)], ids=str)
def test_one_unlimited_axis_that_is_not_the_first_is_read_right(new, path, caplog, libver, maxshape, filters):  # noqa: PLR0917
    """With a warning. libhdf5 itself returns wrong coordinates of these chunks."""
    with new(libver=libver) as file:
        create(file, "data", SHAPE, "i4", chunks=(4, 3, 2), maxshape=maxshape, filters=filters)[...] = numbered(SHAPE)
    for layout in ("NHW", "HNW", "HWN"):
        check(path, {"x": "data"}, layout=layout, reading="locked")
    assert f"{path}:/data: is read by h5py, one thread at a time: it is unlimited along one axis" in caplog.text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache; small files count as large and new ones as old, since no program can set their ctime."""
    monkeypatch.setattr(index, "FEWEST_CHUNKS", 2)
    monkeypatch.setattr(local_files, "RECENT_NS", 0)
    return tmp_path / "made" / "cache"


@pytest.fixture
def built(monkeypatch):
    """One entry for each time that an index was built."""
    built = []
    once = index.columns_of
    monkeypatch.setattr(index, "columns_of", lambda dataset: built.append(dataset.name) or once(dataset))
    return built


@pytest.fixture
def aged(path):
    """A file that seems to have been written a while ago."""
    write(path, VALUES)
    return path


def write(path, values):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(4, 6), maxshape=(None, 6), compression="gzip")
    age(path)


def age(path, seconds=100):
    now = os.stat(path).st_mtime_ns
    os.utime(path, ns=(now, now - seconds * 10**9))


def opened(path, folder):
    """All samples, read by the index."""
    with contextlib.closing(HDF5Source(path, ["data"], cache_dir=folder)) as source:
        assert source.chunks.reading == "decoded"
        return read(source, np.arange(len(source)))["data"]


def test_the_second_opening_builds_nothing_and_reads_the_same(aged, folder, built, tmp_path):
    with h5py.File(aged, "r+") as file:
        file["data"].resize((32, 6))  # its last chunks are not there
    age(aged)
    os.symlink(aged, tmp_path / "link.h5")  # all links share the index of the data
    for file in (aged, aged, str(tmp_path / "link.h5")):
        assert (opened(file, folder) == np.concatenate([VALUES, np.zeros((12, 6))])).all()
    assert built == ["/data"]
    assert next(folder.iterdir()).name.startswith("x.h5.")


def test_each_dataset_of_each_file_has_its_own_index(aged, folder, built, tmp_path):
    with h5py.File(aged, "r+") as file:
        file.create_dataset("other", data=VALUES + 1, chunks=(2, 6))
    (tmp_path / "copy").mkdir()
    copy = shutil.copy2(aged, tmp_path / "copy")
    for _ in range(2):
        for file in (aged, copy):
            out = read_from(file, ["data", "other"], cache_dir=folder)
            assert (out["other"] == out["data"] + 1).all()
    assert len(built) == len(os.listdir(folder)) == 4


def test_the_index_of_a_small_file_is_not_cached(aged, folder, monkeypatch):
    monkeypatch.setattr(index, "FEWEST_CHUNKS", 6)
    opened(aged, folder)
    assert os.listdir(folder) == []


def test_the_index_of_a_file_that_has_just_changed_is_not_cached_yet(aged, folder, monkeypatch):
    monkeypatch.setattr(local_files, "RECENT_NS", 2 * 10**9)
    now = os.stat(aged).st_ctime_ns  # its time of writing was set back
    for later, cached in ((1, 0), (3, 1)):
        monkeypatch.setattr(local_files.time, "time_ns", lambda later=later: now + later * 10**9)
        opened(aged, folder)
        assert len(os.listdir(folder)) == cached


def test_an_index_that_fails_verification_is_not_cached(aged, folder):
    with h5py.File(aged, "r+") as file:  # an edge chunk that cannot be decoded
        file["data"].resize((18, 6))
        file["data"].id.write_direct_chunk((16, 0), b"?" * 96)
    age(aged)
    HDF5Source(aged, ["data"], cache_dir=folder).close()
    assert os.listdir(folder) == []


def test_what_is_no_path_of_a_cache_is_refused(aged):
    assert refused(ConfigError, [], aged, ["data"], cache_dir=True).option == "cache_dir"


def touched(path):
    age(path, 5)
    return VALUES


def with_another_ctime(path):
    """It may have been written to, and its time set back."""
    os.chmod(path, 0o640)
    return VALUES


def replaced(path):
    """By a copy of other values, of the same size and time."""
    was = os.stat(path)
    write(path + "2", VALUES[::-1])
    os.utime(path + "2", ns=(was.st_mtime_ns, was.st_mtime_ns))
    os.replace(path + "2", path)
    return VALUES[::-1]


@pytest.mark.parametrize("change", [touched, with_another_ctime, replaced])
def test_the_index_of_a_changed_file_is_built_again_and_the_log_says_so(aged, folder, built, caplog, change):
    opened(aged, folder)
    expected = change(aged)
    with caplog.at_level(logging.INFO, "lit_async_data"):
        assert (opened(aged, folder) == expected).all()
        assert (opened(aged, folder) == expected).all()
    assert len(built) == 2
    (record,) = caplog.records
    assert f"{aged}:/data: the index in {next(folder.iterdir())} is damaged or of another state" in record.message


@pytest.mark.parametrize("column", ["offsets", "sizes", "masks"])
@pytest.mark.parametrize(
    "forge",
    [lambda column: column[::-1] + 1, lambda column: column[::-1], lambda column: np.append(column[:-1], [7])],
    ids=["wrong", "swap", "last"],
)
def test_an_intact_but_wrong_index_is_built_again(aged, folder, built, column, forge):
    opened(aged, folder)
    with h5py.File(aged) as file:
        key, cache = IndexKey.of(file["data"]), IndexCache(folder)
    columns = cache.load(key)
    false = forge(columns[column])
    cache.store(key, columns | {column: false})
    assert (opened(aged, folder) == VALUES).all()
    assert len(built) == (1 if (false == columns[column]).all() else 2)
