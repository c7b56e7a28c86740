"""The rows of a table as samples: what errors say of them, and how they belong together."""

import ast
import itertools
import os
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.files.pictures import a_png
from support.sources.manifests import of_paths
from support.sources.oracle import read

from lit_async_data import AsyncLoader, ConcatSource, LoaderOptions, ManifestSource, SubsetSource, split
from lit_async_data.errors import ConfigError, CorruptError, FormatError, ManifestError, MissingError, SourceError


@pytest.mark.parametrize("id", ["number", "label", None])
def test_a_damaged_file_says_how_to_leave_it_out(id, folder):  # noqa: A002  # the user's word
    (folder / "t.csv").write_text('path,label\n0.npy,a\n1.npy,"a, ""b"""\n2.npy,c\n')
    (folder / "1.npy").write_bytes((folder / "1.npy").read_bytes()[:-1])
    paths = pa.table({"number": [0, 1, 2], "path": ["0.npy", "1.npy", "2.npy"]})
    table = paths if id == "number" else folder / "t.csv"
    source = ManifestSource(table, {"x": "path"}, id=id, root=folder)
    with pytest.raises(CorruptError, match=r"; python -m .* inspect --check-all lists all such files$") as caught:
        read(source, [1])
    filters = ast.literal_eval(re.search(r"leave it out: filters=(.*); python", str(caught.value))[1])
    assert len(ManifestSource(table, {"x": "path"}, id=id, root=folder, filters=filters)) == 2


EXISTS = r"no such file; .* '\S*/(sub|Bär)?/?1\.npy' exists; "


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("sub\\1.npy", {}, EXISTS + "the table has backslashes: write /"),
        ("sub\\1.npy", {"kind": "hdf5"}, EXISTS + "the table has backslashes: write /"),
        ("sub/1.npy ", {"kind": "npy"}, EXISTS + "the table has spaces around a name"),
        (
            unicodedata.normalize("NFD", "Bär/1.npy"),
            {},
            EXISTS + r"the table has another Unicode form of a name: .*\.normalize\('NFC', path\)",
        ),
        ("1", {"kind": "image"}, r"/1: no such file; .* '\S*/1\.png' exists; set suffix: \.png"),
        ("1", {"suffix": ".jpg"}, r"/1\.jpg: no such file; .* '\S*/1\.png' exists; it ends in \.png: corr"),
        ("1", {"suffix": "png"}, r"fields\.x\.suffix: 'png' begins without a dot; set suffix: \.png"),
        ("1", {"suffix": ".npy", "kind": "class"}, r"fields\.x\.suffix: does not apply to labels"),
        ("1", {"mode": "P", "classes": ["bg"]}, r"fields\.x\.mode: does not apply to labels; leave out classes, which"),
    ],
)
def test_paths_that_differ_from_those_of_files_say_in_what(path, options, said, folder):
    for inside in ("", "sub", "Bär"):
        (folder / inside).mkdir(exist_ok=True)
        (folder / inside / "1.npy").write_bytes((folder / "0.npy").read_bytes())
    with pytest.raises((MissingError, ConfigError), match=said):
        ManifestSource(pa.table({"path": [path], "row": [0]}), {"x": {"name": "path", **options}}, root=folder)


@pytest.mark.parametrize("ids", [[7, 5], ["7", "5.npy"], pa.array(["7", "5"]).dictionary_encode()])
def test_ids_become_paths_by_their_suffix(ids, folder):
    table, column = pa.table({"id": ids}), {"name": "id", "suffix": ".npy"}
    source = ManifestSource(table, {"x": column}, root=folder, exclude=[1])
    assert read(source, [0])["x"][0, 0] == 7
    assert source.locate([0])[0].path == str(folder / "7.npy")
    assert source.grouped_by_path(os.path.basename)[1] == ["7.npy"]
    (folder / "bad.csv").write_text(f"source,file,dataset,row,id,path,cause\n,the table given,/,0,,{folder}/7.npy,\n")
    assert len(ManifestSource(table, {"x": column}, root=folder, exclude=folder / "bad.csv")) == 1
    fields = {"x": {"name": "id", "suffix": ".png"}}
    ended = ManifestSource(pa.table({"id": ["5.PNG"]}), fields, image_size=8, check_files="none")
    assert os.path.basename(ended.locate([0])[0].path) == "5.PNG"


COUNT, BAD, NAME = 8, 5, "q-005"


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
    os.mkfifo(root / "pipe.png")
    image(0).save(tmp_path / "secret.png")
    image(0, (7, 4)).save(root / "tall.png")
    np.save(root / "pickled.npy", np.array([{}, 1, 2], object), allow_pickle=True)
    np.save(root / "long.npy", np.zeros(4, "f4"))
    return root


WRONG = {
    "gone.png": MissingError,
    **dict.fromkeys(("cut.png", "cut.npy"), CorruptError),
    **dict.fromkeys(("text.jpg", "tall.png", "pickled.npy", "long.npy"), FormatError),
    **dict.fromkeys(("bomb.png", "pipe.png"), SourceError),
    "../secret.png": ManifestError,
}
SHAPES = {
    "tall.png": "7×4 pixels (height × width), but 6×4 are expected; give image_size",
    "long.npy": "float32 of shape (4,), but float32 of shape (3,)",
}


def table(bad):
    """A table in whose row 5 stands something else; one row before it has no label, and one is left out."""
    paths = [f"{number}.{'npy' if bad.endswith('npy') else 'png'}" for number in range(COUNT)]
    paths[BAD] = bad
    keep = [None if number == 1 else number for number in range(COUNT)]
    return pa.table({"id": [f"q-{number:03d}" for number in range(COUNT)], "path": paths, "keep": keep})


@pytest.mark.parametrize("bad", WRONG)
def test_a_bad_file_is_named_by_row_id_and_path(bad, folder):
    fields = {"x": "path", "k": {"name": "keep", "null": "drop"}}
    left_out = {"filters": [["id", "!=", "q-003"]], "check_files": "none"}
    source = ManifestSource(table(bad), fields, id="id", root=folder, **left_out)
    with pytest.raises(WRONG[bad]) as caught:
        read(source, [2, 3])
    for said in (f"row {BAD} of", NAME, bad, SHAPES.get(bad, "")):
        assert said in str(caught.value)
    assert (caught.value.row, caught.value.sample_id) == (BAD, 3)


def test_the_chunk_order_keeps_files_of_a_folder_together(tmp_path):
    paths = [f"f{number % 4}/{number}.npy" for number in range(400)]
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        np.save(tmp_path / path, np.zeros(1))
    source = of_paths(tmp_path, paths, check_files="none")
    options = LoaderOptions(batch_size=100, shuffle="chunk", shuffle_chunks=1, seed=1, return_indices=True)
    with AsyncLoader(source, options) as loader:
        epochs = [[batch["index"].tolist() for batch in loader] for _ in range(2)]
    assert [sorted(itertools.chain(*batches)) for batches in epochs] == [list(range(400))] * 2
    assert epochs[0] != epochs[1]
    assert all(len({sample % 4 for sample in ids}) == 1 for batches in epochs for ids in batches)


@pytest.mark.parametrize("groups", ["file", r"file:(\d+)_"])
def test_files_are_never_on_two_sides_however_they_are_named(groups, tmp_path):
    """200 files of 20 patients, each named twice, in two ways."""
    (tmp_path / "p").mkdir()
    names = [f"p/{patient}_{visit}.npy" for patient in range(20) for visit in range(10)]
    np.save(tmp_path / names[0], np.zeros(1))
    for name in names[1:]:
        (tmp_path / name).hardlink_to(tmp_path / names[0])
    one, other = (of_paths(tmp_path, [prefix + name for name in names]) for prefix in ("", "./"))
    sides = split(ConcatSource([one, SubsetSource(other, range(0, 200, 3))]), {"train": 0.5, "val": 0.5}, groups=groups)
    assert sides.overlap == 0
    train, val = (
        {os.path.basename(place.path).partition("_" if "(" in groups else "!")[0] for place in located}
        for side in sides.values()
        for located in [side.locate(side.ids(np.arange(len(side))))]
    )
    assert not train & val


def test_a_file_of_the_table_of_which_nothing_is_left_is_no_part(tmp_path):
    (tmp_path / "a.csv").write_text("y\n0\n0\n")
    (tmp_path / "b.csv").write_text("\n".join(["y", *map(str, range(1, 11))]))
    source = ManifestSource(f"{tmp_path}/*.csv", {"y": "y"}, filters=[["y", ">", 0]])
    (part,) = source.parts
    assert (os.path.basename(part.file), part.samples) == ("b.csv", 10)
    places = source.places()
    assert places.which.tolist() == [0] * 10
    assert places.rows.tolist() == list(range(10))
    sides = split(source, {"train": 0.8, "val": 0.2}, groups="time")
    assert sides["val"].column("y").tolist() == [9, 10]


def test_split_by_file_is_the_same_wherever_the_folder_lies(tmp_path):
    found = []
    for root in (tmp_path / "here", tmp_path / "there"):
        root.mkdir()
        for number in range(40):
            np.save(root / f"{number}.npy", np.array(number))
        source = of_paths(root, [f"{number}.npy" for number in range(40)])
        found.append(split(source, {"train": 0.5, "val": 0.5}, groups="file")["train"].samples.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options", [{}, {"filters": [["v", ">", 3]]}, {"null": "drop"}, {"filters": [["v", "!=", 5]], "null": "drop"}]
)
def test_excluded_numbers_are_those_that_the_source_gives_without_exclude(options):
    null = options.pop("null", "error")
    table = pa.table({"v": range(10), "w": [None if null == "drop" and n % 4 == 0 else n for n in range(10)]})

    def source(**more):
        return ManifestSource(table, {"v": "v", "w": {"name": "w", "null": null}}, **options, **more)

    before = read(source(), np.arange(len(source())))["v"].tolist()
    for number in range(len(before)):
        after = source(exclude=[number])
        assert read(after, np.arange(len(after)))["v"].tolist() == before[:number] + before[number + 1 :]
        assert after.chunks.left_out.startswith(f"{10 - len(after)} of 10 samples are left out, ")
    assert source().chunks.left_out.partition(" ")[0] == ("" if len(before) == 10 else f"{10 - len(before)}")
