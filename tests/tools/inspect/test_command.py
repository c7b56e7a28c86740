"""``inspect``: files, tables and folders that it takes, and what it says of others."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files import examples
from support.lines import check, only

from lit_async_data.__main__ import main
from lit_async_data.tools.inspect.command import report_on


@pytest.mark.parametrize("sizes", [1, 3])
def test_a_folder_of_classes(folder, sizes, capsys):
    examples.class_folders("photos", sizes)
    suggestion = only(report_on(["photos"]))
    size = "" if sizes == 1 else " data.source.image_size=224"
    assert suggestion.call.command() == f"python train.py data=folder data.source.root=photos{size}"
    check(suggestion)
    assert main(["inspect", "photos"]) == 0
    assert suggestion.call.command() in capsys.readouterr().out


def test_a_path_with_everything_that_shells_hydra_and_patterns_treat_specially():
    for name in ('a b\'s (v2), {x: 1} [0-9] "q" é.h5', "back\\slash.h5", "=,#~$HOME.h5", "null"):
        examples.images(name, 8)
        check(only(report_on([name])))
    with h5py.File("names.h5", "w") as file:
        file["my images (raw)"], file["true"] = np.zeros((20, 8, 8, 3), "u1"), np.arange(20) % 2
    check(only(report_on(["names.h5"])))


def failure(capsys, *arguments):
    assert main(["inspect", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert re.fullmatch(r"error: [^\n]+\n", said.err)
    return said.err


def test_wrong_input_ends_with_one_line_and_status_2(capsys, folder):
    examples.images("x.h5", 8)
    Path("text.h5").write_text("no")
    Path("short.h5").write_bytes(Path("x.h5").read_bytes()[:2000])
    Path("empty").mkdir()
    Path("sheet.xlsx").write_bytes(b"")
    assert "missing.h5: no such file" in failure(capsys, "missing.h5")
    assert "*.nope: matches no file" in failure(capsys, "*.nope")
    assert "text.h5: is not an HDF5 file" in failure(capsys, "text.h5")
    assert "short.h5: is damaged, or marked as open for writing" in failure(capsys, "short.h5")
    assert f"{folder} is a folder of HDF5 files; write {folder}/*.h5" in failure(capsys, str(folder))
    assert "empty has no folders; it needs one for each class" in failure(capsys, "empty")
    assert "pandas.read_excel('sheet.xlsx')" in failure(capsys, "sheet.xlsx")
    assert "t.csv is a table or a folder; give one" in failure(capsys, "t.csv", "x.h5")
    assert "image-size: describes what --check-all reads; add" in failure(capsys, "x.h5", "--image-size", "8")
    assert "no such file" in failure(capsys, "missing.csv").lower()
