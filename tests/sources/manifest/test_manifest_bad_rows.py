"""Rows of a manifest that are wrong: each is named by row, id and path, and the batches after it still come."""

from __future__ import annotations

import os
import pickle
import struct
import zlib

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.sources.oracle import read

from lit_async_data import AsyncLoader, LoaderOptions, ManifestSource
from lit_async_data.errors import (
    AsyncDataError,
    ConfigError,
    CorruptError,
    FormatError,
    ManifestError,
    MissingError,
    SourceError,
)

COUNT = 8
BAD = 5
NAME = "q-005"


def image(number, size=(6, 4)):
    return np.full((*size, 3), number, np.uint8)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for number in range(COUNT):
        Image.fromarray(image(number)).save(root / f"{number}.png")
        np.save(root / f"{number}.npy", np.full(3, number, "f4"))
    return root


def table(bad, end="png", **more):
    """A table in whose row 5 stands something else."""
    paths = [f"{number}.{end}" for number in range(COUNT)]
    paths[BAD] = bad
    return pa.table({"id": [f"q-{number:03d}" for number in range(COUNT)], "path": paths, **more})


def assert_named(error, path, *, row=BAD, id_=NAME):
    assert f"row {row}" in str(error)
    assert id_ in str(error)
    assert path in str(error)
    assert error.row == row


def assert_shapes_named(error, *shapes):
    """Shapes are compared with each other at build: both files are named, but for their paths; see below."""
    for part in ("row 0", "q-000", f"row {BAD}", NAME, *shapes):
        assert part in str(error)


def png(width, height):
    """A PNG that claims to be of this size, and holds nothing."""

    def block(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(b"")) + block(b"IEND", b"")


def truncated(folder):
    content = (folder / f"{BAD}.png").read_bytes()
    (folder / "bad.png").write_bytes(content[: len(content) - 20])
    return "bad.png"


def truncated_jpeg(folder):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((4, 6)).save(folder / "bad.jpg")
    content = (folder / "bad.jpg").read_bytes()
    (folder / "bad.jpg").write_bytes(content[:-60])
    return "bad.jpg"


def written(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return name

    return make


def named_pipe(folder):
    os.mkfifo(folder / "bad.png")
    return "bad.png"


def a_folder(folder):
    (folder / "bad.png").mkdir()
    return "bad.png"


def by_dots(folder):
    Image.fromarray(image(0)).save(folder.parent / "secret.png")
    return "../secret.png"


def by_dots_inside(folder):
    (folder / "a").mkdir()
    Image.fromarray(image(0)).save(folder.parent / "secret.png")
    return "a/../../secret.png"


def by_link(folder):
    Image.fromarray(image(0)).save(folder.parent / "secret.png")
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    return "link.png"


def by_folder_link(folder):
    (folder.parent / "other").mkdir()
    Image.fromarray(image(0)).save(folder.parent / "other/secret.png")
    (folder / "link").symlink_to(folder.parent / "other")
    return "link/secret.png"


def absolute(folder):
    Image.fromarray(image(0)).save(folder.parent / "secret.png")
    return str(folder.parent / "secret.png")


def link_to_nothing(folder):
    (folder / "bad.png").symlink_to(folder / "gone.png")
    return "bad.png"


def another_size(folder):
    Image.fromarray(image(0, (7, 4))).save(folder / "bad.png")
    return "bad.png"


IMAGES = {
    "missing": (lambda folder: "gone.png", MissingError),
    "missing folder": (lambda folder: "gone/1.png", MissingError),
    "below a file": (lambda folder: "1.png/1.png", SourceError),
    "truncated png": (truncated, CorruptError),
    "truncated jpeg": (truncated_jpeg, CorruptError),
    "text": (written("bad.jpg", b"this is no image\n" * 50), FormatError),
    "empty": (written("bad.png", b""), SourceError),
    "npy called png": (written("bad.png", pickle.dumps([1])), FormatError),
    "bomb": (written("bad.png", png(60_000, 60_000)), SourceError),
    "no pixels": (written("bad.png", png(4, 6)), CorruptError),
    "pipe": (named_pipe, SourceError),
    "folder": (a_folder, SourceError),
    "dots": (by_dots, ManifestError),
    "dots inside": (by_dots_inside, ManifestError),
    "link": (by_link, SourceError),
    "link of a folder": (by_folder_link, SourceError),
    "absolute": (absolute, ManifestError),
    "link to nothing": (link_to_nothing, MissingError),
    "another size": (another_size, FormatError),
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("check", ["all", "none"])
def test_a_bad_image_is_named_by_row_id_and_path(kind, check, folder):
    make, expected = IMAGES[kind]
    bad = make(folder)
    with pytest.raises(expected) as caught:
        read(ManifestSource(table(bad), {"x": "path"}, id="id", root=folder, check_files=check), [4, BAD])
    if (kind, check) == ("another size", "all"):
        assert_shapes_named(caught.value, "6×4×3", "7×4×3")
    else:
        assert_named(caught.value, bad)
        assert caught.value.sample_id == BAD


@pytest.mark.parametrize("kind", ["missing", "truncated png", "text", "bomb", "pipe", "dots", "link"])
def test_the_batches_after_a_bad_one_still_come(kind, folder):
    bad = IMAGES[kind][0](folder)
    source = ManifestSource(table(bad), {"x": "path"}, id="id", root=folder, check_files="none")
    for workers in (0, 2):
        seen, errors = [], []
        with AsyncLoader(source, LoaderOptions(batch_size=2, shuffle=False, workers=workers)) as loader:
            batches = iter(loader)
            while True:
                try:
                    seen.append(next(batches)["x"][:, 0, 0, 0].tolist())
                except StopIteration:
                    break
                except AsyncDataError as error:
                    errors.append(error)
        assert seen == [[0, 1], [2, 3], [6, 7]]
        assert len(errors) == 1
        assert_named(errors[0], bad)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder):
    (folder / "5.png").chmod(0)
    with pytest.raises(SourceError) as caught:
        ManifestSource(table("5.png"), {"x": "path"}, id="id", root=folder, check_files="all")
    assert_named(caught.value, "5.png")


def test_first_looks_at_the_first_sample_only_where_size_is_given(folder):
    fields = {"x": {"name": "path", "image_size": 4}}
    ManifestSource(table("gone.png"), fields, id="id", root=folder)
    paths = ["gone.png", *[f"{number}.png" for number in range(1, COUNT)]]
    first = pa.table({"id": list("abcdefgh"), "path": paths})
    with pytest.raises(MissingError) as caught:
        ManifestSource(first, fields, id="id", root=folder)
    assert_named(caught.value, "gone.png", row=0, id_="a")
    ManifestSource(first, fields, id="id", root=folder, check_files="none")


@pytest.mark.parametrize(("first", "image_size"), [(1, 4), (0, 4), pytest.param(1, None)])
def test_all_names_several_at_once(first, image_size, folder):
    paths = [f"{number}.png" if (number - first) % 2 else f"gone-{number}.png" for number in range(COUNT)]
    fields = {"x": {"name": "path", "image_size": image_size}}
    ids = [f"q-{number:03d}" for number in range(COUNT)]
    with pytest.raises(SourceError) as caught:
        ManifestSource(pa.table({"id": ids, "path": paths}), fields, id="id", root=folder, check_files="all")
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    for row in range(first, COUNT, 2):
        assert f"row {row}" in text
        assert ids[row] in text
        assert f"gone-{row}.png" in text


def test_the_row_is_that_of_the_table_whatever_was_left_out(folder):
    keep = [1.0, None, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    fields = {"x": "path", "k": {"name": "keep", "null": "drop"}}
    given = table("gone.png", keep=keep)
    source = ManifestSource(given, fields, id="id", root=folder, check_files="none", filters=[["id", "!=", "q-003"]])
    with pytest.raises(MissingError) as caught:
        read(source, [0, 1, 2, 3])
    assert_named(caught.value, "gone.png")
    assert caught.value.sample_id == 3


def test_a_root_that_is_not_there(folder):
    with pytest.raises((ConfigError, MissingError), match="nowhere"):
        ManifestSource(table("7.png"), {"x": "path"}, root=folder / "nowhere")


# -- images of many sizes ----------------------------------------------------------------------------------------------


def test_one_of_another_size_far_behind_is_found_by_all(folder):
    Image.fromarray(image(1, (9, 4))).save(folder / "odd.png")
    paths = [f"{number % COUNT}.png" for number in range(600)]
    paths[431] = "odd.png"
    ids = [f"n{number}" for number in range(600)]
    with pytest.raises(FormatError, match=r"row 431.*n431.*odd") as caught:
        ManifestSource(pa.table({"id": ids, "path": paths}), {"x": "path"}, id="id", root=folder, check_files="all")
    assert "9" in str(caught.value)


# -- arrays ------------------------------------------------------------------------------------------------------------


def pickled(folder):
    np.save(folder / "bad.npy", np.array([{}, 1, 2], object), allow_pickle=True)


def npy_of(array):
    return lambda folder: np.save(folder / "bad.npy", array)


def npy_cut(folder):
    content = (folder / "1.npy").read_bytes()
    (folder / "bad.npy").write_bytes(content[:-2])


def npy_more(folder):
    content = (folder / "1.npy").read_bytes()
    (folder / "bad.npy").write_bytes(content + b"\0\0")


def npy_text(folder):
    (folder / "bad.npy").write_bytes(b"no array\n" * 30)


def npy_empty(folder):
    (folder / "bad.npy").touch()


@pytest.mark.parametrize(
    "make",
    [
        pickled,
        npy_of(np.zeros(4, "f4")),
        npy_of(np.zeros((3, 1), "f4")),
        npy_of(np.zeros(3, "f8")),
        npy_of(np.zeros(3, "i4")),
        npy_cut,
        npy_more,
        npy_text,
        npy_empty,
    ],
)
@pytest.mark.parametrize("check", ["all", "none"])
def test_a_bad_array_is_named_by_row_id_and_path(make, check, folder):
    make(folder)
    with pytest.raises(SourceError) as caught:
        read(ManifestSource(table("bad.npy", "npy"), {"x": "path"}, id="id", root=folder, check_files=check), [BAD])
    if "different shapes" in str(caught.value):
        assert check == "all"
        assert_shapes_named(caught.value, "3 in")
    else:
        assert_named(caught.value, "bad.npy")


@pytest.mark.parametrize("check", ["all", "first"])
def test_files_of_other_shapes_are_named_by_path_at_build_too(check, folder):
    npy_of(np.zeros(4, "f4"))(folder)
    with pytest.raises(FormatError) as caught:
        ManifestSource(table("bad.npy", "npy"), {"x": "path"}, id="id", root=folder, check_files=check)
    assert_named(caught.value, "bad.npy")


# -- rows of HDF5 files ------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """Two files of ten and six rows, and a table over them."""
    for name, rows in (("a.h5", 10), ("b.h5", 6)):
        with h5py.File(tmp_path / name, "w") as file:
            file["data"] = np.arange(rows * 2, dtype="f4").reshape(rows, 2)
            file["other"] = np.arange(rows * 3, dtype="f4").reshape(rows, 3)
    return tmp_path


def hdf5(stored, path="b.h5", row=5, dataset="data", check_files="none"):
    rows = {
        "id": ["p", "q", "r-1"],
        "path": ["a.h5", "b.h5", path],
        "row": [9, 0, row],
        "dataset": ["data", "data", dataset],
    }
    return ManifestSource(pa.table(rows), {"x": "path"}, id="id", root=stored, check_files=check_files)


@pytest.mark.parametrize("check", ["all", "none"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"row": 6},
        {"row": -1},
        {"row": 2**40},
        {"row": None},
        {"path": "gone.h5"},
        {"dataset": "nope"},
        pytest.param({"dataset": "other"}),
        {"path": "../out.h5"},
        {"path": None},
        {"dataset": None},
    ],
    ids=str,
)
def test_a_wrong_row_of_an_hdf5_file_is_named(wrong, check, stored):
    assert read(hdf5(stored), [0, 1, 2])["x"].tolist() == [[18, 19], [0, 1], [10, 11]]
    with pytest.raises(SourceError, match=r"row 2") as caught:
        read(hdf5(stored, check_files=check, **wrong), [0, 1, 2])
    assert caught.value.row == 2
    if None not in wrong.values():
        assert "r-1" in str(caught.value)
        assert wrong.get("path", "b.h5") in str(caught.value)


def test_what_is_no_hdf5_file_is_named(stored):
    (stored / "bad.h5").write_bytes(b"not at all" * 300)
    with pytest.raises(SourceError, match=r"bad\.h5") as caught:
        read(hdf5(stored, path="bad.h5"), [2])
    assert_named(caught.value, "bad.h5", row=2, id_="r-1")


def test_a_link_that_leaves_the_root_to_an_hdf5_file(stored):
    (stored / "in").mkdir()
    os.replace(stored / "a.h5", stored / "in/a.h5")
    (stored / "in/link.h5").symlink_to(stored / "b.h5")
    rows = pa.table({"id": ["p", "r-1"], "path": ["a.h5", "link.h5"], "row": [0, 0]})
    with pytest.raises(SourceError, match=r"link\.h5") as caught:
        read(ManifestSource(rows, {"x": "path"}, id="id", root=stored / "in", check_files="none"), [0, 1])
    assert_named(caught.value, "link.h5", row=1, id_="r-1")


@pytest.mark.parametrize(
    "check",
    [pytest.param("all"), "none"],
)
def test_a_broken_chunk_of_an_hdf5_file_is_named(check, stored):
    values = np.arange(400, dtype="f4").reshape(200, 2)
    with h5py.File(stored / "broken.h5", "w") as file:
        data = file.create_dataset("data", data=values, chunks=(50, 2), compression="gzip", fletcher32=True)
        chunk = data.id.get_chunk_info(0)
    with (stored / "broken.h5").open("r+b") as file:
        file.seek(chunk.byte_offset + 20)
        file.write(b"\xa5" * 20)
    source = None if check == "all" else hdf5(stored, path="broken.h5")
    with pytest.raises(SourceError) as caught:
        hdf5(stored, path="broken.h5", check_files=check) if source is None else read(source, [0, 2])
    assert_named(caught.value, "broken.h5", row=2, id_="r-1")


def test_the_error_of_a_check_holds_the_error_of_each_bad_file(folder, tmp_path):
    # 37 of 40 were once five in the text, and one in the attributes.
    paths = [f"gone-{number}.png" for number in range(40)]
    for number in (3, 17, 38):
        paths[number] = "0.png"
    bad = [number for number in range(40) if number not in (3, 17, 38)]
    table = pa.table({"id": [f"q-{number:03d}" for number in range(40)], "path": paths})
    with pytest.raises(ManifestError, match="37 files of 40 samples cannot be read") as caught:
        ManifestSource(table, {"x": "path"}, id="id", root=folder, image_size=2, check_files="all")
    error = caught.value
    assert "and 32 more" in str(error)
    assert (
        "out: filters=[['id', 'not in', ['q-000', 'q-001', 'q-002', 'q-004', 'q-005', …]]]; the attribute errors"
        in str(error)
    )
    assert [each.row for each in error.errors] == [each.sample_id for each in error.errors] == bad
    assert [each.file for each in error.errors] == [f"{folder}/gone-{number}.png" for number in bad]
    assert {type(each) for each in error.errors} == {MissingError}
    assert (error.row, error.sample_id, error.file) == (bad[0], bad[0], error.errors[0].file)
    again = pickle.loads(pickle.dumps(error))
    assert [each.row for each in again.errors] == bad
    with pytest.raises(MissingError) as single:
        ManifestSource(
            table[2:5], {"x": "path"}, root=folder, image_size=2, filters=[["id", "<", "q-004"]], check_files="all"
        )
    assert single.value.errors == (single.value,)  # so that who leaves rows out need not ask how many there are
    # What remains is a source.
    rest = table.take([row for row in range(40) if row not in {each.row for each in error.errors}])
    assert len(ManifestSource(rest, {"x": "path"}, id="id", root=folder, image_size=2, check_files="all")) == 3
