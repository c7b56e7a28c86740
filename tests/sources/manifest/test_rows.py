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


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("sub\\1.npy", "backslashes: write /"),
        (" 1.npy", "spaces around a name"),
        ("sub/1.npy ", "spaces around a name"),
        (unicodedata.normalize("NFD", "Bär/1.npy"), r"another Unicode form of a name: .*\.normalize\('NFC', path\)"),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_paths_that_differ_from_those_of_files_say_in_what(path, hint, kind, folder):
    for inside in ("", "sub", "Bär"):
        (folder / inside).mkdir(exist_ok=True)
        (folder / inside / "1.npy").write_bytes((folder / "1.npy").read_bytes())
    table = pa.table({"path": [path], "row": [0]})
    message = rf"^row 0 of the table given: .*no such file; .* '.*1\.npy' exists; the table has {hint}"
    with pytest.raises(MissingError, match=message):
        ManifestSource(table, {"x": {"name": "path", "kind": kind}}, root=folder)


@pytest.mark.parametrize("ids", [[7, 5], ["7", "5.npy"], pa.array(["7", "5"]).dictionary_encode()])
def test_ids_become_paths_by_their_suffix(ids, folder):
    table, column = pa.table({"id": ids}), {"name": "id", "suffix": ".npy"}
    source = ManifestSource(table, {"x": column}, root=folder, exclude=[1])
    assert read(source, [0])["x"][0, 0] == 7
    assert source.locate([0])[0].path == str(folder / "7.npy")
    assert source.grouped_by_path(os.path.basename)[1] == ["7.npy"]
    (folder / "bad.csv").write_text(f"source,file,dataset,row,id,path,cause\n,the table given,/,0,,{folder}/7.npy,\n")
    assert len(ManifestSource(table, {"x": column}, root=folder, exclude=folder / "bad.csv")) == 1
    column_of_png = {"x": {"name": "id", "suffix": ".png"}}
    ended = ManifestSource(pa.table({"id": ["5.PNG"]}), column_of_png, image_size=8, check_files="none")
    assert os.path.basename(ended.locate([0])[0].path) == "5.PNG"
    hint = r"/7: no such file; .* '\S+/7\.png' exists; set suffix: \.png|column 'id' holds int64.*; set suffix"
    with pytest.raises((MissingError, ConfigError), match=hint):
        ManifestSource(table.slice(0, 1), {"x": {"name": "id", "kind": "image"}}, root=folder)
    with pytest.raises(ConfigError, match=r"fields\.x\.suffix: does not apply to labels"):
        ManifestSource(table, {"x": {**column, "kind": "class"}}, root=folder)
    for option in ({"mode": "P"}, {"image_size": 8}, {"suffix": ".png"}):
        name, way = next(iter(option)), "leave out classes, which makes the column a label, or this"
        with pytest.raises(ConfigError, match=rf"fields\.x\.{name}: does not apply to labels; {way}"):
            ManifestSource(table, {"x": {"name": "id", "classes": ["bg", "cell"], **option}}, root=folder)
    with pytest.raises(ConfigError, match=r"fields\.x\.suffix: 'png' begins without a dot; set suffix: \.png"):
        ManifestSource(table, {"x": {"name": "id", "suffix": "png"}}, root=folder)
    with pytest.raises(MissingError, match=r"/7\.jpg: no such file; .* '\S+/7\.png' exists; it ends in \.png: corr"):
        ManifestSource(table, {"x": {"name": "id", "suffix": ".jpg"}}, root=folder)


def test_a_path_that_leads_to_nothing_at_all_has_no_hint(folder):
    (folder / "loose.npy").symlink_to("gone.npy")
    for path in ("gone.npy", "sub\\gone.npy", " gone.npy", "loose.npy"):
        with pytest.raises(MissingError) as caught:
            ManifestSource(pa.table({"path": [path]}), {"x": "path"}, root=folder)
        assert "exists" not in str(caught.value)


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
    (root / "empty.png").write_bytes(a_png(4, 6, 8, 2))
    os.mkfifo(root / "pipe.png")
    image(0).save(tmp_path / "secret.png")
    (root / "nothing.png").symlink_to(root / "gone.png")
    image(0, (7, 4)).save(root / "tall.png")
    np.save(root / "pickled.npy", np.array([{}, 1, 2], object), allow_pickle=True)
    np.save(root / "long.npy", np.zeros(4, "f4"))
    np.save(root / "doubles.npy", np.zeros(3, "f8"))
    return root


WRONG = {
    **dict.fromkeys(("gone.png", "nothing.png"), MissingError),
    **dict.fromkeys(("cut.png", "empty.png", "cut.npy"), CorruptError),
    **dict.fromkeys(("text.jpg", "tall.png", "pickled.npy", "long.npy", "doubles.npy"), FormatError),
    **dict.fromkeys(("bomb.png", "pipe.png"), SourceError),
    "../secret.png": ManifestError,
}
SHAPES = {
    "tall.png": "7×4 pixels (height × width), but 6×4 are expected; give image_size",
    "long.npy": "float32 of shape (4,), but float32 of shape (3,)",
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
    if bad in SHAPES:
        assert SHAPES[bad] in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder):
    (folder / "5.png").chmod(0)
    source = ManifestSource(table("5.png"), {"x": "path"}, id="id", root=folder, check_files="none")
    with pytest.raises(SourceError) as caught:
        read(source, [BAD])
    assert_named(caught.value, "5.png")


def test_first_looks_for_one_good_sample_where_size_is_given(folder):
    fields = {"x": {"name": "path", "image_size": 4}}
    ManifestSource(table("gone.png"), fields, id="id", root=folder)
    paths = ["gone.png", *[f"{number}.png" for number in range(1, COUNT)]]
    first = pa.table({"id": list("abcdefgh"), "path": paths})
    with pytest.raises(MissingError) as caught:
        read(ManifestSource(first, fields, id="id", root=folder), [0])
    assert_named(caught.value, "gone.png", row=0, id_="a")
    every = pa.table({"id": list("abcdefgh"), "path": [f"gone/{path}" for path in paths]})
    none = r"none of the first 8 is good \(rows 0, 1, 2, 3, 4, 5, 6, 7\)$"
    with pytest.raises(MissingError, match=none) as caught:
        ManifestSource(every, fields, id="id", root=folder)
    assert [each.row for each in caught.value.errors] == list(range(8))
    ManifestSource(every, fields, id="id", root=folder, check_files="none")


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


def test_the_chunk_order_keeps_files_of_a_folder_together(tmp_path):
    paths = []
    for number in range(400):
        folder = f"f{number % 4}"
        (tmp_path / folder).mkdir(exist_ok=True)
        paths.append(f"{folder}/{number}.npy")
        np.save(tmp_path / paths[-1], np.array(number))
    source = of_paths(tmp_path, paths, check_files="none")
    options = LoaderOptions(batch_size=100, shuffle="chunk", shuffle_chunks=1, seed=1, return_indices=True)
    with AsyncLoader(source, options) as loader:
        epochs = [[batch["index"].tolist() for batch in loader] for _ in range(2)]
        assert [sorted(itertools.chain(*batches)) for batches in epochs] == [list(range(400))] * 2
        assert epochs[0] != epochs[1]
        for ids in epochs[0]:
            assert len({sample % 4 for sample in ids}) == 1


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
