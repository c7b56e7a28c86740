"""`ManifestSource` over every kind of table: which samples there are, what they are called, and their labels."""

import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.sources.manifests import COLUMNS, COUNT, FIELDS, IDS, QUALITY, SPECIES, given
from support.sources.oracle import read

from lit_async_data import AsyncLoader, ConcatSource, ManifestSource
from lit_async_data.errors import ConfigError, FormatError, ManifestError, MissingError, SourceError


def table_of(kind, folder):
    """The same table in a file, in several, or in memory."""
    path, lines = folder / f"table.{kind}", list(zip(*COLUMNS.values(), strict=True))
    if kind == "csv":
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in [tuple(COLUMNS), *lines]))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(dict(zip(COLUMNS, line, strict=True))) + "\n" for line in lines))
    elif kind == "parts":
        path = folder / kind
        path.mkdir()
        for part, begin in enumerate([0, 4, 10]):
            pq.write_table(given().slice(begin, [4, 6, 2][part]), path / f"{part}.parquet")
    else:
        return given() if kind == "pyarrow" else pytest.importorskip(kind).DataFrame(COLUMNS)
    return path


def assert_is_the_table(source):
    assert len(source) == COUNT
    order = np.random.default_rng(1).permutation(COUNT)
    got = read(source, order)
    np.testing.assert_array_equal(got["x"], np.broadcast_to(order[:, None, None], (COUNT, 2, 3)).astype("f4"))
    assert source.spec["y"].classes == ("auk", "emu", "owl")
    assert [source.spec["y"].classes[code] for code in got["y"]] == [SPECIES[number] for number in order]
    assert got["y"].dtype == np.int64
    np.testing.assert_array_equal(got["q"], np.array(QUALITY)[order])
    assert got["q"].dtype == np.float64
    assert [where.id for where in source.locate(order)] == [IDS[number] for number in order]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parts", "pyarrow", "pandas", "polars"])
def test_a_table_of_any_kind(kind, folder):
    table = table_of(kind, folder)
    source = ManifestSource(table, FIELDS, id="id", root=folder)
    assert_is_the_table(source)
    assert source.column("even").astype(int).tolist() == COLUMNS["even"]
    name, row = (f"{table}/1.parquet", 3) if kind == "parts" else (str(table), 7)
    (where,) = source.locate([7])
    assert (where.row, where.id, where.path) == (row, "007", str(folder / "a/7.npy"))
    assert where.file == (name if isinstance(table, Path) else "the table given")
    assert [part.samples for part in source.parts] == ([4, 6, 2] if kind == "parts" else [COUNT])
    assert_is_the_table(pickle.loads(pickle.dumps(source)))
    # Without an id samples have none, and the path is that of the first field with files.
    (where,) = ManifestSource(table, {"y": "even", "x": "path"}, root=folder).locate([7])
    assert (where.id, where.path) == (None, str(folder / "a/7.npy"))


def test_ids_are_text(tmp_path):
    names = ["007", "7", "7.0", "1e3", "NA", "true", " 8", "ä"]
    (tmp_path / "t.csv").write_text("id,y\n" + "".join(f"{name},1\n" for name in names))
    numbers = pa.table({"id": [7, 8], "y": [0, 1]})
    for table, ids in ((tmp_path / "t.csv", names), (numbers, ["7", "8"])):
        source = ManifestSource(table, {"y": "y"}, id="id")
        assert [where.id for where in source.locate(range(len(source)))] == ids


def test_a_mapping_gives_dicts_and_a_sequence_tuples(folder):
    named, several = (
        ManifestSource(given(), fields, root=folder) for fields in (FIELDS, ["path", "species", ["even", "quality"]])
    )
    options = {"batch_size": 5, "shuffle": False, "return_indices": True}
    with AsyncLoader(named, options) as loader, AsyncLoader(several, options) as other:
        assert list(next(loader)) == ["x", "y", "q", "index"]
        batch = next(other)
    assert isinstance(batch, tuple)
    assert [tuple(each.shape) for each in batch] == [(5, 2, 3), (5,), (5, 2), (5,)]
    assert batch[3].tolist() == [0, 1, 2, 3, 4]


def test_a_column_by_key_or_by_name_unless_the_table_is_held_by_another_process(folder):
    source = ManifestSource(given(), FIELDS, id="id", root=folder)
    assert source.column("y").tolist() == [sorted(set(SPECIES)).index(name) for name in SPECIES]
    assert source.column("id").tolist() == IDS
    with pytest.raises(MissingError, match="speces"):
        source.column("speces")
    copied = pickle.loads(pickle.dumps(ManifestSource(given(), FIELDS, root=folder)))
    # A frame may be large, and what is used of it is held anyway.
    with pytest.raises(MissingError, match="'even': was not read before pickling, and the table is in another process"):
        copied.column("even")


def test_manifests_with_other_classes_are_not_one():
    tables = [pa.table({"y": names}) for names in (["a", "b"], ["a", "c"])]
    with pytest.raises((FormatError, ConfigError), match="class"):
        ConcatSource([ManifestSource(table, {"y": "y"}) for table in tables])
    agreed = {"name": "y", "classes": ["a", "b", "c"]}
    both = ConcatSource([ManifestSource(table, {"y": agreed}) for table in tables])
    assert read(both, [0, 1, 2, 3])["y"].tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resise": "crop"}, "resise: .*resize"),
        ({"allow_external": "yes"}, "allow_external: 'yes'"),
        ({"dtype": "float32"}, r"dtype: no such option; give it to a column: {\"name\": COLUMN, \"dtype\": …}"),
        ({"image_size": 32}, r"image_size: .*: x \(column 'path'\), y .*; set kind: image, or suffix: .jpg, for paths"),
    ],
)
def test_an_option_that_is_wrong_begins_the_message(options, message, folder):
    with pytest.raises(ConfigError) as caught:
        ManifestSource(given(), FIELDS, root=folder, **options)
    assert re.match(message, str(caught.value)), str(caught.value)


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name, numbers in {"owl": range(3), "auk": range(3, 10), "emu/deep": range(10, 12)}.items():
        (root / name).mkdir(parents=True)
        for number in numbers:
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(root / name / f"{number:02d}.png")
    (root / "owl/.hidden.png").write_bytes(b"nothing")
    (root / "owl/notes.txt").write_text("nothing")
    (root / ".git").mkdir()
    (root / "README.md").write_text("nothing")
    return root


def test_a_folder_for_each_class(tree):
    source = ManifestSource.from_folder(str(tree))
    assert source.spec["y"].classes == ("auk", "emu", "owl")
    got = read(source, np.arange(len(source)))
    assert got["x"][:, 0, 0, 0].tolist() == [*range(3, 10), 10, 11, 0, 1, 2]
    assert got["y"].tolist() == [0] * 7 + [1] * 2 + [2] * 3
    assert source.locate([8])[0].path == str(tree / "emu/deep/11.png")
    assert source.column("label").tolist() == ["auk"] * 7 + ["emu"] * 2 + ["owl"] * 3
    (tree / "owl").rename(tree / "5 mm")  # which is the name of a class, and no number
    assert ManifestSource.from_folder(tree, image_size=2).spec["y"].classes == ("5 mm", "auk", "emu")


def test_fields_of_a_tree(tree):
    source = ManifestSource.from_folder(tree, ["path", "label"], filters=[["label", "!=", "emu"]], id="path")
    assert (len(source), source.locate([0])[0].id, source.spec.as_mapping) == (10, "auk/03.png", False)
    fields = {"x": "path", "y": {"name": "label", "classes": ["owl", "emu", "auk"]}}
    assert read(ManifestSource.from_folder(tree, fields), [0])["y"].tolist() == [2]


def test_files_of_other_kinds_are_counted(tree, caplog):
    for name in ("phone.HEIC", "blank.png "):
        (tree / "auk" / name).write_bytes(b"nothing")
    ManifestSource.from_folder(tree)
    what, _, counts = caplog.messages[0].rpartition(": ")
    assert what.endswith("skipped files that are neither images nor .npy")
    assert sorted(counts.split(", ")) == ["1 .heic", "1 .png ", "1 .txt"]
    (tree / "dodo").mkdir()
    with pytest.raises(MissingError, match=r"dodo has no images or .npy files; add some, or move the folder"):
        ManifestSource.from_folder(tree)
    (tree / "dodo/phone.HEIC").write_bytes(b"nothing")
    with pytest.raises(MissingError, match=r"^from_folder: .*dodo has no images .*, but 1 \.heic; convert those, or"):
        ManifestSource.from_folder(tree)


@pytest.mark.parametrize("stages", [["train"], ["Train", "valid", "TEST"], ["training", "validation"]], ids="-".join)
def test_folders_of_stages_are_no_classes_unless_they_hold_images(stages, tree, tmp_path):
    for stage in stages:
        shutil.copytree(tree, tmp_path / "img" / stage)
        (tmp_path / "img" / stage / "._owl.png").write_bytes(b"of macOS")
        shutil.copytree(tree / "owl", tmp_path / "classes" / stage)
    with pytest.raises(ConfigError, match=r"has folders of stages.*rename one if these are the classes") as caught:
        ManifestSource.from_folder(tmp_path / "img")
    for stage in stages:
        assert f"from_folder('{tmp_path}/img/{stage}')" in str(caught.value)
        assert len(ManifestSource.from_folder(tmp_path / "img" / stage)) == 12
    (tmp_path / "img" / stages[0]).rename(tmp_path / "img/bus")
    assert "bus" in ManifestSource.from_folder(tmp_path / "img").spec["y"].classes
    assert ManifestSource.from_folder(tmp_path / "classes").spec["y"].classes == tuple(sorted(stages))


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        ("nope", {}, "from_folder: .*nope"),
        ("emu/deep", {}, "from_folder: .*deep"),
        ("", {"resise": "crop"}, "resise.*resize"),
        ("", {"table": "x"}, "table: no such option"),
        ("", {"delimiter": ";"}, "delimiter: does not apply to a folder"),
        ("", {"fields": ["path", "labl"]}, "{tree}: has no column 'labl'"),
        ("", {"id": "label"}, "{tree}, file 1, column 'label': .* more than once"),
    ],
)
def test_what_is_wrong_with_a_tree_or_its_options_is_said_of_the_folder(folder, options, message, tree):
    with pytest.raises((ConfigError, ManifestError), match=f"^{message.format(tree=tree)}"):
        ManifestSource.from_folder(tree / folder, **options)


def test_errors_in_a_tree_name_the_folder_and_no_table(tree):
    (tree / "emu/deep/10.png").write_bytes(b"nothing")
    source = ManifestSource.from_folder(tree, id="path", check_files="none")
    said = rf"^file 7 of {tree}, id 'emu/deep/10\.png': {tree}/emu/deep/10\.png: "
    with pytest.raises(SourceError, match=said) as caught:
        read(source, [7])
    assert caught.value.row == 7
    assert source.locate([7])[0].file == source.parts[0].file == str(tree)
    with pytest.raises(ManifestError, match=rf"^{tree}, file 0, column 'label': 'auk' is not a number"):
        ManifestSource.from_folder(tree, {"y": {"name": "label", "kind": "number"}}, check_files="none")


@pytest.mark.parametrize("link", ["owl/more", "kiwi"])
def test_links_in_a_tree_need_a_word(link, tree, tmp_path):
    (tmp_path / "kiwi").mkdir()
    Image.fromarray(np.full((4, 4, 3), 99, np.uint8)).save(tmp_path / "kiwi/1.png")
    (tree / link).symlink_to(tmp_path / "kiwi")
    # A class is not left out without a word.
    with pytest.raises(ConfigError, match=rf"from_folder: .*{link}' is a link to a folder; set allow_external=True"):
        ManifestSource.from_folder(tree)
    source = ManifestSource.from_folder(tree, allow_external=True)
    assert ("kiwi" in source.spec["y"].classes) is (link == "kiwi")
    assert 99 in read(source, np.arange(len(source)))["x"]


def test_links_that_lead_back_end_somewhere(tmp_path):
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a/1.npy", np.zeros(2))
    for name in ("back", "again"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "a")
    assert len(ManifestSource.from_folder(tmp_path, allow_external=True)) == 1
