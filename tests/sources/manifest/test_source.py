"""`ManifestSource` over every kind of table: which samples there are, what they are called, and their labels."""

import json
import pickle
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.sources.manifests import COLUMNS, COUNT, FIELDS, IDS, QUALITY, SPECIES, given
from support.sources.oracle import read

from lit_async_data import AsyncLoader, Balanced, ConcatSource, LoaderOptions, ManifestSource
from lit_async_data.errors import ConfigError, FormatError, ManifestError, MissingError, SourceError


def rows_of(suffix, folder):
    path = folder / f"table.{suffix}"
    lines = list(zip(*COLUMNS.values(), strict=True))
    if suffix == "csv":
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in [tuple(COLUMNS), *lines]))
    else:
        path.write_text("".join(json.dumps(dict(zip(COLUMNS, line, strict=True))) + "\n" for line in lines))
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


@pytest.mark.parametrize("format_", ["csv", "jsonl"])
def test_a_table_of_text(format_, folder):
    path = rows_of(format_, folder)
    source = ManifestSource(path, FIELDS, id="id")
    assert_is_the_table(source)
    where = source.locate([7])[0]
    assert (*where, where.id, where.path) == (str(path), "/", 7, "007", str(folder / "a/7.npy"))
    assert source.name == str(path)


@pytest.mark.parametrize("pattern", ["parts", "parts/*.parquet"])
def test_several_parquet_files_are_one_table_with_rows_of_their_own(pattern, folder):
    (folder / "parts").mkdir()
    for part, begin in enumerate([0, 4, 10]):
        pq.write_table(given().slice(begin, [4, 6, 2][part]), folder / f"parts/{part}.parquet")
    source = ManifestSource(folder / pattern, FIELDS, id="id", root=folder)
    assert_is_the_table(source)
    places = [(f"{folder}/parts/{number}.parquet", row) for number, row in enumerate([3, 0, 1])]
    assert [(where.file, where.row) for where in source.locate([3, 4, 11])] == places
    assert [part.samples for part in source.parts] == [4, 6, 2]


@pytest.mark.parametrize("kind", ["pyarrow", "pandas", "polars"])
def test_a_table_in_memory(kind, folder, monkeypatch):
    table = given() if kind == "pyarrow" else pytest.importorskip(kind).DataFrame(COLUMNS)
    assert_is_the_table(ManifestSource(table, FIELDS, id="id", root=folder))
    monkeypatch.chdir(folder)
    assert_is_the_table(ManifestSource(table, FIELDS, id="id"))


def test_ids_are_text(tmp_path):
    names = ["007", "7", "7.0", "1e3", "NA", "true", " 8", "ä"]
    (tmp_path / "t.csv").write_text("id,y\n" + "".join(f"{name},1\n" for name in names))
    for table in (tmp_path / "t.csv", pa.table({"id": names, "y": [1] * len(names)})):
        source = ManifestSource(table, {"y": "y"}, id="id")
        assert [where.id for where in source.locate(range(len(names)))] == names
    numbers = ManifestSource(pa.table({"id": [7, 8], "y": [0, 1]}), {"y": "y"}, id="id")
    assert [where.id for where in numbers.locate([1, 0])] == ["8", "7"]


def test_without_an_id_samples_have_none_and_the_path_is_that_of_the_first_field_with_files(folder):
    table = given(other=[f"a/{COUNT - 1 - row}.npy" for row in range(COUNT)])
    source = ManifestSource(table, {"y": "even", "b": "other", "x": "path"}, root=folder)
    assert source.locate([0])[0].id is None
    assert source.locate([0])[0].path == str(folder / "a/11.npy")
    assert ManifestSource(given(), {"y": "species"}).locate([3])[0].path is None


def first_batch(source, **options):
    with AsyncLoader(source, LoaderOptions(batch_size=5, shuffle=False, **options)) as loader:
        return next(loader)


def test_a_mapping_gives_dicts_and_a_sequence_tuples(folder):
    assert list(first_batch(ManifestSource(given(), FIELDS, root=folder))) == ["x", "y", "q"]
    several = ManifestSource(given(), ["path", "species", ["even", "quality"]], root=folder)
    batch = first_batch(several, return_indices=True)
    assert isinstance(batch, tuple)
    assert [tuple(each.shape) for each in batch] == [(5, 2, 3), (5,), (5, 2), (5,)]
    assert batch[3].tolist() == [0, 1, 2, 3, 4]


def test_a_pickled_source_has_its_columns_unless_the_table_is_held_by_another_process(folder):
    source = ManifestSource(rows_of("csv", folder), FIELDS, id="id", root=folder)
    copied = pickle.loads(pickle.dumps(source))
    assert_is_the_table(copied)
    assert copied.column("even").astype(int).tolist() == COLUMNS["even"]
    copied = pickle.loads(pickle.dumps(ManifestSource(given(), FIELDS, id="id", root=folder)))
    assert_is_the_table(copied)
    # A frame may be large, and what is used of it is held anyway.
    with pytest.raises(MissingError, match="'even': was not read before pickling, and the table is in another process"):
        copied.column("even")


def test_a_column_by_key_or_by_name(folder):
    source = ManifestSource(rows_of("csv", folder), FIELDS, id="id")
    assert source.column("y").tolist() == [sorted(set(SPECIES)).index(name) for name in SPECIES]
    assert source.column("species").tolist() == SPECIES
    assert source.column("even").astype(int).tolist() == COLUMNS["even"]
    assert source.column("id").tolist() == IDS
    with pytest.raises(MissingError, match="speces"):
        source.column("speces")


def test_manifests_with_other_classes_are_not_one(folder):
    one = ManifestSource(pa.table({"y": ["a", "b"]}), {"y": "y"})
    other = ManifestSource(pa.table({"y": ["a", "c"]}), {"y": "y"})
    with pytest.raises((FormatError, ConfigError), match="class"):
        ConcatSource([one, other])
    agreed = {"name": "y", "classes": ["a", "b", "c"]}
    both = ConcatSource([ManifestSource(pa.table({"y": names}), {"y": agreed}) for names in (["a", "b"], ["a", "c"])])
    assert read(both, [0, 1, 2, 3])["y"].tolist() == [0, 1, 0, 2]


def test_balance_leaves_out_what_is_ignored():
    source = ManifestSource(pa.table({"y": ["a", None, "b", "b"]}), {"y": {"name": "y", "null": "ignore"}})
    with AsyncLoader(source, LoaderOptions(batch_size=4, weights=Balanced("y"), epoch_size=40)) as loader:
        assert {int(value) for batch in loader for value in batch["y"]} == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter": []}, "filter: .*filters"),
        ({"resise": "crop"}, "resise: .*resize"),
        ({"check_files": "some"}, "check_files: 'some'.*first, none"),
        ({"allow_external": "yes"}, "allow_external: 'yes'"),
        ({"dtype": "float32"}, r"dtype: no such option; give it to a column: {\"name\": COLUMN, \"dtype\": …}"),
        ({"seperator": ";"}, "seperator: no such option; did you mean separator. give it to a column"),
        ({"image_size": 32}, r"image_size: .*: x \(column 'path'\), y .*; set kind: image, or suffix: .jpg, for paths"),
        ({"resize": "crop"}, "image_size: missing"),
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
    source = ManifestSource.from_folder(tree)
    assert source.spec["y"].classes == ("auk", "emu", "owl")
    got = read(source, np.arange(len(source)))
    assert got["x"][:, 0, 0, 0].tolist() == [*range(3, 10), 10, 11, 0, 1, 2]
    assert got["y"].tolist() == [0] * 7 + [1] * 2 + [2] * 3
    assert source.locate([8])[0].path == str(tree / "emu/deep/11.png")
    assert source.column("label").tolist() == ["auk"] * 7 + ["emu"] * 2 + ["owl"] * 3
    assert ManifestSource.from_folder(str(tree), image_size=2).spec["x"].shape == (3, 2, 2)


def test_a_folder_says_that_its_name_is_a_class(tmp_path):
    for name in ("5 mm", "10 mm"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.zeros(3))
    assert ManifestSource.from_folder(tmp_path).spec["y"].classes == ("10 mm", "5 mm")


def test_fields_of_a_tree(tree):
    source = ManifestSource.from_folder(tree, ["path", "label"], filters=[["label", "!=", "emu"]], id="path")
    assert len(source) == 10
    assert source.locate([0])[0].id == "auk/03.png"
    assert not source.spec.as_mapping
    with pytest.raises(ConfigError, match=r"^resise.*resize"):
        ManifestSource.from_folder(tree, resise="crop")
    with pytest.raises(ConfigError, match=r"^table: no such option"):
        ManifestSource.from_folder(tree, table="x")
    source = ManifestSource.from_folder(tree)
    assert source.layout() is source.layout()
    given = {"x": "path", "y": {"name": "label", "classes": ["owl", "emu", "auk"]}}
    assert read(ManifestSource.from_folder(tree, given), [0])["y"].tolist() == [2]


def test_a_tree_that_is_none(tree, tmp_path):
    with pytest.raises(ConfigError, match="nope"):
        ManifestSource.from_folder(tmp_path / "nope")
    with pytest.raises(ConfigError, match="deep"):
        ManifestSource.from_folder(tree / "emu/deep")


def test_files_of_other_kinds_are_counted(tree, caplog):
    for name in ("phone.HEIC", "blank.png "):
        (tree / "auk" / name).write_bytes(b"nothing")
    ManifestSource.from_folder(tree)
    (record,) = caplog.records
    what, _, counts = record.getMessage().rpartition(": ")
    assert what.endswith("skipped files that are neither images nor .npy")
    assert sorted(counts.split(", ")) == ["1 .heic", "1 .png ", "1 .txt"]
    (tree / "dodo").mkdir()
    (tree / "dodo/phone.HEIC").write_bytes(b"nothing")
    with pytest.raises(MissingError, match=r"^from_folder: .*dodo has no images .*, but 1 \.heic; convert those, or"):
        ManifestSource.from_folder(tree)
    (tree / "dodo/phone.HEIC").unlink()
    with pytest.raises(MissingError, match=r"dodo has no images or .npy files; add some, or move the folder"):
        ManifestSource.from_folder(tree)


STAGES = [["train"], ["train", "val"], ["Train", "valid", "TEST"], ["training", "validation", "evaluation"]]


@pytest.mark.parametrize("stages", STAGES, ids="-".join)
def test_folders_of_stages_are_no_classes(stages, tree, tmp_path):
    for stage in stages:
        shutil.copytree(tree, tmp_path / "img" / stage)
        (tmp_path / "img" / stage / "._owl.png").write_bytes(b"of macOS")
    with pytest.raises(ConfigError, match="has folders of stages") as caught:
        ManifestSource.from_folder(tmp_path / "img")
    for stage in stages:
        assert f"from_folder('{tmp_path}/img/{stage}')" in str(caught.value)
        assert len(ManifestSource.from_folder(tmp_path / "img" / stage)) == 12
    assert "rename one if these are the classes" in str(caught.value)
    (tmp_path / "img" / stages[0]).rename(tmp_path / "img/bus")
    assert "bus" in ManifestSource.from_folder(tmp_path / "img").spec["y"].classes


def test_classes_that_are_called_as_stages_are(tree, tmp_path):
    for name in ("train", "test"):
        shutil.copytree(tree / "owl", tmp_path / "img" / name)
    assert ManifestSource.from_folder(tmp_path / "img").spec["y"].classes == ("test", "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ["path", "labl"]}, "{tree}: has no column 'labl'"),
        ({"filters": [["path", "==", "b"]], "id": "label"}, "{tree}: the filters match none"),
        ({"id": "label"}, "{tree}, file 1, column 'label': .* more than once"),
        ({"delimiter": ";"}, "delimiter: does not apply to a folder"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_errors_about_the_options_of_a_tree_name_the_folder(options, message, tree):
    with pytest.raises((ConfigError, ManifestError), match=f"^{message.format(tree=tree)}") as caught:
        ManifestSource.from_folder(tree, **options)
    assert isinstance(caught.value, ConfigError) or caught.value.file == str(tree)


def test_errors_in_a_tree_name_the_folder_and_no_table(tree):
    (tree / "emu/deep/10.png").write_bytes(b"nothing")
    source = ManifestSource.from_folder(tree, check_files="none")
    with pytest.raises(SourceError, match=rf"^file 7 of {tree}: {tree}/emu/deep/10\.png: ") as caught:
        read(source, [7])
    assert caught.value.row == 7
    assert source.locate([7])[0].file == str(tree)
    assert [part.file for part in source.parts] == [str(tree)]
    source = ManifestSource.from_folder(tree, id="path", check_files="none")
    (tree / "emu/deep/10.png").unlink()
    with pytest.raises(MissingError, match=rf"^file 7 of {tree}, id 'emu/deep/10\.png': "):
        read(source, [7])
    with pytest.raises(ManifestError, match=rf"^{tree}, file 0, column 'label': 'auk' is not a number"):
        ManifestSource.from_folder(tree, {"y": {"name": "label", "kind": "number"}}, check_files="none")


def test_links_in_a_tree(tree, tmp_path):
    (tmp_path / "kiwi").mkdir()
    Image.fromarray(np.full((4, 4, 3), 99, np.uint8)).save(tmp_path / "kiwi/1.png")
    (tree / "owl/more").symlink_to(tmp_path / "kiwi")
    with pytest.raises(ConfigError, match=r"from_folder: .*owl/more' is a link to a folder; set allow_external=True"):
        ManifestSource.from_folder(tree)
    (tree / "owl/more").unlink()
    (tree / "kiwi").symlink_to(tmp_path / "kiwi")
    # A class is not left out without a word.
    with pytest.raises(ConfigError, match=r"from_folder: .*kiwi' is a link to a folder; set allow_external=True"):
        ManifestSource.from_folder(tree)
    source = ManifestSource.from_folder(tree, allow_external=True)
    assert source.spec["y"].classes == ("auk", "emu", "kiwi", "owl")
    assert 99 in read(source, np.arange(len(source)))["x"]


def test_links_that_lead_back_end_somewhere(tmp_path):
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a/1.npy", np.zeros(2))
    for name in ("back", "again"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "a")
    source = ManifestSource.from_folder(tmp_path, allow_external=True)
    assert len(source) == 1
    assert source.name == str(tmp_path)
