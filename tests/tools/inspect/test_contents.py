"""What datasets are and how each is read is what sources say of them."""

import h5py
import numpy as np
from support.files import examples

from lit_async_data import HDF5Source
from lit_async_data.tools.inspect.hdf5_files import hdf5_report


def test_a_dataset_is_read_as_a_source_of_it_alone_would_read_it():
    examples.everything("all.h5")
    report = hdf5_report(["all.h5"])
    readable = {each.name: each.reading for each in report.datasets if each.reading}
    names = "big_endian chunked compact contiguous gzip gzip_split ragged scale_offset split text"
    assert sorted(readable) == names.split()
    for name, reading in readable.items():
        with_source = HDF5Source("all.h5", {"x": name})
        assert with_source.chunks.reading == reading, name
        with_source.close()
    assert set(readable.values()) == {"copied", "decoded", "locked"}
    why = {each.name: each.why for each in report.datasets}
    assert why["contiguous"] == ""
    shared = "2 samples share a chunk and are decoded together; the chunk shuffle decodes them once per epoch"
    assert why["gzip"] == shared
    assert why["gzip_split"].startswith("each sample is spread over 4 chunks")
    assert why["scale_offset"].startswith("it has filters that only libhdf5 decodes; pack ")
    assert why["single"].startswith("holds a single value; ")
    assert why["soft"].startswith("is a broken link")
    assert "values of variable length that cannot be read, since none was ever written; " in why["lengths"]
    assert "holds no samples" in why["empty"]
    gzip = next(each for each in report.datasets if each.name == "gzip")
    assert (gzip.chunks, gzip.filters) == ((2, 8, 6), ("shuffle", "gzip 4"))
    assert gzip.stored_bytes < gzip.bytes == 12 * 8 * 6 * 8


def test_datasets_that_cannot_be_read_are_counted():
    examples.datasets("x.h5", {f"runs/{number}": h5py.SoftLink("/lost") for number in range(9)})
    with h5py.File("x.h5", "a") as file:
        file.create_dataset(b"s\xe9", data=[1]), file.create_group(b"g\xe9")
    assert [each.type for each in hdf5_report(["x.h5"]).datasets] == ["int64", "9 datasets"]


def test_encoded_images_are_recognised_by_their_first_bytes():
    examples.jpegs("x.h5")
    found = {each.name: (each.type, each.shape[0], each.reading) for each in hdf5_report(["x.h5"]).datasets}
    assert found.pop("joined") == ("variable, JPEG images", 6, "decoded")
    assert found == dict.fromkeys(("text", "opaque", "variable", "padded", "separate"), ("JPEG images", 6, "decoded"))


def test_what_is_wrong_in_a_group_is_said_of_the_dataset_and_the_row():
    examples.datasets("x.h5", {"r/values": np.arange(9.0), "r/offsets": [0, 5, 3, 9]})
    (group,) = hdf5_report(["x.h5"]).datasets
    assert group.why.startswith("r/offsets, row 1: 5 to 3 of 9 elements; ")


def test_a_group_with_parts_that_cannot_be_read_says_why_and_others_are_shown():
    datasets = {"r/values": h5py.SoftLink("/lost"), "r/offsets": [0, 5], "g/values/a": [0.0], "g/offsets": [0, 4]}
    datasets |= {"e/values": h5py.Empty("f8"), "e/offsets": [0, 2], "m/data": [1.0], "y": np.arange(3)}
    examples.datasets("x.h5", datasets)
    with h5py.File("x.h5", "a") as file:
        file["m"].attrs.update({"encoding-type": "csr_matrix", "shape": "2 x 3"})
    report = {each.name: each.why for each in hdf5_report(["x.h5"]).datasets}
    starts = {"r": "r/values: is a broken link", "g": "g/values: ", "e": "e/values: holds no ", "m": "cannot be read: "}
    assert all(report.pop(name).startswith(said) for name, said in starts.items())
    assert report == {"g/values/a": "", "y": ""}
