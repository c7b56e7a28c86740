"""Fields of a manifest that are rows of HDF5 files."""

import collections
import contextlib
import pickle

import h5py
import numpy as np
import pyarrow as pa
import pytest
from support.sources.oracle import read

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions, ManifestSource
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError, ManifestError, SourceError
from lit_async_data.sources.manifest import fields as hdf5_fields


@pytest.fixture
def stored(tmp_path):
    """Three compressed files of 40 rows in chunks of 10, and a table that goes through them at random."""
    values = np.random.default_rng(0).integers(0, 255, (3, 40, 4, 4, 2), dtype=np.uint8)
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("data", data=values[number], chunks=(10, 4, 4, 2), compression="gzip")
            file["flat"] = values[number].reshape(40, -1)[:, :5].astype(">f4")
            file["more/data"] = values[number] // 2
    order = np.random.default_rng(1).permutation(120)
    table = {"id": [f"{row:03d}" for row in order], "path": [f"{row // 40}.h5" for row in order]}
    table |= {"row": order % 40, "y": order.astype("f4")}
    return tmp_path, values.reshape(120, 4, 4, 2), order, table


@pytest.mark.parametrize("named", [None, "more/data", "column"])
def test_rows_of_hdf5_files(named, stored):
    folder, values, order, table = stored
    table = dict(table)
    if named == "column":
        table["dataset"] = ["data" if row % 2 else "more/data" for row in order]
    field = {"name": "path", "dataset": named} if named == "more/data" else "path"
    source = ManifestSource(pa.table(table), {"x": field, "y": "y"}, id="id", root=folder)
    wanted = values[order]
    if named == "more/data":
        wanted = wanted // 2
    elif named == "column":
        wanted = np.where((order % 2).astype(bool)[:, None, None, None], wanted, wanted // 2)
    samples = np.random.default_rng(2).permutation(120)
    got = read(source, samples)
    np.testing.assert_array_equal(got["x"], wanted[samples])
    np.testing.assert_array_equal(got["y"], order[samples])
    where = source.locate([5])[0]
    assert (where.row, where.id, where.path) == (5, f"{order[5]:03d}", f"{folder}/{order[5] // 40}.h5")
    copied = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(read(copied, [7])["x"][0], wanted[7])
    copied.close()
    np.testing.assert_array_equal(read(copied, [7])["x"][0], wanted[7])
    copied.close()
    source.close()


def test_layout_and_type_of_rows(stored):
    folder, values, order, table = stored
    fields = {"x": {"name": "path", "layout": "NHWC", "dtype": "float32"}, "y": {"name": "path", "dataset": "flat"}}
    with contextlib.closing(ManifestSource(pa.table(table), fields, root=folder)) as source:
        assert (source.spec["x"].shape, source.spec["x"].dtype) == ((2, 4, 4), np.float32)
        assert (source.spec["y"].shape, source.spec["y"].dtype) == ((5,), np.float32)
        got = read(source, np.arange(120))
        np.testing.assert_array_equal(got["x"], values[order].transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(got["y"], values[order].reshape(120, -1)[:, :5])


def test_several_rows_of_one_sample(stored):
    folder, values, order, table = stored
    table = pa.table({**table, "other": table["path"][::-1], "other_row": (order % 40)[::-1]})
    fields = {"x": "path", "z": {"name": "other", "row": "other_row"}}
    with contextlib.closing(ManifestSource(table, fields, root=folder)) as source:
        got = read(source, [3, 80])
        np.testing.assert_array_equal(got["x"], values[order[[3, 80]]])
        np.testing.assert_array_equal(got["z"], values[order[::-1][[3, 80]]])


def test_rows_may_stand_as_text(stored):
    folder, values, order, table = stored
    lines = [f"{path},{row}" for path, row in zip(table["path"], table["row"])]
    (folder / "t.csv").write_text("\n".join(["path,row", *lines]))
    with contextlib.closing(ManifestSource(folder / "t.csv", {"x": "path"})) as source:
        np.testing.assert_array_equal(read(source, [9])["x"][0], values[order[9]])


def test_rows_of_hdf5_files_may_be_whole_fractions(stored):
    folder, values, order, table = stored
    source = ManifestSource(pa.table({**table, "row": (order % 40).astype("f8")}), {"x": "path"}, root=folder)
    np.testing.assert_array_equal(read(source, [3, 5])["x"], values[order[[3, 5]]])
    source.close()
    rows = [None if number == 3 else float(row) for number, row in enumerate(order % 40)]
    missing = pa.table({**table, "row": pa.array(rows)})
    source = ManifestSource(missing, {"x": {"name": "path", "null": "drop"}}, root=folder)
    np.testing.assert_array_equal(read(source, [3])["x"], values[order[[4]]])
    source.close()
    with pytest.raises(ManifestError, match=r"row 3.*no row number; give one, or set null: drop"):
        ManifestSource(pa.table({**table, "row": pa.array(rows)}), {"x": "path"}, root=folder)
    for wrong in (0.5, 1e19, np.inf, -(2.0**60)):
        with pytest.raises(ConfigError, match="does not hold whole numbers"):
            ManifestSource(pa.table({**table, "row": (order % 40) + wrong}), {"x": "path"}, root=folder)


def test_a_table_without_the_column_row_says_so(stored):
    folder, _, _, table = stored
    with pytest.raises(AsyncDataError, match="row") as caught:
        ManifestSource(pa.table({"path": table["path"]}), {"x": "path"}, root=folder)
    assert "column" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_chunk_order_decodes_every_chunk_once(workers, stored):
    folder, values, order, table = stored
    with contextlib.closing(ManifestSource(pa.table(table), {"x": "path", "y": "y"}, root=folder)) as source:
        options = LoaderOptions(batch_size=16, shuffle="chunk", shuffle_chunks=3, workers=workers, return_indices=True)
        with AsyncLoader(source, options) as loader:
            orders = []
            for epoch in range(2):
                ids = []
                for batch in loader:
                    rows = order[batch["index"].numpy()]
                    np.testing.assert_array_equal(batch["x"].numpy(), values[rows])
                    np.testing.assert_array_equal(batch["y"].numpy(), rows)
                    ids += batch["index"].tolist()
                assert sorted(ids) == list(range(120)), epoch
                orders.append(ids)
            assert orders[0] != orders[1]
        # Each group of three chunks is dealt before the next one: 30 samples are of three chunks.
        for ids in orders:
            for begin in range(0, 120, 30):
                chunks = collections.Counter(int(order[sample]) // 10 for sample in ids[begin : begin + 30])
                assert set(chunks.values()) == {10}


def test_an_hdf5_file_may_be_named_in_several_ways(tmp_path, h5, monkeypatch):
    opened = []

    def opening(files, *arguments, **options):
        opened.append(files)
        return HDF5Source(files, *arguments, **options)

    monkeypatch.setattr(hdf5_fields, "HDF5Source", opening)
    h5("a.h5", data=np.arange(5.0))
    (tmp_path / "b.h5").symlink_to(tmp_path / "a.h5")
    table = pa.table({"path": ["a.h5", "./a.h5", "b.h5"], "row": [4, 2, 3]})
    source = ManifestSource(table, {"x": "path"}, root=tmp_path)
    assert read(source, [0, 1, 2])["x"].tolist() == [4, 2, 3]
    assert opened == [[str(tmp_path / "a.h5")]]
    source.close()


def test_a_column_of_datasets_that_is_damaged_is_an_error(tmp_path, h5):
    h5("two.h5", data=np.zeros(3), other=np.ones(3))
    (tmp_path / "t.csv").write_bytes(b"path,row,dataset\ntwo.h5,1,other\ntwo.h5,1,oth\xff\n")
    with pytest.raises(ManifestError, match=r"row 1.*not UTF-8"):
        ManifestSource(tmp_path / "t.csv", {"x": "path"})


@pytest.fixture
def two(tmp_path):
    """A folder with two files, a damaged one and one of another kind, and with a link to a file outside."""
    root = tmp_path / "root"
    root.mkdir()
    for path, rows in ((root / "a.h5", 10), (root / "b.h5", 6), (tmp_path / "out.h5", 6)):
        with h5py.File(path, "w") as file:
            file["data"] = np.arange(rows * 2, dtype="f4").reshape(rows, 2)
            file["other"] = np.arange(rows * 3, dtype="f4").reshape(rows, 3)
    with h5py.File(root / "broken.h5", "w") as file:
        values = np.arange(400, dtype="f4").reshape(200, 2)
        data = file.create_dataset("data", data=values, chunks=(50, 2), compression="gzip", fletcher32=True)
        chunk = data.id.get_chunk_info(0)
    with (root / "broken.h5").open("r+b") as file:
        file.seek(chunk.byte_offset + 20)
        file.write(b"\xa5" * 20)
    (root / "bad.h5").write_bytes(b"not at all" * 300)
    (root / "link.h5").symlink_to(tmp_path / "out.h5")
    return root


def hdf5(root, path="b.h5", row=5, dataset="data"):
    rows = {"id": ["p", "q", "r-1"], "path": ["a.h5", "b.h5", path], "row": [9, 0, row]}
    table = pa.table({**rows, "dataset": ["data", "data", dataset]})
    return ManifestSource(table, {"x": "path"}, id="id", root=root)


@pytest.mark.parametrize(
    "wrong",
    [{"row": row} for row in (6, -1, 2**40, None)]
    + [{"path": path} for path in ("gone.h5", "bad.h5", "broken.h5", "link.h5", "../out.h5", None)]
    + [{"dataset": name} for name in ("nope", None)],
    ids=str,
)
def test_a_wrong_row_of_an_hdf5_file_is_named(wrong, two):
    assert read(hdf5(two), [0, 1, 2])["x"].tolist() == [[18, 19], [0, 1], [10, 11]]
    with pytest.raises(SourceError, match=r"row 2") as caught:
        read(hdf5(two, **wrong), [0, 1, 2])
    assert caught.value.row == 2
    if None not in wrong.values():
        assert "r-1" in str(caught.value)
        assert wrong.get("path", "b.h5") in str(caught.value)


def test_datasets_of_several_shapes_are_refused(two):
    with pytest.raises(FormatError, match=r"'x' has shape \(3,\) in sources\[1\] .*, but \(2,\) in sources\[0\]"):
        hdf5(two, dataset="other")


@pytest.mark.parametrize("row", [99, None])
def test_a_path_of_an_hdf5_file_that_is_missing_can_be_dropped(row, two):
    table = pa.table({"path": ["a.h5", None], "row": [3, row]})
    with contextlib.closing(ManifestSource(table, {"x": {"name": "path", "null": "drop"}}, root=two)) as source:
        assert read(source, np.arange(len(source)))["x"].tolist() == [[6, 7]]
    if row is not None:
        said = r"row 1, .*no path; give one, or set null: drop in fields\.x"
        with pytest.raises(ManifestError, match=said) as caught:
            ManifestSource(table, {"x": "path"}, root=two)
        assert (caught.value.row, caught.value.dataset) == (1, "path")


def test_classes_that_files_name(tmp_path):
    for number, names in enumerate((["B", "T"], ["T", "NK"])):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["y"] = np.array([0, 1, -1], "i1")
            file["y"].attrs["categories"] = file.create_dataset("names", data=names, dtype=h5py.string_dtype()).ref
    table = pa.table({"path": ["0.h5", "1.h5", "0.h5", "1.h5"], "row": [0, 1, 1, 0]})
    field = {"name": "path", "kind": "hdf5", "dataset": "y"}
    with pytest.raises(SourceError, match=r"row 1 of .*classes=\['B', 'T', 'NK'\]\) numbers them by name"):
        ManifestSource(table, {"y": field}, root=tmp_path)
    given = ManifestSource(table, {"y": {**field, "classes": ["NK", "T", "B"]}}, root=tmp_path)
    assert given.spec.names("y", [given[n]["y"] for n in range(4)]).tolist() == ["B", "NK", "T", "T"]
    missing = pa.table({"path": ["0.h5", "0.h5"], "row": [1, 2]})
    source = ManifestSource(missing, {"y": field}, root=tmp_path)
    with pytest.raises(SourceError, match=r"row 1 of .*0.h5:/y, row 2: -1 is a missing value"):
        source[1]
    ignored = ManifestSource(missing, {"y": {**field, "null": "ignore"}}, root=tmp_path)
    assert [ignored[n]["y"] for n in range(2)] == [1, -100]
