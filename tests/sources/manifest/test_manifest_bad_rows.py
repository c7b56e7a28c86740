"""Rows of a manifest that are wrong: each is named by row, id and path, and the batches after it still come."""

import os

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.files.pictures import a_png
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
    return Image.fromarray(np.full((*size, 3), number, np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Images and arrays, and beside them everything that is none or lies elsewhere."""
    root = tmp_path / "root"
    root.mkdir()
    for number in range(COUNT):
        image(number).save(root / f"{number}.png")
        np.save(root / f"{number}.npy", np.full(3, number, "f4"))
    (root / "cut.png").write_bytes((root / "5.png").read_bytes()[:-20])
    (root / "cut.npy").write_bytes((root / "5.npy").read_bytes()[:-2])
    (root / "text.jpg").write_bytes(b"this is no image\n" * 50)
    (root / "bomb.png").write_bytes(a_png(60_000, 60_000, 8, 2))
    (root / "empty.png").write_bytes(a_png(4, 6, 8, 2))
    os.mkfifo(root / "pipe.png")
    image(0).save(tmp_path / "secret.png")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "nothing.png").symlink_to(root / "gone.png")
    image(0, (7, 4)).save(root / "tall.png")
    np.save(root / "pickled.npy", np.array([{}, 1, 2], object), allow_pickle=True)
    np.save(root / "long.npy", np.zeros(4, "f4"))
    np.save(root / "doubles.npy", np.zeros(3, "f8"))
    return root


WRONG = {
    "gone.png": MissingError,
    "cut.png": CorruptError,
    "text.jpg": FormatError,
    "bomb.png": SourceError,
    "empty.png": CorruptError,
    "pipe.png": SourceError,
    "../secret.png": ManifestError,
    "link.png": SourceError,
    "/etc/passwd": ManifestError,
    "nothing.png": MissingError,
    "tall.png": FormatError,
    "pickled.npy": FormatError,
    "long.npy": FormatError,
    "doubles.npy": FormatError,
    "cut.npy": CorruptError,
}


def table(bad, **more):
    """A table in whose row 5 stands something else."""
    paths = [f"{number}.{'npy' if bad.endswith('npy') else 'png'}" for number in range(COUNT)]
    paths[BAD] = bad
    return pa.table({"id": [f"q-{number:03d}" for number in range(COUNT)], "path": paths, **more})


def assert_named(error, path, *, row=BAD, id_=NAME):
    assert f"row {row}" in str(error)
    assert id_ in str(error)
    assert path in str(error)
    assert error.row == row


@pytest.mark.parametrize("bad", WRONG)
def test_a_bad_file_is_named_by_row_id_and_path(bad, folder):
    source = ManifestSource(table(bad), {"x": "path"}, id="id", root=folder, check_files="none")
    with pytest.raises(WRONG[bad]) as caught:
        read(source, [4, BAD])
    assert_named(caught.value, bad)
    assert caught.value.sample_id == BAD


@pytest.mark.parametrize(
    ("bad", "shapes"), [("tall.png", "6×4×3 in row 0 .*, 7×4×3 in row 5"), ("long.npy", "3 in .*, 4 in")]
)
def test_shapes_are_compared_with_the_first_before_training(bad, shapes, folder):
    with pytest.raises(FormatError, match=shapes) as caught:
        ManifestSource(table(bad), {"x": "path"}, id="id", root=folder)
    assert_named(caught.value, bad)


@pytest.mark.parametrize("bad", ["gone.png", "cut.png", "../secret.png"])
def test_the_batches_after_a_bad_one_still_come(bad, folder):
    source = ManifestSource(table(bad), {"x": "path"}, id="id", root=folder, check_files="none")
    for workers in (0, 2):
        seen, errors = [], []
        with AsyncLoader(source, LoaderOptions(batch_size=2, shuffle=False, workers=workers)) as loader:
            for _ in range(COUNT // 2):
                try:
                    seen.append(next(loader)["x"][:, 0, 0, 0].tolist())
                except AsyncDataError as error:
                    errors.append(error)
        assert seen == [[0, 1], [2, 3], [6, 7]]
        assert len(errors) == 1
        assert_named(errors[0], bad)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder):
    (folder / "5.png").chmod(0)
    source = ManifestSource(table("5.png"), {"x": "path"}, id="id", root=folder, check_files="none")
    with pytest.raises(SourceError) as caught:
        read(source, [BAD])
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
