"""`doctor`: every line that it prints can be used, and wrong input is one line."""

import argparse
import contextlib

import h5py
import numpy as np
import pytest
from support.files import examples

from lit_async_data.__main__ import main
from lit_async_data.tools.doctor import command, examination


@pytest.mark.parametrize("arguments", [["scan.h5"], ["photos", "--image-size", "16", "12", "--resize", "crop"]])
def test_the_python_lines_run(arguments, as_json, photos):
    examples.images("scan.h5")
    report = as_json(*arguments, "--batch-size", "8", "--warm")
    names = {}
    exec(report["python"], names)
    with names["loader"] as loader:
        assert next(loader)["x"].shape == (8, 3, 16, 12)
        assert loader.options.workers == report["options"]["workers"]
    names["source"].close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["scan.h5", "--fields", "x=images", "--layout", "x=NHWC"],
        ["photos.csv", "--image-size", "8"],
        ["photos"],
        ["signal.h5"],
        ["column.h5"],
    ],
)
def test_the_lines_that_pack_run(arguments, photos):
    examples.images("scan.h5")
    examples.recording("signal.h5", groups=1)
    with h5py.File("column.h5", "w") as file:
        file["x"], file["labels"] = np.zeros((6, 4, 4), "f4"), np.arange(6)[:, None]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    call = command.given_call(parsed.files, parsed)
    names = {}
    exec(command.pack_lines(call), names)
    names["source"].close()
    with h5py.File("packed.h5") as file, contextlib.closing(call.build()) as source:
        assert len(file["origin/row"]) >= len(source)  # of a recording, all rows are packed


def test_a_report_in_words(capsys, monkeypatch):
    examples.images("scan.h5")
    rate = examination.Rate(12_345.6, 210.0, 380.0, 0.6, 0.0)
    monkeypatch.setattr(examination, "measured", lambda *_, **__: rate)
    monkeypatch.setattr(examination, "why_pack", lambda *_, **__: "it is slow")
    with h5py.File("tokens.h5", "w") as file:
        file["x/values"], file["x/offsets"] = np.arange(40), [0, 5, 20, 40]
    assert main(["doctor", "tokens.h5", "--warm"]) == 0
    assert '))  # batch_by="x" puts samples of like length together' in capsys.readouterr().out
    assert main(["doctor", "scan.h5", "--warm"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "from memory: 12,300 samples/s; each reader 210 MB/s while reading, 380 MB/s while decoding" in text
    assert "from the disk: not measured: left out (--warm)" in text
    assert "python train.py data=hdf5 data.train.path=scan.h5" in text
    assert "it is slow from lit_async_data import HDF5Source" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.h5"], "absent.h5"),
        (["scan.h5", "--seconds", "0"], "seconds: 0.0 is not from 0.05 to 600"),
        (["scan.h5", "--batch-size", "0"], "batch_size: 0 is not a whole number from 1 on"),
        (["numbers.h5"], "nothing in numbers.h5 looks like samples; python -m lit_async_data inspect numbers.h5 says"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    examples.images("scan.h5")
    with h5py.File("numbers.h5", "w") as file:
        file["text"] = "only this"
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
