"""Datasets are described as sources read them; the report is the one that docs/tools/inspect.md describes."""

import dataclasses
import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files import examples
from support.lines import only

from lit_async_data import HDF5Source
from lit_async_data.__main__ import main
from lit_async_data.tools.call import Call
from lit_async_data.tools.contents import SHOWN, ColumnReport, Report, Suggestion
from lit_async_data.tools.inspect import hdf5_report

PAGE = (Path(__file__).parents[2] / "docs/tools/inspect.md").read_text()


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
    assert why["gzip"].startswith("2 samples share a chunk and are decoded together; the chunk shuffle decodes them ")
    assert why["scale_offset"].startswith("it has filters that only libhdf5 decodes; pack ")
    assert why["single"].startswith("holds a single value; ")
    assert why["soft"].startswith("is a broken link")
    assert "holds no samples" in why["empty"]
    gzip = next(each for each in report.datasets if each.name == "gzip")
    assert (gzip.chunks, gzip.filters) == ((2, 8, 6), ("shuffle", "gzip 4"))
    assert gzip.stored_bytes < gzip.bytes == 12 * 8 * 6 * 8


def test_a_group_with_parts_that_cannot_be_read_says_why_and_others_are_shown():
    datasets = {"r/values": h5py.SoftLink("/lost"), "r/offsets": [0, 5], "g/values/a": [0.0], "g/offsets": [0, 4]}
    datasets |= {"e/values": h5py.Empty("f8"), "e/offsets": [0, 2], "m/data": [1.0], "y": np.arange(3)}
    datasets |= {"w/values": np.arange(9.0), "w/offsets": [0, 5, 3, 9]}
    examples.datasets("x.h5", datasets)
    with h5py.File("x.h5", "a") as file:
        file["m"].attrs.update({"encoding-type": "csr_matrix", "shape": "2 x 3"})
    report = {each.name: each.why for each in hdf5_report(["x.h5"]).datasets}
    starts = {"r": "r/values: is a broken link", "g": "g/values: ", "e": "e/values: holds no ", "m": "cannot be read: "}
    starts["w"] = "w/offsets, row 1: 5 to 3 of 9 elements; "
    assert all(report.pop(name).startswith(said) for name, said in starts.items())
    assert report == {"g/values/a": "", "y": ""}


@pytest.mark.parametrize("damaged", [False, True])
def test_what_does_not_fit_is_named(damaged):
    examples.images("a.h5", 8)
    Path("b.h5").write_text("no") if damaged else examples.masks("b.h5")
    (note,) = hdf5_report(["a.h5", "b.h5"]).notes
    assert "does not fit: " in note
    assert ("b.h5: is not an HDF5 file" in note) == damaged


def test_the_first_sample_may_be_empty():
    examples.jpegs("x.h5")
    with h5py.File("x.h5", "a") as file, h5py.File("y.h5", "w") as groups:
        for name in file.keys() - {"variable"}:
            del file[name]
        file["variable"][0] = np.zeros(0, np.uint8)
        for number in range(5):
            groups[f"run_{number}/signal"], groups[f"run_{number}/label"] = np.ones((number and 9, 3), "f4"), number % 2
    images, signals = (only(hdf5_report([name])) for name in ("x.h5", "y.h5"))
    assert images.batch["x"] == {"dtype": "uint8", "shape": (3, 10, 12)}
    assert images.notes[-1].startswith("the first that can be read is sample 1: --check-all")
    with h5py.File("x.h5", "a") as file:
        file["variable"][0], file["variable"][2] = file["variable"][1], np.zeros(0, np.uint8)
    assert only(hdf5_report(["x.h5"])).notes[-1].startswith("sample 2 cannot be read: --check-all")
    assert signals.batch["x"] == {"dtype": "float32", "shape": (9, 3)}


def test_json_tells_what_the_report_does(capsys):
    examples.images("x.h5", 8)
    assert main(["inspect", "x.h5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(hdf5_report(["x.h5"]).as_dict()))
    assert told["version"] == 3
    assert [each["name"] for each in told["datasets"]] == ["age", "images", "labels", "patient"]


def test_the_document_names_every_key_of_the_json():
    names = [field.name for part in (Report, ColumnReport) for field in dataclasses.fields(part)]
    names += [*SHOWN, *Report("", [], suggestions=[Suggestion("", Call("HDF5Source", ""))]).as_dict()["suggestions"][0]]
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_the_document_shows_what_is_printed(capsys):
    examples.images("scan.h5", 6000)
    assert main(["inspect", "scan.h5"]) == 0
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]

    def plain(text):  # without sizes, which depend on zlib, and what follows from their widths
        return re.sub(r"[\d.]+ [KM]?i?B|[\s─]+", " ", text).split()

    assert plain(shown) == plain(capsys.readouterr().out)
