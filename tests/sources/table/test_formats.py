"""CSV and TSV files: what Python's own reader gives, or an error that names the row."""

import csv
import decimal
import gzip
import io
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.oracle import read
from support.sources.tables import NAMES, assert_labelled, everything, held, labelled, read_back, tables

from lit_async_data import ManifestSource
from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.sources.table import formats
from lit_async_data.sources.table.formats import TextFormat, printable_path, quoted
from lit_async_data.sources.table.table import Table


@given(tables, st.sampled_from([("m.csv", ","), ("m.tsv", "\t"), ("m.csv.gz", ",")]), st.sampled_from(["\n", "\r\n"]))
def test_csv_is_what_pythons_csv_reads(rows, kind, end):
    (name, delimiter), target = kind, io.StringIO()
    csv.writer(target, delimiter=delimiter, lineterminator=end).writerows([NAMES, *rows])
    text = target.getvalue()
    expected = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))[1:]
    found = read_back(name, gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert [[cell or "" for cell in row] for row in found] == expected


def test_text_stays_text_and_only_an_empty_cell_is_no_value(file):
    path = file("m.csv", 'id,x\n007,NA\n1e3,null\n,""\n 5,nan\n')
    table = Table.of(path, ["id", "x"])
    assert everything(table, "id") == ["007", "1e3", None, " 5"]
    assert everything(table, "x") == ["NA", "null", None, "nan"]
    numbers = table.labels("id", kind="number", null="ignore").values
    assert np.array_equal(numbers, [7.0, 1000.0, np.nan, 5.0], equal_nan=True)


def test_only_requested_columns_are_read_and_others_may_hold_anything(file):
    table = Table.of(file("m.csv", b"a,b,c,,\n1,\xff,3,,\n4,\0,6,,\n"), ["c", "a", "c"])
    assert [name for name in ("a", "b", "c", "") if name in table.names] == ["a", "c"]
    assert (everything(table, "a"), everything(table, "c")) == (["1", "4"], ["3", "6"])
    lines = '{"a": 1, "meta": 1}\n\n{"meta": "x", "a": 2}\n{"meta": {}}\n'
    assert everything(Table.of(file("m.jsonl", lines), ["a"]), "a") == [1, 2, None]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_marks_line_ends_and_newlines_in_cells(file, mark, end):
    content = mark + b'"a",b' + end + b'"x ""y""\n,z",1' + end + end + b"w,2" + end
    assert everything(Table.of(file("m.csv", content), ["a"]), "a") == ['x "y"\n,z', "w"]


@pytest.mark.parametrize(
    ("content", "row", "message"),
    [
        (b"", None, "is empty; its first line must name the columns"),
        (b"a,b\n", None, "has no rows"),
        (b"a,b\n\n", None, "has no rows"),
        (b"a,b,a\n1,2,3\n", None, "has more than one column 'a'"),
        (b"A,b\n1,2\n", None, "has no column 'a'; it has 'A', 'b'"),
        (b"aa ,b\n1,2\n", None, "has no column 'a'"),
        (b"c;d,b\n1,2\n", None, "has no column 'a'; it has 'c;d', 'b'"),
        (b'a,b\n1,2\n\n"x\ny",2\n1,2,3\n', 2, r"row 2: 3 cells, but the first line has 2"),
        (b"a,b\n1,2\n3\n", 1, r"row 1: 1 cells, but the first line has 2"),
        (b"a,b\n1,2\n\xff,2\n", 1, r"row 1, column 'a': text that is not UTF-8"),
        (b'a,b\n1,2\n3,"4\n5,6\n', 1, r"row 1: a quote is never closed"),
        (b'b,a\n1,2\n3,"4""\n5,6\n', 1, r"row 1: a quote is never closed"),
        (b'b,a\n1,2"\n3,"4\n5,6\n', 1, r"row 1: a quote is never closed"),
        (b'a,b\n1,2\n"3,4\n5,6\n', 1, r"row 1: 1 cells, but the first line has 2"),
        (b'a,b\n1,2\n3,"' + b"x" * 200_000, 1, "row 1: a quote is never closed"),
        (b"\xff\xfea\x00,\x00b\x00\n\x00", None, "its first line is not UTF-8; is it compressed"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), None, "is compressed by gzip; unpack it, or name a table .csv.gz"),
    ],
)
def test_a_faulty_csv_file_is_an_error_that_names_the_row(file, content, row, message):
    path = file("m.csv", content)
    with pytest.raises(ManifestError, match=message) as caught:
        Table.of(path, ["a"])
    assert str(caught.value).startswith(path)
    assert (caught.value.file, caught.value.row) == (path, row)


def test_quotes_within_a_cell_and_a_last_newline_are_nothing_wrong(file):
    path = file("m.csv", 'a,b\n1,5" disk\n2,5"\n3,a"b"c"\n4,"x\n"\n')
    assert everything(Table.of(path, ["b"]), "b") == ['5" disk', '5"', 'a"b"c"', "x\n"]


def test_a_row_longer_than_a_block_is_an_error(file, monkeypatch):
    monkeypatch.setattr(formats, "_BLOCK", 1000)
    with pytest.raises(ManifestError, match=r"cannot be read: .*; is a quote never closed\?"):
        Table.of(file("m.csv", f"a,b\n1,{'x' * 5000}\n2,3\n"), ["b"])


def test_newlines_in_cells_at_the_end_of_a_block(file, monkeypatch):
    monkeypatch.setattr(formats, "_BLOCK", 100)
    cells = ["x\n" * (1 + row % 7) + "x" for row in range(100)]
    content = "a,b\n" + "".join(f'{row},"{cell}"\n' for row, cell in enumerate(cells))
    table = Table.of(file("m.csv", content), ["a", "b"])
    assert everything(table, "a") == [str(row) for row in range(100)]
    assert everything(table, "b") == cells


def test_a_damaged_archive_is_an_error(file):
    random = np.random.default_rng(0).integers(0, 10**9, 5000)
    packed = gzip.compress(("a\n" + "\n".join(map(str, random)) + "\n").encode())
    for name, content in (("m.csv.gz", packed[:-2000]), ("n.csv.gz", b"no gzip at all")):
        path = file(name, content)
        with pytest.raises(ManifestError, match="gz") as caught:
            Table.of(path, ["a"])
        assert caught.value.file == path


@pytest.mark.parametrize(
    ("name", "delimiter", "encoding", "end"),
    [
        *(("t.csv", each, None, "\n") for each in (";", "\t", "|", ",", " ", ":")),
        *((name, each, None, "\n") for name, each in (("t.tsv", ","), ("t.csv.gz", ";"))),
        *(("t.csv", ";", each, "\n") for each in ("latin-1", "utf-16", "utf-16-le", "utf-8", "utf-8-sig", "mac-roman")),
        *(("t.csv.gz", ";", each, "\r\n") for each in ("cp1252", "utf-16")),
    ],
)
def test_any_delimiter_and_encoding(name, delimiter, encoding, end, file):
    content = labelled(delimiter, end).encode(encoding or "utf-8")
    path = file(name, gzip.compress(content) if name.endswith("gz") else content)
    assert_labelled(path, delimiter=delimiter, encoding=encoding)


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *(("delimiter", wrong) for wrong in ("", ";;", '"', "\n", "ä", 3)),
        *(("encoding", wrong) for wrong in ("utf-99", "", 3, "base64", "rot13")),
    ],
)
def test_what_is_no_delimiter_and_no_encoding(option, wrong):
    with pytest.raises(ConfigError, match=rf"^{option}: .* is not a (single character|text encoding of Python)"):
        ManifestSource("t.csv", {"y": "label"}, **{option: wrong})


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("pfäd", "its first line is not UTF-8; is it compressed, .* set encoding=cp1252 or"),
        ("path", "row 1, column 'label': text that is not UTF-8; set encoding=cp1252 if"),
    ],
)
def test_another_encoding_is_named(first, said, file):
    content = f"{first},label\n0.npy,a\n1.npy,Käfer\n".encode("cp1252")
    with pytest.raises(ManifestError, match=said):
        Table.of(file("t.csv", content), ["label"])
    path = file("t.csv", content.replace(b"\xe4", b"\x81"))  # nothing in cp1252
    said = r"t\.csv: is not cp1252, as encoding says; leave out encoding if it is UTF-8"
    with pytest.raises(ManifestError, match=said):
        Table.of(path, [first], text_format=TextFormat.of(None, "cp1252"))


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_text_of_any_type_in_chunks_and_slices(kind):
    kind = getattr(pa, kind)()
    column = pa.chunked_array([pa.array(["no", "x", "yy"], kind).slice(1), pa.array([], kind), pa.array(["z"], kind)])
    table = held({"a": column})
    assert table.text("a", np.array([2, 0, 0, 1])) == ["z", "x", "x", "yy"]


def test_dictionaries_that_differ_between_chunks_or_hold_nothing():
    one = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.uint8()), ["b", "a"])
    two = pa.DictionaryArray.from_arrays(pa.array([1, 0, 0], pa.uint8()), ["c", "b"])
    table = held({"a": pa.chunked_array([one, two])})
    assert table.text("a", [3, 0, 1, 4]) == ["b", "b", "a", "c"]
    nothing = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["x", None]))
    assert held({"a": nothing}).labels("a", null="drop").dropped.tolist() == [1]
    assert everything(held({"a": pa.array([5, 7, 5]).dictionary_encode()}), "a") == [5, 7, 5]
    assert everything(held({"a": pa.array([5, 5]).dictionary_encode(), "b": pa.array(["x", "x"])}), "b") == ["x", "x"]


@pytest.mark.parametrize("kind", [pa.decimal128, pa.decimal256])
@pytest.mark.parametrize(
    ("places", "texts", "values"),
    [
        (2, ["1.15", "-100.00", "0.30"], [1.15, -100.0, 0.3]),  # Arrow's own cast makes 1.1500000000000001 of the first
        (0, ["7", "-9223372036854775808", "9223372036854775807"], [7, -(2**63), 2**63 - 1]),
        (0, ["7", "-5", "9223372036854775808"], [7.0, -5.0, 2.0**63]),
        (-2, ["100", "-300", "500"], [100.0, -300.0, 500.0]),
    ],
)
def test_decimals_are_the_nearest_numbers(kind, places, texts, values):
    numbers = pa.chunked_array([pa.array([decimal.Decimal(text) for text in texts], kind(38, places))] * 2)
    found = held({"y": numbers}).labels("y").values
    assert (found.dtype, found.tolist()) == (np.array(values).dtype, values * 2)
    assert len(held({"y": numbers}, filters=[["y", "==", values[0]]])) == 2
    missing = held({"y": pa.array([None, decimal.Decimal(texts[0])], kind(38, places))})
    assert missing.labels("y", null="drop").dropped.tolist() == [0]
    lists = pa.array([[decimal.Decimal(text) for text in texts]] * 2, pa.list_(kind(38, places)))
    assert held({"y": lists}).labels("y").values.tolist() == [list(map(float, values))] * 2


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"table: .*pip install pyarrow"):
        Table.of("m.csv", ["a"])


def test_lists_of_categories_in_several_groups_of_rows(tmp_path):
    lists = pa.array([["a"], ["b", "a"], [], ["c"], ["b"]]).cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))
    pq.write_table(pa.table({"y": lists}), tmp_path / "t.parquet", row_group_size=2)
    source = ManifestSource(tmp_path / "t.parquet", {"y": "y"})
    assert source.spec["y"].classes == ("a", "b", "c")
    wanted = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert read(source, np.arange(5))["y"].tolist() == wanted


ORDER = ["low", "mid", "high", "never"]
VALUES = ["mid", "low", "high", "mid"]


def ordered_table(name, folder):
    """A column of ordered categories, one of which never occurs, as each library and format has it."""
    codes = pa.array([ORDER.index(value) for value in VALUES], pa.int8())
    dictionary = pa.DictionaryArray.from_arrays(codes, ORDER, ordered=True)
    if name == "polars Enum":
        polars = pytest.importorskip("polars")
        return polars.DataFrame({"a": polars.Series(VALUES, dtype=polars.Enum(ORDER))})
    if name == "Arrow in chunks":  # the first of which knows fewer of the categories
        first = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), ["low", "mid"], ordered=True)
        empty = pa.DictionaryArray.from_arrays(pa.array([], pa.int8()), pa.array([], pa.string()), ordered=True)
        return pa.table({"a": pa.chunked_array([first, empty, dictionary[2:]])})
    table = pa.table({"a": dictionary})
    if "pandas" in name:
        pandas = pytest.importorskip("pandas")
        table = pandas.DataFrame({"a": pandas.Categorical(VALUES, ORDER, ordered=True)})
    if name == "pandas in Parquet":
        table = pa.Table.from_pandas(table)
    if "Parquet" not in name:
        return table
    pq.write_table(table, folder / "t.parquet", row_group_size=2)
    return folder / "t.parquet"


@pytest.mark.parametrize(
    "name", ["pandas", "polars Enum", "Arrow", "Arrow in chunks", "Arrow in Parquet", "pandas in Parquet"]
)
def test_ordered_categories_are_the_classes_in_their_order(name, tmp_path):
    given = ordered_table(name, tmp_path)
    source = ManifestSource(given, {"y": "a"})
    assert source.spec["y"].classes == tuple(ORDER)
    assert source.column("y").tolist() == [1, 0, 2, 1]
    # Rows that are left out take no class with them.
    source = ManifestSource(given, {"y": "a"}, filters=[["a", "!=", "low"]])
    assert source.spec["y"].classes == tuple(ORDER)
    assert source.column("y").tolist() == [1, 2, 1]
    given_classes = {"name": "a", "classes": ["high", "mid", "low"]}
    assert ManifestSource(given, {"y": given_classes}).column("y").tolist() == [1, 2, 0, 1]


def test_lists_of_categories_of_polars():
    polars = pytest.importorskip("polars")
    lists = [["mid"], [], None, ["high", "low"]]
    for kind, classes in ((polars.Enum(ORDER), tuple(ORDER)), (polars.Categorical, ("high", "low", "mid"))):
        frame = polars.DataFrame({"a": polars.Series(lists, dtype=polars.List(kind))})
        source = ManifestSource(frame, {"y": {"name": "a", "null": "drop"}})
        assert source.spec["y"].classes == classes
        found = [{classes[place] for place in np.flatnonzero(row)} for row in read(source, [0, 1, 2])["y"]]
        assert found == [{"mid"}, set(), {"high", "low"}]


def test_categories_in_several_orders_need_classes():
    one = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), ["low", "high"], ordered=True)
    other = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), ["high", "low"], ordered=True)
    table = pa.table({"a": pa.chunked_array([one, other])})
    with pytest.raises(ManifestError, match=r"column 'a': .* several orders: \['low', 'high'\] and \['high', 'low'\]"):
        ManifestSource(table, {"y": "a"})
    source = ManifestSource(table, {"y": {"name": "a", "classes": ["high", "low"]}})
    assert source.column("y").tolist() == [1, 0, 0, 1]


def test_values_in_messages_stay_on_one_line(file):
    evil = "x\n\x1b[31mERROR\u202e" + "y" * 300
    table = held({"y": [evil, "ok"]})
    with pytest.raises(ManifestError) as caught:
        table.labels("y", classes=["ok"])
    assert str(caught.value).isprintable()
    assert "\\u202e" in str(caught.value)
    assert len(str(caught.value)) < 350
    assert quoted("a" * 198) == repr("a" * 198)
    assert len(quoted("a" * 500)) == 200
    path = file("m\n.csv", "a\nx\n")
    with pytest.raises(ManifestError) as caught:
        Table.of(path, ["b"])
    assert "\n" not in str(caught.value)
    assert printable_path("a b.csv") == "a b.csv"
