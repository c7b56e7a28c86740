"""``inspect --check-all``: bad samples are found and listed, and what it prints leaves them out."""

import contextlib
import csv
import errno
import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from support.files import examples
from support.files.hdf5 import stored_spans
from support.lines import built_by_command, built_by_python
from support.sources.oracle import read

from lit_async_data import AsyncLoader, HDF5Source, ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.errors import ChangedError, SourceError
from lit_async_data.sources.local_files import COLUMNS
from lit_async_data.tools import inspect


def damage(path, name, chunks):
    spans = stored_spans(path, name)
    with open(path, "r+b") as file:
        for chunk in chunks:
            file.seek(spans[chunk][0] + spans[chunk][1] // 2)
            file.write(b"\xff" * 8)


def table(bad, count=20):
    """A table of images: in some rows the file is missing, cut off, or outside."""
    os.mkdir("photos")
    for number in range(count):
        Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(f"photos/{number}.png")
    paths = [f"photos/{number}.png" for number in range(count)]
    for number, how in bad.items():
        if how == "cut":
            Path(paths[number]).write_bytes(Path(paths[number]).read_bytes()[:-20])
        elif how == "missing":
            os.unlink(paths[number])
        else:
            paths[number] = how
    with open("birds.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "path", "label"), *((f"{n:03}", paths[n], n % 2) for n in range(count))])


def checked(*arguments, status=1):
    assert main(["inspect", "--check-all", *arguments]) == status
    with open("bad_samples.csv", newline="") as file:
        return list(csv.DictReader(file))


def printed_sources(text):
    python = "\n".join(line.strip() for line in re.findall(r"^  (?:from|source).*$", text, re.MULTILINE))
    command = re.search(r"^  python train\.py .*$", text, re.MULTILINE)[0]
    return built_by_python(python), built_by_command(command)


@pytest.mark.parametrize("block", [1, inspect.BLOCK_BYTES])
def test_damaged_chunks_name_their_own_rows_and_can_be_left_out(capsys, monkeypatch, block):
    monkeypatch.setattr(inspect, "BLOCK_BYTES", block)
    examples.images("scan.h5", 58)  # the last chunk is not full
    with h5py.File("scan.h5") as file:
        values = np.moveaxis(file["images"][...], -1, 1)
    damage("scan.h5", "images", [2, 7, 14])
    bad = [*range(8, 12), *range(28, 32), 56, 57]
    lines = checked("scan.h5")
    assert list(lines[0]) == list(COLUMNS)
    assert [int(line["row"]) for line in lines] == [int(line["id"]) for line in lines] == bad
    assert {(line["file"], line["dataset"], line["path"]) for line in lines} == {(os.path.abspath("scan.h5"), "/", "")}
    assert all("/images" in line["cause"] for line in lines)
    text = capsys.readouterr().out
    assert text.startswith("10 of 58 samples")
    assert text.count("\n · ") == 3  # each chunk once
    for source in printed_sources(text):
        with contextlib.closing(source):
            everything = read(source, np.arange(len(source)))
            assert np.array_equal(everything["x"], np.delete(values, bad, axis=0))
            assert np.array_equal(everything["y"], np.delete(np.arange(58) % 5, bad))
            assert [place.row for place in source.locate(range(len(source)))] == sorted({*range(58)} - {*bad})


def test_missing_and_cut_off_images_are_listed_and_can_be_left_out(capsys):
    table({0: "cut", 7: "missing", 8: "../secret.png", 19: "cut"})
    lines = checked("birds.csv", "--fields", "x=path", "y=label", "--id", "id", "--image-size", "4", "6")
    paths = {0: os.path.abspath("photos/0.png"), 7: os.path.abspath("photos/7.png"), 8: "../secret.png"}
    paths[19] = os.path.abspath("photos/19.png")
    named = [(line["row"], line["id"], line["path"]) for line in lines]
    assert named == [(str(number), f"{number:03}", path) for number, path in paths.items()]
    for source in printed_sources(capsys.readouterr().out):
        numbers = [*range(1, 7), *range(9, 19)]
        assert read(source, np.arange(len(source)))["x"][:, 0, 0, 0].tolist() == numbers
        assert [place.id for place in source.locate(range(len(source)))] == [f"{number:03}" for number in numbers]


def test_without_bad_samples_the_status_is_0_and_the_list_is_empty():
    table({})
    Path("bad_samples.csv").write_text("of an earlier check")
    assert checked("birds.csv", status=0) == []
    assert len(ManifestSource("birds.csv", ["path"], exclude="bad_samples.csv")) == 20


@pytest.mark.parametrize("error", [SourceError("no disk"), ChangedError("rewritten"), MemoryError()])
def test_what_is_no_fault_of_samples_ends_with_one_line_and_no_list(capsys, monkeypatch, error):
    def failing(_, samples):
        if 7 in samples:
            raise error from OSError(errno.ENOTCONN, "not mounted")

    table({})
    monkeypatch.setattr(inspect, "read", failing)
    assert main(["inspect", "--check-all", "birds.csv"]) == 2
    assert re.fullmatch("error: .*\n", capsys.readouterr().err)
    assert sorted(os.listdir()) == ["birds.csv", "photos"]


@pytest.mark.parametrize(
    ("given", "message"), [([], "is the disk there"), (["--bad-list", "gone/bad.csv"], "bad-list: .* in no folder")]
)
def test_if_all_samples_are_bad_the_disk_is_suspected_unless_no_list_could_be_written_anyway(capsys, given, message):
    table(dict.fromkeys(range(20), "missing"))
    assert main(["inspect", "--check-all", "birds.csv", "--fields", "x=path", "--image-size", "4", *given]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not os.path.exists("bad_samples.csv")


def test_windows_of_groups_are_left_out_by_their_anchors():
    with h5py.File("rec.h5", "w") as file:
        for name in ("a", "b"):
            file.create_dataset(f"{name}/data", data=np.arange(40.0), chunks=(10,), compression="gzip")
    damage("rec.h5", "b/data", [2])
    lines = checked("rec.h5", "--fields", "x=data", "--group", "*")
    assert [(line["dataset"], line["row"]) for line in lines] == [("/b", str(row)) for row in range(20, 30)]
    fields = {"x": {"name": "data", "window": (0, 4)}}
    source = HDF5Source("rec.h5", fields, group="*", stride=5, exclude="bad_samples.csv")
    assert [place.row for place in source.locate(range(len(source)))] == [*range(0, 40, 5), 0, 5, 10, 15, 30, 35]
    whole = HDF5Source("rec.h5", ["data"], group="*")
    options = {"batch_size": 8, "on_error": "skip", "max_bad": 10, "quarantine": "quarantine.jsonl"}
    with AsyncLoader(whole, options) as loader:
        list(loader)
    assert len(HDF5Source("rec.h5", ["data"], group="*", exclude="quarantine.jsonl")) == 70


def test_cells_without_a_type_are_listed(capsys):
    examples.anndata("cells.h5ad", missing=True)
    bad = checked("cells.h5ad")
    assert [int(each["row"]) for each in bad] == [*range(0, 20, 3)]
    assert "-1 is a missing value" in bad[0]["cause"]
    for source in printed_sources(capsys.readouterr().out):
        assert len(source) == 13
        assert set(source.column("y").tolist()) == {0, 1}


def test_rows_of_a_table_that_null_drop_leaves_out_are_listed(capsys):
    table({7: "missing", 9: ""})
    lines = Path("birds.csv").read_text().splitlines()
    Path("birds.csv").write_text("\n".join([*lines[:4], lines[4].removesuffix("1"), *lines[5:]]))
    bad = checked("birds.csv")
    named = [(each["row"], each["path"]) for each in bad]
    assert named == [("7", os.path.abspath("photos/7.png")), ("3", ""), ("9", "")]
    assert "column 'label': no value; null: drop leaves the row out" in bad[1]["cause"]
    assert "column 'path': no value" in bad[2]["cause"]
    text = capsys.readouterr().out
    assert text.startswith("3 of 20 samples")
    for source in printed_sources(text):
        assert [place.row for place in source.locate(range(len(source)))] == sorted({*range(20)} - {3, 7, 9})
