"""Tables of every format, in files and in memory: columns, ids and filters as asked for, or what to do."""

import io
import json
import os
import re
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path, PurePosixPath

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.sources.tables import NAMES, everything, held, read_back, tables

from lit_async_data import ManifestSource
from lit_async_data.errors import ChangedError, ConfigError, CorruptError, ManifestError, MissingError
from lit_async_data.sources.table.table import Table, TableReader


def test_ids_must_be_different():
    columns = {"a": ["x", "y", "z", "w"], "b": [1, 2, 1, 1], "n": ["x", None, "y", "z"], "f": [0.5] * 4}
    table = held(columns)
    table.with_ids("a")
    with pytest.raises(ManifestError, match="1 in row 2 and row 0; give each row") as caught:
        table.with_ids("b")
    assert caught.value.row == 2
    with pytest.raises(ManifestError, match="row 1, column 'n': no id"):
        table.with_ids("n")
    with pytest.raises(ManifestError, match="column 'f': holds double; give text"):
        table.with_ids("f")
    with pytest.raises(ManifestError, match=r"7 ids occur more than once, as '0' in row 1 and row 0"):
        held({"a": [str(row // 2) for row in range(14)]}).with_ids("a")


def test_columns_that_are_read_later_leave_out_the_same_rows_of_the_same_file(file):
    path = file("t.csv", "y,site\n1,a\n2,b\n3,c\n4,d\n")
    reader = TableReader(path, [["y", "!=", 2]])
    assert everything(reader.columns(["y"]), "y") == ["1", "3", "4"]
    reader.select(np.array([0, 2]))
    assert everything(reader.columns(["site"]), "site") == ["a", "d"]
    reader.select(np.array([1]))
    assert everything(reader.columns(["site"]), "site") == ["d"]
    os.utime(path, ns=(1, 1))
    with pytest.raises(ChangedError, match=r"t\.csv: changed since the source was built"):
        reader.columns(["site"])


def test_a_table_that_can_be_read_once_is_held():
    table = pa.table({"y": [1, 2], "site": ["a", "b"]})
    reader = TableReader(pa.RecordBatchReader.from_batches(table.schema, table.to_batches()), None)
    assert [everything(reader.columns([name]), name) for name in table.column_names] == [[1, 2], ["a", "b"]]


@pytest.mark.parametrize(("option", "value"), [("delimiter", ";"), ("encoding", "cp1252")])
def test_forms_of_text_say_nothing_of_other_tables(option, value, file, parquet):
    for given_table, what in (
        (file("t.jsonl", '{"n": 1}\n'), r"\.jsonl files"),
        (parquet(n=[1]), r"\.parquet files"),
        (pa.table({"n": [1]}), "a table in memory"),
    ):
        with pytest.raises(ConfigError, match=f"^{option}: does not apply to {what}, only to CSV and TSV files"):
            ManifestSource(given_table, {"n": "n"}, **{option: value})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t.xlsx", r"it is a spreadsheet; give pandas\.read_excel\('.*/t\.xlsx'\), or save it as CSV"),
        ("t.json", r"name a file of JSON lines \.jsonl; for a JSON array, give pandas\.read_json\('.*/t\.json'\)"),
        ("t.csv.bz2", "it is an archive; unpack it"),
        ("t.txt", r"name it \.csv and set delimiter="),
        ("t.pkl", r"\.ndjson\.gz; HDF5 files are read by HDF5Source, and images are a column of paths"),
    ],
)
def test_files_of_other_kinds_say_what_reads_them(name, message, file):
    path = file(name, b"anything")
    with pytest.raises(ConfigError, match=rf"^table: {re.escape(path)} does not end in one of \.csv, .*{message}"):
        Table.of(path, ["a"])


def test_a_dict_of_columns_is_a_table(tmp_path):
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"without classes, list the images: ManifestSource\(\{'path': \[...\]\}"):
        ManifestSource.from_folder(tmp_path, image_size=8)
    with pytest.raises(ConfigError, match=r"images are a column: \{'path': \[...\]\}"):
        ManifestSource([str(tmp_path / "a.png")], {"x": "path"}, image_size=8)
    source = ManifestSource({"path": ["a.png"]}, {"x": "path"}, root=tmp_path, image_size=8)
    assert source[0]["x"][:, 0, 0].tolist() == [255, 0, 0]
    with pytest.raises(ManifestError, match="cannot be converted to Arrow: 'Column 1 named b expected length 1"):
        Table.of({"a": [1], "b": [1, 2]}, ["a"])


def test_path_objects_are_paths():
    given = pd.DataFrame({"path": [Path("/data/0.npy"), None, PurePosixPath("1.npy"), "2.npy"], "more": 4 * [1]})
    assert everything(Table.of(given, ["path", "more"]), "path") == ["/data/0.npy", None, "1.npy", "2.npy"]


@given(tables, st.booleans(), st.integers(1, 5))
def test_parquet_is_what_was_written(rows, dictionary, group):
    kinds = [pa.string(), pa.int64(), pa.float64(), pa.string()]
    columns = {n: pa.array(v, k) for n, v, k in zip(NAMES, zip(*rows), kinds)}
    pq.write_table(pa.table(columns), target := io.BytesIO(), group, use_dictionary=dictionary)
    assert read_back("m.parquet", target.getvalue()) == rows


@given(tables)
def test_frames_are_what_they_were_made_of(rows):
    polars = pytest.importorskip("polars")
    kinds = {"text": "str", "whole": "Int64", "fraction": "Float64", "more": "str"}
    columns = dict(zip(NAMES, zip(*rows)))
    frame = pd.DataFrame({n: pd.Series(v, dtype=kinds[n]) for n, v in columns.items()}, index=range(len(rows)))
    frame.index = [7] * len(rows)
    types = [polars.String, polars.Int64, polars.Float64, polars.String]
    other = polars.DataFrame({n: polars.Series(v, dtype=t) for (n, v), t in zip(columns.items(), types)})
    for each in (frame, other, other.to_arrow()):
        table = Table.of(each, NAMES)
        assert list(zip(*(everything(table, name) for name in NAMES))) == rows


def test_a_folder_and_a_pattern_are_read_in_the_order_of_paths(parquet, tmp_path):
    parquet("in/b.parquet", a=["3", "4"], c=[1, 2])
    parquet("in/a.parquet", a=["0", "1", "2"])
    parquet("in/deep/x.parquet", a=["5"])
    parquet("in/_old.parquet", a=["no"])
    parquet("in/.hidden.parquet", a=["no"])
    table = Table.of(tmp_path / "in", ["a"])
    assert everything(table, "a") == list("012345")
    assert table.origin.place(4) == (str(tmp_path / "in/b.parquet"), 1)
    assert table.origin.where(4) == f"row 1 of {tmp_path}/in/b.parquet"
    assert table.origin.name == f"{tmp_path}/in/a.parquet and 2 more"
    assert everything(Table.of(str(tmp_path / "in/[ab].parquet"), ["a"]), "a") == list("01234")
    parquet("in/[ab].parquet", a=["x"])  # a file with that name
    assert everything(Table.of(str(tmp_path / "in/[ab].parquet"), ["a"]), "a") == ["x"]


def test_files_of_different_types_are_an_error_that_names_both(parquet, tmp_path):
    one, two = parquet("in/a.parquet", a=["x"]), parquet("in/b.parquet", a=[1])
    with pytest.raises(ManifestError, match=rf"column 'a': is string in .*{one}.*, but int64 in .*{two}"):
        Table.of(tmp_path / "in", ["a"])
    parquet("in/a.parquet", c=["x"])
    with pytest.raises(ManifestError, match=r"b.parquet: has no column 'c'"):
        Table.of(tmp_path / "in", ["c"])


def test_a_file_without_any_value_fits_every_type(parquet, tmp_path):
    parquet("in/a.parquet", a=pa.nulls(2))
    parquet("in/b.parquet", a=[1])
    parquet("in/c.parquet", a=pa.nulls(1))
    assert everything(Table.of(tmp_path / "in", ["a"]), "a") == [None, None, 1, None]


def test_a_file_that_is_none_or_is_damaged(file):
    with pytest.raises(ManifestError, match="is not a readable Parquet file"):
        Table.of(file("m.parquet", b"PAR1 nothing"), ["a"])
    # A changed value decodes, but does not fit the checksum.
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    pq.write_table(pa.table({"a": np.arange(1000)}), content := io.BytesIO(), **options)
    at = content.getvalue().index(np.int64(500).tobytes())
    content.getbuffer()[at] = 0xFF
    with pytest.raises(CorruptError, match=r"m.parquet: does not decode"):
        Table.of(file("m.parquet", content.getvalue()), ["a"])


@pytest.mark.parametrize(
    ("given_path", "message"),
    [("none.csv", "no such file"), ("n*.csv", "matches no file"), (".", r"no \.parquet .* by from_folder, or data=f")],
)
def test_missing_files(tmp_path, given_path, message):
    with pytest.raises(MissingError, match=message):
        Table.of(str(tmp_path / given_path), ["a"])


@pytest.mark.parametrize(
    ("thing", "error", "said"),
    [
        (["a.csv"], ConfigError, r"table: list is neither.*a pattern, .* or .* ConcatSource\(\["),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ManifestError, "more than one column 'a'"),
        (pd.DataFrame([[1, 2]]), ManifestError, "the table given: has no column 'a'; it has 0, 1"),
        (pd.DataFrame({"a": [1, "x"]}, dtype=object), ManifestError, "cannot be converted to Arrow"),
        (pd.DataFrame({"a": []}), ManifestError, "has no rows"),
    ],
)
def test_what_is_no_table(thing, error, said):
    with pytest.raises(error, match=said):
        Table.of(thing, ["a"])
    lazy = pytest.importorskip("polars").DataFrame({"a": [1]}).lazy()
    with pytest.raises(ConfigError, match=r"table: a LazyFrame has no rows yet; give frame.collect\(\)"):
        Table.of(lazy, ["a"])


def test_filters_over_several_files_keep_the_rows_of_each(parquet, tmp_path):
    for number, name in enumerate("abc"):
        parquet(f"in/{name}.parquet", a=[f"{name}{row}" for row in range(10)], n=[number * row for row in range(10)])
    table = Table.of(tmp_path / "in", ["a"], filters=[["n", ">", 8]])
    assert everything(table, "a") == ["b9", "c5", "c6", "c7", "c8", "c9"]
    assert [table.origin.place(row)[1] for row in range(6)] == [9, 5, 6, 7, 8, 9]
    with pytest.raises(ManifestError, match=r"c.parquet, row 6, column 'a': 'c6' is not a number") as caught:
        Table.of(tmp_path / "in", ["a"], filters=[["n", ">", 11]]).labels("a", kind="number")
    assert (caught.value.file, caught.value.row) == (str(tmp_path / "in/c.parquet"), 6)


CELLS = [("a", 1), ("b", 2), (None, 3), ("a", None), ("c", 5), ("7", -6)]
OPERATIONS = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge, "in": lambda left, right: left in right}
OPERATIONS["not in"] = lambda left, right: left not in right


@pytest.mark.parametrize("operator", OPERATIONS)
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "memory"])
def test_filters_keep_what_python_keeps(file, parquet, suffix, operator):
    texts, numbers = zip(*CELLS)
    many = "in" in operator
    filters = [["n", operator, [1, 2, 5] if many else 2], ["t", operator, ["b", "7"] if many else "b"]]
    given_table = {
        "csv": lambda: file("m.csv", "k,t,n\n" + "".join(f"-,{t or ''},{'' if n is None else n}\n" for t, n in CELLS)),
        "jsonl": lambda: file("m.jsonl", "".join(json.dumps({"t": t, "n": n}) + "\n" for t, n in CELLS)),
        "parquet": lambda: parquet(t=list(texts), n=list(numbers), row_group_size=2),
        "memory": lambda: pa.table({"t": pa.array(texts).dictionary_encode(), "n": list(numbers)}),
    }[suffix]()
    for some in (filters, filters[:1], filters[1:]):
        kept = [
            row
            for row, cells in enumerate(CELLS)
            for values in [dict(zip("tn", cells))]
            if all(values[c] is not None and OPERATIONS[o](values[c], v) for c, o, v in some)
        ]
        if not kept:
            with pytest.raises(ManifestError, match=r"the filters match none of its 6 rows: \["):
                Table.of(given_table, ["t"], filters=some)
            continue
        table = Table.of(given_table, ["t"], filters=some)
        assert [table.origin.place(row)[1] for row in range(len(table))] == kept
        assert everything(table, "t") == [texts[row] for row in kept]


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_blanks_around_a_name_make_no_other_name(kind):
    table = pa.table({"c": pa.array(["cat", "cat ", " dog", None, "\tcat"]).cast(kind), "n": range(5)})
    for condition, kept in ((["==", "cat"], [0, 1, 4]), (["not in", [" cat"]], [2]), (["!=", ""], [0, 1, 2, 4])):
        assert everything(Table.of(table, ["n"], filters=[["c", *condition]]), "n") == kept


def test_filters_compare_whole_numbers_exactly():
    table = held({"n": [2**53, 2**53 + 1, 5]}, filters=[["n", "==", 2**53 + 1]])
    assert everything(table, "n") == [2**53 + 1]
    assert everything(held({"n": [5, 6]}, filters=[["n", ">", 5.5]]), "n") == [6]
    assert everything(held({"b": [True, False]}, filters=[["b", "==", True]]), "b") == [True]


@pytest.mark.parametrize("suffix", ["jsonl", "memory", "categories"])
def test_text_is_no_number_where_a_table_knows_its_types(file, suffix):
    texts = pa.array(["003", "3", "10"])
    given_table = pa.table({"t": texts.dictionary_encode() if suffix == "categories" else texts})
    if suffix == "jsonl":
        given_table = file("m.jsonl", "".join(f'{{"t": "{text}"}}\n' for text in texts.to_pylist()))
    for condition, such in ((["==", 3], "3"), ([">", 5.5], "5.5"), (["in", [3, 10]], "3")):
        with pytest.raises(ConfigError, match=rf"column 't' holds .*string.*value of that type, such as '{such}'$"):
            Table.of(given_table, ["t"], filters=[["t", *condition]])
    assert everything(Table.of(given_table, ["t"], filters=[["t", "==", "3"]]), "t") == ["3"]
    table = file("m.csv", "t,n\n-,003\n-,10\n")
    assert everything(Table.of(table, ["n"], filters=[["n", ">", 5]]), "n") == ["10"]


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ("n > 5", "filters: 'n > 5' is not a list of"),
        ([["n", "=", 5]], r"filters: \['n', '=', 5\] is not .*; operators are ==, !=, <"),
        ([["n", "in", []]], "'in' needs a list of values"),
        ([["n", "==", float("nan")]], "nan cannot be compared with"),
        ([["n", "not in", [5, None]]], "cannot be compared with"),
        ([["n", "==", "x"]], "column 'n' holds int64, which cannot be compared by == 'x'"),
        ([["b", "==", 1]], "column 'b' holds bool"),
    ],
)
def test_filters_that_are_none(filters, message):
    with pytest.raises(ConfigError, match=message):
        Table.of(pa.table({"n": [1, 2], "b": [True, False]}), ["n"], filters=filters)


def test_a_filter_on_a_missing_column_or_on_text_that_is_no_number(file):
    path = file("m.csv", "a,quality\nx,1\ny,?\n")
    with pytest.raises(ManifestError, match="no column 'qualty'; did you mean 'quality'\\?"):
        Table.of(path, ["a"], filters=[["qualty", ">", 1]])
    with pytest.raises(ManifestError, match=r"row 1, column 'quality': '\?' is not a number"):
        Table.of(path, ["a"], filters=[["quality", ">", 1]])


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64(), pa.timestamp("us"), pa.timestamp("s")])
def test_dates_are_compared_with_text_and_are_classes_if_asked(kind):
    days = pa.array(["2024-01-01", "2024-03-01", "2024-05-01"]).cast(pa.timestamp("s")).cast(kind)
    table = pa.table({"n": [0, 1, 2], "day": days})
    for operator, value, kept in ((">=", "2024-03-01", [1, 2]), ("in", ["2024-01-01", "2023-01-01"], [0])):
        assert ManifestSource(table, {"n": "n"}, filters=[["day", operator, value]]).column("n").tolist() == kept
    with pytest.raises(ConfigError, match="which cannot be compared by >= 'March'; give a value of that type"):
        ManifestSource(table, {"n": "n"}, filters=[["day", ">=", "March"]])
    with pytest.raises(ManifestError, match="cannot be a label; set kind: class, or leave it out of fields"):
        ManifestSource(table, {"d": "day"})
    classes = ManifestSource(table, {"d": {"name": "day", "kind": "class"}}).spec["d"].classes
    assert [each[:10] for each in classes] == ["2024-01-01", "2024-03-01", "2024-05-01"]
