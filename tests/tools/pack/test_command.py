"""``python -m lit_async_data pack``: arguments, exit status, and what it prints."""

from __future__ import annotations

import io
import itertools
import os
import re
import textwrap

import h5py
import numpy as np
import pyarrow.csv
import pytest

from lit_async_data import Field, HDF5Source
from lit_async_data.tools.command_line import main
from lit_async_data.tools.pack import packing
from lit_async_data.tools.pack.command import ProgressLine

VALUES = (np.add.outer(np.arange(20), np.arange(12 * 32 * 3).reshape(12, 32, 3)) // 64 % 256).astype("u1")
# With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
pyarrow.csv.read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture
def scans(h5):
    for name, part in (("scan1.h5", slice(0, 9)), ("scan2.h5", slice(9, 20))):
        numbers = np.arange(20, dtype="u1")[part]
        path = h5(name, images=VALUES[part], labels=numbers, notes=numbers, patient=numbers)
    return path.replace("scan2", "scan*")


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out.h5")


def test_hdf5_files_become_one_and_the_printed_line_reads_it(scans, out, capsys):
    fields = ["--fields", "x=images", "y=labels", "--layout", "x=NHWC", "--columns", "patient"]
    assert main(["pack", scans, "-o", out, "--codec", "deflate", *fields, "--chunk", "4"]) == 0
    told = capsys.readouterr()
    assert "20 samples" in told.out
    assert "every value compared" in told.out
    assert "x  uint8 (12, 32, 3); 4 samples per chunk, deflate" in told.out
    names = {}
    exec(textwrap.dedent(told.out.partition("Read it with\n")[2]), names)
    packed = names["source"]
    assert packed.spec["x"].shape == (3, 12, 32)
    assert packed[13]["y"] == 13
    assert np.array_equal(packed[13]["x"].transpose(1, 2, 0), VALUES[13])


def packed_year(h5, name, scale):
    path = h5(name, t2m=np.arange(8, dtype="i2").reshape(4, 2), plain=np.ones((4, 2), "f4"))
    with h5py.File(path, "r+") as file:
        file["t2m"].attrs.update(scale_factor=np.array([scale]), add_offset=np.array([3.0]))
    return path


def test_packed_values_stay_packed_and_the_printed_line_unpacks_them(h5, out, capsys):
    path = packed_year(h5, "2001.nc", 0.5)
    assert main(["pack", path, "-o", out, "--fields", "t2m", "plain"]) == 0
    names = {}
    exec(textwrap.dedent(capsys.readouterr().out.partition("Read it with\n")[2]), names)
    assert names["source"][3]["t2m"].tolist() == [6.0, 6.5]
    assert names["source"][3]["plain"].tolist() == [1, 1]


def test_values_that_are_packed_in_several_ways_cannot_share_attributes(h5, out, capsys):
    paths = [packed_year(h5, "2001.nc", 0.5), packed_year(h5, "2002.nc", 0.25)]
    assert main(["pack", *paths, "-o", out, "--fields", "t2m"]) == 2
    told = capsys.readouterr().err
    assert re.search(r"t2m is packed in another way in \S*2002.nc than in \S*2001.nc; .*mask_and_scale=True", told)
    packing.pack(HDF5Source(paths, {"t2m": Field("t2m", mask_and_scale=True)}), out)
    assert HDF5Source(out, ["t2m"])[7][0].tolist() == [4.5, 4.75]


def test_groups_stay_apart_if_asked(tmp_path, out):
    with h5py.File(tmp_path / "rec.h5", "w") as file:
        for name in ("p1", "p2"):
            file[f"{name}/data"] = np.arange(8.0)[:, None]
    given = ["pack", str(tmp_path / "rec.h5"), "-o", out, "--fields", "data", "--group", "p*", "--keep-parts"]
    assert main(given) == 0
    assert [part.samples for part in HDF5Source(out, ["data"], group="parts/*").parts] == [8, 8]


def test_a_table_and_a_folder_of_images(tmp_path, out, capsys):
    from PIL import Image

    for name in ("auk", "owl"):
        (tmp_path / "birds" / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(VALUES[number]).save(tmp_path / "birds" / name / f"{number}.png")
    assert main(["pack", str(tmp_path / "birds"), "-o", out, "--image-size", "8", "--resize", "crop"]) == 0
    assert HDF5Source(out, {"x": "x", "y": "y"}).spec["y"].classes == ("auk", "owl")
    (tmp_path / "birds.csv").write_text("path,label\nbirds/auk/0.png,1\nbirds/owl/2.png,5\n")
    fields = ["--fields", "x=path", "y=label", "--force"]
    assert main(["pack", str(tmp_path / "birds.csv"), "-o", out, *fields]) == 0
    packed = HDF5Source(out, {"x": "x", "y": "y"}, layout={"x": "NHWC"})
    assert packed[1]["y"] == 5
    assert np.array_equal(packed[1]["x"].transpose(1, 2, 0), VALUES[2])
    (tmp_path / "birds" / "owl" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    capsys.readouterr()
    assert main(["pack", str(tmp_path / "birds.csv"), "-o", out, *fields]) == 1
    assert "2.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["{h5}", "-o", "{h5}", "--force"], "is also the input"),
        (["{h5}", "-o", "{out}", "--image-size", "8"], "image_size: only for tables and folders"),
        (["{h5}", "-o", "{out}", "--codec", "none", "--chunk", "2"], "chunk: 2 but without a codec"),
        (["{folder}", "-o", "{out}"], "is a folder of HDF5 files; write .*/\\*.h5"),
        (["t.csv", "u.csv", "-o", "{out}"], "t.csv is a table; give one"),
        (["t.csv", "-o", "{out}"], "fields: missing; which columns of t.csv"),
        (["{h5}", "-o", "{folder}"], "is a folder; give the name of a file"),
    ],
)
def test_a_wrong_argument_ends_with_2_and_names_it(h5, out, capsys, given, message):
    path = h5(data=VALUES, labels=np.arange(20))
    assert main(["pack", *(each.format(h5=path, out=out, folder=os.path.dirname(out)) for each in given)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(f"^error: .*{message}", error), error


def test_a_damaged_chunk_ends_with_1_and_names_file_and_chunk(h5, out, capsys):
    data = {"data": VALUES, "chunks": (1, 12, 32, 3), "compression": "gzip"}
    path = h5(data=data, labels=np.arange(20))
    with h5py.File(path) as file:
        info = file["data"].id.get_chunk_info(7)
    with open(path, "r+b") as file:
        file.seek(info.byte_offset + 10)
        file.write(b"\xff" * (info.size - 10))
    assert main(["pack", path, "-o", out]) == 1
    error = capsys.readouterr().err
    assert "x.h5:/data, chunk (7, 0, 0, 0)" in error
    assert main(["pack", path.replace("x.h5", "none.h5"), "-o", out]) == 1


def test_ctrl_c_ends_with_130_and_one_line(h5, out, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "_compare", interrupted)
    assert main(["pack", h5(data=VALUES, labels=np.arange(20)), "-o", out]) == 130
    assert capsys.readouterr().err == "pack: interrupted; nothing is left\n"


def test_a_terminal_has_one_line_which_is_cleared():
    stream = io.StringIO()
    stream.isatty = lambda: True
    shown = ProgressLine(stream, clock=itertools.count(0, 4).__next__)
    for done in (0, 2, 4):
        shown("packing", done * 10**9, 10 * 10**9)
    shown.end()
    assert stream.getvalue().split("\r\x1b[K") == [
        "",
        "packing: 20 % of 10.0 GB, 500 MB/s, 0:00:16 left",
        "packing: 40 % of 10.0 GB, 500 MB/s, 0:00:12 left",
        "",
    ]
