"""The report is what docs/tools/inspect.md says, for people and for programs; suggestions are what can be read."""

import dataclasses
import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files import examples
from support.lines import only

from lit_async_data.__main__ import main
from lit_async_data.tools.call import Call
from lit_async_data.tools.inspect.contents import SHOWN
from lit_async_data.tools.inspect.hdf5_files import hdf5_report
from lit_async_data.tools.inspect.report import ColumnReport, Report, Suggestion

PAGE = (Path(__file__).parents[3] / "docs/tools/inspect.md").read_text()


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
    assert signals.batch["x"] == {"dtype": "float32", "shape": (9, 3)}


def test_a_pipe_gets_every_name_whole_and_no_colour(capsys):
    name = "a_dataset_with_a_name_that_no_terminal_is_wide_enough_for/" * 4 + "images"
    with h5py.File("x.h5", "w") as file:
        file[name], file["labels"] = np.zeros((20, 8, 8, 3), "u1"), np.arange(20) % 2
    assert main(["inspect", "x.h5"]) == 0
    said = capsys.readouterr().out
    assert sum(name in line for line in said.splitlines()) >= 3  # table, Python, command line
    assert "\x1b" not in said
    assert not re.search(r"[ \t]\n", said)


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
