"""Where samples of variable length lie, and which of them lie nowhere."""

import re

import h5py
import numpy as np
import pytest
from support.files.damage import damage_chunk, patch
from support.files.sequences import STORED, check, sequences, written
from support.sources.oracle import refused

from lit_async_data import AsyncLoader, ConfigError, CorruptError, Field, FormatError, HDF5Source
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.schema import encoded


@pytest.mark.parametrize("earliest", [True, False])
def test_any_version_of_the_format(path, earliest):
    with h5py.File(path, "w", libver="earliest" if earliest else "latest") as file:
        file.create_dataset("x", (3,), h5py.vlen_dtype(np.int16), chunks=(2,))[1] = np.arange(5, dtype=np.int16)
    check(HDF5Source(path, {"x": "x"}), [[], range(5), []])


def with_wrong_references(path, values):
    written(path, values, np.int32)
    with h5py.File(path) as file:
        begin = file["x"].id.get_offset()
    for row, place, nbytes in [(9, 4, 7), (20, 0, 4)]:  # an address and a length
        patch(path, begin + 16 * row + place, f"{nbytes}s", b"\xff" * nbytes)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_samples_that_are_nowhere_are_told_at_opening_and_named_when_read(path, kind, caplog):
    values, lost, said = sequences(np.int32), (9, 20), "refers to a place outside of the file"
    with_wrong_references(path, values)
    source = HDF5Source(path, {"x": "x", "y": "y"})
    assert re.search(rf"{len(lost)} of 60 samples cannot be read: \S+, row 9: {said}", caplog.text)
    assert caplog.text.count("cannot be read") == 1
    for row in lost:
        values[row] = values[0]  # lends its length, so that no bucket is of bad ones
        with pytest.raises(CorruptError, match=f"row {row}: {said}") as caught:
            source[row]
        error = caught.value
        assert (error.file, error.dataset, error.row, error.sample_id) == (path, "x", row, row)
    assert source.column("x_length").tolist() == list(map(len, values))
    options = {"batch_size": 8, "batch_by": "x", "workers": 1, "worker_kind": kind, "on_error": "skip", "max_bad": 4}
    left = {row: values[row] for row in range(60) if row not in lost}
    with AsyncLoader(source, options) as loader:
        found = {y: x[:n].tolist() for batch in loader for y, x, n in zip(*map(batch.get, ("y", "x", "x_length")))}
    assert {int(row): value for row, value in found.items()} == {row: value.tolist() for row, value in left.items()}
    caplog.clear()
    check(HDF5Source(path, {"x": "x"}, exclude=lost), left.values())
    assert "cannot be read" not in caplog.text
    refused(CorruptError, [f"row 9: {said}"], path, {"x": "x"}, rows=lost)


def test_references_are_kept_until_the_file_changes(path, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "changed_recently", lambda *_: False)
    monkeypatch.setattr(index, "FEWEST_CHUNKS", 9)
    for values in (sequences(np.int32), sequences(np.int32)[::-1]):
        written(path, values, np.int32, **STORED["chunks"])
        check(HDF5Source(path, {"x": "x"}, cache_dir=tmp_path), values)
        with monkeypatch.context() as kept:
            kept.setattr(encoded, "_stored_references", None)
            check(HDF5Source(path, {"x": "x"}, cache_dir=tmp_path), values)


def test_references_that_cannot_be_decoded_are_found_at_opening(path):
    written(path, sequences(np.int32), np.int32, **STORED["gzip"])
    damage_chunk(path, "x", (32,), bytes(16), skip=4)
    error = refused(CorruptError, ["row 32: ", "deflate"], path, {"x": "x"})
    assert (error.file, error.dataset, error.row) == (path, "x", 32)


def test_references_in_another_file_are_refused(path, h5):
    written(path, sequences(np.int32), np.int32)
    link = h5("link.h5", x=h5py.ExternalLink("x.h5", "/x"))
    refused(FormatError, ["since other files hold its values"], link, {"x": "x"}, allow_external=True)


@pytest.mark.parametrize(
    ("field", "kind", "text"),
    [
        (Field("x", window=(0, 2)), ConfigError, "window: does not apply"),
        (Field("x", max_length=10), FormatError, "raise max_length"),
        (Field("x", fill=0.5), ConfigError, "fields.x.fill: 0.5 is not a value of int32"),
        (Field("y", fill=1), ConfigError, "fields.x.fill: .*holds no samples of variable length"),
        (Field("two"), FormatError, "on 2 axes"),
        (Field("nested"), FormatError, "values of variable length"),
        (Field("unwritten"), FormatError, "since none was ever written"),
    ],
)
def test_what_does_not_fit_is_named(path, field, kind, text):
    written(path, sequences(np.int32), np.int32)
    with h5py.File(path, "a") as file:
        file.create_dataset("two", (2, 2), h5py.vlen_dtype(np.int32))[0, 0] = np.arange(3)
        file.create_dataset("nested", (2,), h5py.vlen_dtype(np.dtype([("a", "i4")])))
        file.create_dataset("unwritten", (2,), h5py.vlen_dtype(np.int32))
    with pytest.raises(kind, match=text):
        HDF5Source(path, {"x": field})
