"""A B-tree in which libhdf5 lists chunks that it does not find is damage in every opening; h5py reads zeros there."""

import contextlib
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.sources.oracle import read_from

from lit_async_data import Field
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.storage.stored_chunk import is_found

ROWS, OPENINGS = 20, 2
VALUES = np.arange(1, ROWS * 6 + 1, dtype="i4").reshape(ROWS, 6)
WAYS = {
    "gzip": {"compression": "gzip"},
    "plain": {},
    "scale-offset": {"scaleoffset": 0},
    "unlimited along the second axis": {"maxshape": (ROWS, None)},
}


def written(path, *, row_numbers=False, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=VALUES, chunks=(4, 6), **options)
        file["wanted"] = np.arange(ROWS)
        if row_numbers:
            del file["wanted"]
            file.create_dataset("wanted", data=np.arange(1, ROWS), chunks=(4,))
    return Path(path).read_bytes()


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


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_chunk_that_is_listed_and_not_found_is_damage_or_read_right(tmp_path, options):
    path = str(tmp_path / "x.h5")
    errors = found = 0
    for place in damaged(written(path, **options), "data", path):
        found += 1
        for _ in range(OPENINGS):
            try:
                assert (read_from(path, {"data": "data"})["data"] == VALUES).all(), place
            except CorruptError as error:
                errors += (error.file, error.dataset) == (path, "data")
    assert found > 9
    assert errors > OPENINGS * found / 2


@pytest.mark.parametrize(
    ("fields", "options"),
    [({"x": "data"}, {"rows": "wanted"}), ({"x": Field("data", lookup="wanted")}, {})],
    ids=["rows", "lookup"],
)
def test_row_numbers_are_not_zeros_either(tmp_path, fields, options):
    path = str(tmp_path / "x.h5")
    content = written(path, row_numbers=True)
    chosen = read_from(path, fields, **options)["x"]
    for place in damaged(content, "wanted", path):
        with contextlib.suppress(CorruptError):
            assert (read_from(path, fields, **options)["x"] == chosen).all(), place


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_chunk_is_found_without_being_read(tmp_path, options):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("data", (ROWS, 6), "i4", chunks=(4, 6), **options)
        dataset[4:8] = 1
        assert [is_found(dataset, (row, 0)) for row in range(0, ROWS, 4)] == [False, True, False, False, False]


def test_what_inflates_beyond_a_chunk_is_not_left_to_libhdf5(tmp_path):
    """libhdf5 would take memory for all of it."""
    path = str(tmp_path / "x.h5")
    written(path, scaleoffset=0, compression="gzip")
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk((8, 0), zlib.compress(bytes(10**6)))
    with pytest.raises(CorruptError, match=r"chunk \(8, 0\) of \d+ bytes.*inflates beyond the \d+ bytes"):
        read_from(path, {"data": "data"})
