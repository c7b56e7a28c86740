"""`ManifestSource` over every kind of table: which samples there are, what they are called, and their labels."""

import json
import pickle
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sources.manifests import COLUMNS, COUNT, FIELDS, IDS, QUALITY, SPECIES, given
from support.sources.oracle import read

from lit_async_data import AsyncLoader, Balanced, ConcatSource, LoaderOptions, ManifestSource
from lit_async_data.errors import ConfigError, FormatError, MissingError


def rows_of(suffix, folder):
    """Writes the table as text; returns its path."""
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


def test_image_size_without_images_says_kind(tmp_path):
    with pytest.raises(ConfigError, match=r"^image_size: .*: x \(column 'p'\); set kind: image for paths"):
        ManifestSource(pa.table({"p": ["one", "two"]}), {"x": "p"}, image_size=8)


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
        ({"image_size": 32}, "image_size: "),
        ({"resize": "crop"}, "image_size: missing"),
    ],
)
def test_an_option_that_is_wrong_begins_the_message(options, message, folder):
    with pytest.raises(ConfigError) as caught:
        ManifestSource(given(), FIELDS, root=folder, **options)
    assert re.match(message, str(caught.value)), str(caught.value)
