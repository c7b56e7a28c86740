"""CSV, TSV and JSON lines: what Python's own readers give, or an error that names the row."""

import codecs
import csv
import decimal
import gzip
import io
import json
import sys
from pathlib import Path

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
from lit_async_data.sources.table.formats import TextFormat
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
def test_marks_line_ends_quotes_and_newlines_in_cells(file, mark, end):
    lines = [b'"a",b', b'"x ""y""\n,z",1', b"", b'5" disk,2', b'a"b"c",3', b'"x\n",4', b""]
    table = Table.of(file("m.csv", mark + end.join(lines)), ["a"])
    assert everything(table, "a") == ['x "y"\n,z', '5" disk', 'a"b"c"', "x\n"]


@pytest.mark.parametrize(
    ("content", "row", "message"),
    [
        (b"", None, "is empty; its first line must name the columns"),
        (b"a,b\n", None, "has no rows"),
        (b"a,b,a\n1,2,3\n", None, "has more than one column 'a'"),
        (b'a,b\n1,2\n\n"x\ny",2\n1,2,3\n', 2, r"row 2: 3 cells, but the first line has 2"),
        (b"a,b\n1,2\n3\n", 1, r"row 1: 1 cells, but the first line has 2"),
        (b"a,b\n1,2\n\xff,2\n", 1, r"row 1, column 'a': text that is not UTF-8"),
        (b'a,b\n1,2\n3,"4\n5,6\n', 1, r"row 1: a quote is never closed"),
        (b'b,a\n1,2"\n3,"4\n5,6\n', 1, r"row 1: a quote is never closed"),
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
    [("delimiter", ";;"), ("delimiter", '"'), ("delimiter", "ä"), ("encoding", "utf-99"), ("encoding", "base64")],
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


ORDER = ["low", "mid", "high", "never"]
VALUES = ["mid", "low", "high", "mid"]


def ordered_table(name, folder):
    """A column of ordered categories, one of which never occurs, as each library and format has it."""
    if name == "polars Enum":
        polars = pytest.importorskip("polars")
        return polars.DataFrame({"a": polars.Series(VALUES, dtype=polars.Enum(ORDER))})
    if name == "Arrow in chunks":  # the first of which knows fewer of the categories
        first, empty, last = (
            pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array(names, pa.string()), ordered=True)
            for codes, names in (([1, 0], ["low", "mid"]), ([], []), ([2, 1], ORDER))
        )
        return pa.table({"a": pa.chunked_array([first, empty, last])})
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": pandas.Categorical(VALUES, ORDER, ordered=True)})
    if name == "pandas":
        return frame
    pq.write_table(pa.Table.from_pandas(frame), folder / "t.parquet", row_group_size=2)
    return folder / "t.parquet"


@pytest.mark.parametrize("name", ["pandas", "polars Enum", "Arrow in chunks", "pandas in Parquet"])
def test_ordered_categories_are_the_classes_in_their_order(name, tmp_path):
    given = ordered_table(name, tmp_path)
    source = ManifestSource(given, {"y": "a"})
    assert (source.spec["y"].classes, source.column("y").tolist()) == (tuple(ORDER), [1, 0, 2, 1])
    # Rows that are left out take no class with them.
    source = ManifestSource(given, {"y": "a"}, filters=[["a", "!=", "low"]])
    assert (source.spec["y"].classes, source.column("y").tolist()) == (tuple(ORDER), [1, 2, 1])
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
    with pytest.raises(ManifestError) as caught:
        held({"y": ["x\n\x1b[31mERROR\u202e" + "y" * 300, "ok"]}).labels("y", classes=["ok"])
    assert str(caught.value).isprintable()
    assert "\\u202e" in str(caught.value)
    assert len(str(caught.value)) < 350
    with pytest.raises(ManifestError) as caught:
        Table.of(file("m\n.csv", "a\nx\n"), ["b"])
    assert "\n" not in str(caught.value)


@given(tables, st.booleans())
def test_json_lines_are_what_pythons_json_reads(rows, packed):
    content = "".join(json.dumps(dict(zip(NAMES, row))) + "\n" for row in rows).encode()
    expected = [tuple(json.loads(line).values()) for line in content.splitlines()]
    assert read_back("m.ndjson.gz" if packed else "m.jsonl", gzip.compress(content) if packed else content) == expected


def test_a_byte_order_mark_types_of_later_lines_and_keys_that_come_late(file):
    lines = ['{"a": 1, "d": "2020-01-01"}'] * 40 + ['{"a": 2.5, "b": "x", "d": "2020-01-02"}', '{"a": null, "b": "y"}']
    table = Table.of(file("m.jsonl", codecs.BOM_UTF8 + "\n".join(lines).encode()), ["a", "b", "d"])
    assert everything(table, "a") == [1.0] * 40 + [2.5, None]
    assert everything(table, "b") == [None] * 40 + ["x", "y"]
    assert everything(table, "d") == ["2020-01-01"] * 40 + ["2020-01-02", None]


@pytest.mark.parametrize(
    ("lines", "row", "message"),
    [
        (b"", None, "is empty"),
        (b'{"b": 1}\n', None, "has no column 'a'; it has 'b'"),
        (b'[{"a": 1}]', 0, r"the file is a JSON array, .* pandas\.read_json"),
        (b'{"a": 1}\n\n{"a": "x"}\n', 1, r"row 1, column 'a': 'x' is text, but row 0 has a number"),
        (b'{"a": 1}\n{"a": {}}\n', 1, "an object, but row 0 has a number"),
        (b'{"a": 1}\n[1]\n', 1, r"row 1: \[1\] is not a JSON object"),
        (b'{"a": 1}\n{"a": 2\n', 1, r"row 1: not valid JSON"),
        (b'{"a": 1, "a": 2}\n', 0, r"row 0: not valid JSON in UTF-8: 'a key occurs twice'"),
        (b'{"a": "\xff"}\n', 0, "row 0: not valid JSON in UTF-8: .* correct it, or save the file as UTF-8"),
        (b'{"a": ["x"]}\n{"a": ["x", "\\udfff"]}\n', 1, "row 1, column 'a': half of a surrogate pair"),
        (b'{"a": 1}\n{"a": 18446744073709551615}\n', None, "column 'a': .*; write large whole numbers as text"),
        (b'{"a": [0.5]}\n{"a": [9007199254740993]}\n', None, "column 'a': .* 9007199254740993 .*; write large"),
    ],
)
def test_faulty_json_lines_are_an_error_that_names_the_row(file, lines, row, message):
    path = file("m.jsonl", lines)
    with pytest.raises(ManifestError, match=message) as caught:
        Table.of(path, ["a"])
    assert (caught.value.file, caught.value.row) == (path, row)


@pytest.mark.parametrize(
    "values",
    [[r"\ud83d", "a\udcff"], [Path("x"), Path("a\udcff")], [np.array(["x"]), np.array([*["x"] * 1500, "a\udcff"])]],
    ids=ascii,
)
def test_text_of_a_data_frame_that_is_not_utf8_is_named(values):
    frame = pytest.importorskip("pandas").DataFrame({"b": [1, 2], "a": values}, dtype=object)
    with pytest.raises(ManifestError, match="the table given, row 1, column 'a': text that is not UTF-8"):
        Table.of(frame, ["b", "a"])
