"""Values of variable length: what h5py reads, or an error that names the row."""

import h5py
import numpy as np
import pytest
from support.files.encoded_images import field, picture, written
from support.sources.oracle import refused_when_read

from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.storage.global_heap import GlobalHeap


@pytest.mark.parametrize("storage", ["variable", "of other addresses", "variable behind a user block"])
def test_the_global_heap_equals_h5py(tmp_path, storage):
    """Many values of one collection, collections of one value, and the holes of values that were written again."""
    rng, path = np.random.default_rng(0), written(tmp_path / "x.h5", storage, images=[b"?"] * 300)
    with h5py.File(path, "a") as file:
        for size in (40, 300, 9000):
            for row in rng.integers(300, size=200):
                file["x"][row] = rng.integers(0, 255, rng.integers(size), dtype=np.uint8)
        values, offset = file["x"][...], file["x"].id.get_offset()
        address_bytes, length_bytes = file.id.get_create_plist().get_sizes()
    data = np.fromfile(path, np.uint8)
    references = data[offset : offset + 300 * (8 + address_bytes)].reshape(300, -1)
    heap = GlobalHeap(length_bytes, 512 if storage.endswith("user block") else 0, len(data))
    for reference, value in zip(heap.references(references).tolist(), values, strict=True):
        np.testing.assert_array_equal(heap.value(reference, lambda at, n: data[at : at + n], ""), value)


DAMAGES = {
    "to nowhere": (lambda data, at, _: data[at + 4 : at + 12].fill(0x7F), "outside of the file"),
    "to another place": (lambda data, at, _: data[at + 4 : at + 5].fill(0x30), "no collection"),
    "to another object": (lambda data, at, _: data[at + 12 : at + 16].fill(9), "missing"),
    "of another length": (lambda data, at, _: data[at : at + 1].__iadd__(1), "but it has"),
    "to a damaged collection": (lambda data, _, heap: data[heap : heap + 4].fill(0), "no collection"),
    "to a collection that is too long": (lambda data, _, heap: data[heap + 8 : heap + 16].fill(0x7F), "no collection"),
    "to an object that is too long": (lambda data, _, heap: data[heap + 24 : heap + 30].fill(0x7F), "missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_reference_or_heap_is_named_by_its_row(tmp_path, damage):
    path = written(tmp_path / "x.h5", images=[picture(number, sides=(40, 50)) for number in range(4)])
    with h5py.File(path) as file:
        at = file["x"].id.get_offset() + 2 * 16
    data = np.fromfile(path, np.uint8)
    change, said = DAMAGES[damage]
    change(data, at, int.from_bytes(data[at + 4 : at + 12].tobytes(), "little"))
    data.tofile(path)
    error = refused_when_read(CorruptError, ["row 2", said], path, field(image_size=9), [2])
    assert (error.row, error.sample_id) == (2, 2)
