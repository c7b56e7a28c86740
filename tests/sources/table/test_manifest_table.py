"""The table behind a manifest: every format gives what Python's own readers give, or an error that names the row."""

import csv
import datetime as dt
import decimal
import gzip
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.errors import ConfigError, CorruptError, ManifestError, MissingError
from lit_async_data.sources.table.row_origin import RowOrigin, printable_path, quoted
from lit_async_data.sources.table.table import Table


@pytest.fixture
def file(tmp_path):
    """Writes bytes or text: ``file("m.csv", "a,b\\n1,2\\n")`` returns the path."""

    def written(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return written


@pytest.fixture
def parquet(tmp_path):
    def written(name="m.parquet", row_group_size=None, columns=None, **more):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({**(columns or {}), **more}), path, row_group_size, write_page_checksum=True)
        return str(path)

    return written


def everything(table, name):
    return table.array(name).to_pylist()


def held(columns, **options):
    return Table.of(pa.table(columns), list(columns), **options)


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6)
wholes = st.integers(-(2**63), 2**63 - 1)
fractions = st.floats(allow_nan=False, allow_infinity=False)
tables = st.lists(
    st.tuples(
        st.none() | words, st.none() | wholes, st.none() | fractions, words | st.sampled_from(["NA", "007", "nan"])
    ),
    min_size=1,
    max_size=12,
)
NAMES = ["text", "whole", "fraction", "more"]


def read_back(name, content, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        with open(path, "wb") as target:
            target.write(content)
        table = Table.of(path, NAMES, **options)
        return list(zip(*(everything(table, each) for each in NAMES)))


def as_csv(rows, delimiter=",", end="\n"):
    target = io.StringIO()
    writer = csv.writer(target, delimiter=delimiter, lineterminator=end)
    writer.writerows([NAMES, *rows])
    return target.getvalue().encode()


@given(tables, st.sampled_from([("m.csv", ","), ("m.tsv", "\t"), ("m.csv.gz", ",")]), st.sampled_from(["\n", "\r\n"]))
def test_csv_is_what_pythons_csv_reads(rows, kind, end):
    name, delimiter = kind
    content = as_csv(rows, delimiter, end)
    expected = list(csv.reader(io.StringIO(content.decode(), newline=""), delimiter=delimiter))[1:]
    found = read_back(name, gzip.compress(content) if name.endswith("gz") else content)
    assert [[cell or "" for cell in row] for row in found] == expected


@given(tables, st.booleans())
def test_json_lines_are_what_pythons_json_reads(rows, packed):
    content = "".join(json.dumps(dict(zip(NAMES, row))) + "\n" for row in rows).encode()
    expected = [tuple(json.loads(line).values()) for line in content.splitlines()]
    assert read_back("m.ndjson.gz" if packed else "m.jsonl", gzip.compress(content) if packed else content) == expected


@given(tables, st.booleans(), st.integers(1, 5))
def test_parquet_is_what_was_written(rows, dictionary, group):
    kinds = [pa.string(), pa.int64(), pa.float64(), pa.string()]
    given_table = pa.table({n: pa.array(v, k) for n, v, k in zip(NAMES, zip(*rows), kinds)})
    target = io.BytesIO()
    pq.write_table(given_table, target, group, use_dictionary=dictionary)
    assert read_back("m.parquet", target.getvalue()) == rows


@given(tables)
def test_frames_are_what_they_were_made_of(rows):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    kinds = {"text": "str", "whole": "Int64", "fraction": "Float64", "more": "str"}
    columns = dict(zip(NAMES, zip(*rows)))
    frame = pandas.DataFrame({n: pandas.Series(v, dtype=kinds[n]) for n, v in columns.items()}, index=range(len(rows)))
    frame.index = [7] * len(rows)
    types = [polars.String, polars.Int64, polars.Float64, polars.String]
    other = polars.DataFrame({n: polars.Series(v, dtype=t) for (n, v), t in zip(columns.items(), types)})
    for each in (frame, other, other.to_arrow()):
        table = Table.of(each, NAMES)
        assert list(zip(*(everything(table, name) for name in NAMES))) == rows


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
        (b"A,b\n1,2\n", None, "has no column 'a'; it has 'A', 'b'; if its first line is a row"),
        (b"aa ,b\n1,2\n", None, "has no column 'a'"),
        (b'a,b\n1,2\n\n"x\ny",2\n1,2,3\n', 2, r"row 2: 3 cells, but the first line has 2"),
        (b"a,b\n1,2\n3\n", 1, r"row 1: 1 cells, but the first line has 2"),
        (b"a,b\n1,2\n\xff,2\n", 1, r"row 1, column 'a': text that is not UTF-8"),
        (b"a,b\n1,2\n3\0,2\n", 1, "row 1, column 'a': a NUL byte"),
        (b'a,b\n1,2\n3,"4\n5,6\n', 1, r"row 1: a quote is never closed"),
        (b'b,a\n1,2\n3,"4""\n5,6\n', 1, r"row 1: a quote is never closed"),
        (b'b,a\n1,2"\n3,"4\n5,6\n', 1, r"row 1: a quote is never closed"),
        (b'a,b\n1,2\n"3,4\n5,6\n', 1, r"row 1: 1 cells, but the first line has 2"),
        (b'a,b\n1,2\n3,"' + b"x" * 200_000, 1, "row 1: a quote is never closed"),
        (b"\xff\xfea\x00,\x00b\x00\n\x00", None, "its first line is not UTF-8"),
    ],
)
def test_a_faulty_csv_file_is_an_error_that_names_the_row(file, content, row, message):
    path = file("m.csv", content)
    with pytest.raises(ManifestError, match=message) as caught:
        Table.of(path, ["a"])
    assert str(caught.value).startswith(path)
    assert (caught.value.file, caught.value.row) == (path, row)


def test_near_names_are_suggested(file):
    with pytest.raises(ManifestError, match="no column 'spcies'; did you mean 'species'\\?"):
        Table.of(file("m.csv", "species,path\n1,2\n"), ["spcies"])


def test_quotes_within_a_cell_and_a_last_newline_are_nothing_wrong(file):
    path = file("m.csv", 'a,b\n1,5" disk\n2,5"\n3,a"b"c"\n4,"x\n"\n')
    assert everything(Table.of(path, ["b"]), "b") == ['5" disk', '5"', 'a"b"c"', "x\n"]


def test_rows_longer_than_a_block(file, monkeypatch):
    from lit_async_data.sources.table import delimited, json_lines

    for module in (delimited, json_lines):
        monkeypatch.setattr(module, "_BLOCK", 1000)
    lines = json.dumps({"b": "x" * 5000}) + "\n" + json.dumps({"b": "3"}) + "\n"
    assert everything(Table.of(file("m.jsonl", lines), ["b"]), "b") == ["x" * 5000, "3"]
    with pytest.raises(ManifestError, match=r"cannot be read: .*; is a quote never closed\?"):
        Table.of(file("m.csv", f"a,b\n1,{'x' * 5000}\n2,3\n"), ["b"])


def test_newlines_in_cells_at_the_end_of_a_block(file, monkeypatch):
    from lit_async_data.sources.table import delimited

    monkeypatch.setattr(delimited, "_BLOCK", 100)
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
    ("cells", "values"),
    [
        (["1", " 2 ", ""], [1, 2, -100]),
        (["9223372036854775807", "-9223372036854775808"], [2**63 - 1, -(2**63)]),
        (["9007199254740993", "1"], [2**53 + 1, 1]),
        (["1", "0.5", "nan"], [1.0, 0.5, np.nan]),
        (["1e300", "9007199254740991"], [1e300, 2.0**53 - 1]),
    ],
)
def test_numbers_are_read_exactly(file, cells, values):
    table = Table.of(file("m.csv", "k,x\n" + "".join(f"-,{cell}\n" for cell in cells)), ["x"])
    found = table.labels("x", kind="number", null="ignore").values
    assert np.array_equal(found, values, equal_nan=True)
    assert found.dtype == np.array(values).dtype


@pytest.mark.parametrize(
    ("first", "cell", "message"),
    [
        *(("1", cell, "is not a number") for cell in ("x", "1,5", "0.5.1", "--1")),
        ("1", "9223372036854775808", "rounded"),
        *(("0.5", cell, "rounded") for cell in ("-9007199254740993", "+9007199254740993")),
    ],
)
def test_text_that_is_no_number_or_would_be_rounded_is_an_error(file, first, cell, message):
    path = file("m.csv", f'x\n{first}\n"{cell}"\n2\n')
    with pytest.raises(ManifestError, match=f"row 1, column 'x': .*{message}") as caught:
        Table.of(path, ["x"]).labels("x", kind="number")
    assert caught.value.row == 1


def test_what_looks_like_a_date_is_text(file):
    lines = '{"a": "2020-01-01", "b": ["2020-01-01 00:00:00"]}\n{"a": "2020-01-02", "b": []}\n'
    table = Table.of(file("m.jsonl", lines), ["a", "b"])
    assert (everything(table, "a"), everything(table, "b")) == (
        ["2020-01-01", "2020-01-02"],
        [["2020-01-01 00:00:00"], []],
    )


def test_types_of_later_lines_and_keys_that_come_late(file, monkeypatch):
    from lit_async_data.sources.table import json_lines

    monkeypatch.setattr(json_lines, "_BLOCK", 200)
    lines = ['{"a": 1, "d": "2020-01-01"}'] * 40 + ['{"a": 2.5, "b": "x", "d": "2020-01-02"}', '{"a": null, "b": "y"}']
    table = Table.of(file("m.jsonl", "\n".join(lines)), ["a", "b", "d"])
    assert everything(table, "a") == [1.0] * 40 + [2.5, None]
    assert everything(table, "b") == [None] * 40 + ["x", "y"]
    assert everything(table, "d") == ["2020-01-01"] * 40 + ["2020-01-02", None]


@pytest.mark.parametrize(
    ("lines", "row", "message"),
    [
        (b"", None, "is empty"),
        (b"\n\n", None, "has no column 'a'|is empty"),
        (b'{"b": 1}\n', None, "has no column 'a'; it has 'b'"),
        (b'{"a": 1}\n\n{"a": "x"}\n', 1, r"row 1, column 'a': 'x' is text, but row 0 has a number"),
        (b'{"a": 1}\n{"a": true}\n', 1, "True is true or false, but row 0 has a number"),
        (b'{"a": 1}\n{"a": [1]}\n', 1, "a list, but row 0 has a number"),
        (b'{"a": 1}\n{"a": {}}\n', 1, "an object, but row 0 has a number"),
        (b'{"a": 1}\n[1]\n', 1, r"row 1: \[1\] is not a JSON object"),
        (b'{"a": 1}\n{"a": 2\n', 1, r"row 1: not valid JSON"),
        (b'{"a": 1, "a": 2}\n', 0, r"row 0: not valid JSON in UTF-8: 'a key occurs twice'"),
        (b'{"a": "\xff"}\n', 0, "row 0, column 'a': text that is not UTF-8"),
        (b'{"a": "x"}\n{"a": "\\u0000"}\n', 1, "row 1, column 'a': a NUL byte"),
        (b'{"a": "\\ud800"}\n', None, "column 'a': cannot be read"),
        (b'{"a": 1}\n{"a": 18446744073709551615}\n', None, "column 'a': .*; write large whole numbers as text"),
        (
            b'{"a": 9007199254740993}\n{"a": 0.5}\n',
            None,
            "column 'a': .* 9007199254740993 .*; write large whole numbers",
        ),
        (b'{"a": [0.5]}\n{"a": [9007199254740993]}\n', None, "column 'a': .* 9007199254740993 .*; write large"),
    ],
)
def test_faulty_json_lines_are_an_error_that_names_the_row(file, lines, row, message):
    path = file("m.jsonl", lines)
    with pytest.raises(ManifestError, match=message) as caught:
        Table.of(path, ["a"])
    assert (caught.value.file, caught.value.row) == (path, row)


def test_a_folder_and_a_pattern_are_read_in_the_order_of_paths(parquet, tmp_path):
    parquet("in/b.parquet", a=["3", "4"], c=[1, 2])
    parquet("in/a.parquet", a=["0", "1", "2"])
    parquet("in/deep/x.parquet", a=["5"])
    parquet("in/_old.parquet", a=["no"])
    parquet("in/.hidden.parquet", a=["no"])
    table = Table.of(tmp_path / "in", ["a"])
    assert everything(table, "a") == list("012345")
    assert table.origin.place(4) == (str(tmp_path / "in/b.parquet"), 1)
    assert everything(Table.of(str(tmp_path / "in/[ab].parquet"), ["a"]), "a") == list("01234")


def test_a_name_with_magic_characters_is_that_file(file):
    assert everything(Table.of(file("m[1].csv", "a\nx\n"), ["a"]), "a") == ["x"]


def test_files_of_different_types_are_an_error_that_names_both(parquet, tmp_path):
    one, two = parquet("in/a.parquet", a=["x"]), parquet("in/b.parquet", a=[1])
    with pytest.raises(ManifestError, match=r"column 'a': is string in .*, but int64 in ") as caught:
        Table.of(tmp_path / "in", ["a"])
    assert one in str(caught.value)
    assert two in str(caught.value)
    parquet("in/a.parquet", c=["x"])
    with pytest.raises(ManifestError, match=r"b.parquet: has no column 'c'"):
        Table.of(tmp_path / "in", ["c"])


def test_a_file_without_any_value_fits_every_type(parquet, tmp_path):
    parquet("in/a.parquet", a=pa.nulls(2))
    parquet("in/b.parquet", a=[1])
    parquet("in/c.parquet", a=pa.nulls(1))
    assert everything(Table.of(tmp_path / "in", ["a"]), "a") == [None, None, 1, None]


def test_a_file_that_is_none_or_is_damaged(file, parquet):
    with pytest.raises(ManifestError, match="is not a readable Parquet file"):
        Table.of(file("m.parquet", b"PAR1 nothing"), ["a"])
    path = parquet(a=np.arange(1000))
    with open(path, "r+b") as target:
        target.seek(200)
        target.write(b"\xa5" * 20)
    with pytest.raises(CorruptError, match=r"m.parquet: does not decode"):
        Table.of(path, ["a"])

    # A changed value decodes, but does not fit the checksum.
    pq.write_table(
        pa.table({"a": np.arange(1000)}), path, use_dictionary=False, compression="none", write_page_checksum=True
    )
    content = Path(path).read_bytes()
    at = content.index(np.int64(500).tobytes())
    Path(path).write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    with pytest.raises(CorruptError, match=r"m.parquet: does not decode"):
        Table.of(path, ["a"])


@pytest.mark.parametrize(
    ("given_path", "message"),
    [
        ("none.csv", "no such file"),
        ("n*.csv", "matches no file"),
        (".", r"no \.parquet .* by from_folder, or data=f"),
    ],
)
def test_missing_files(tmp_path, given_path, message):
    with pytest.raises(MissingError, match=message):
        Table.of(str(tmp_path / given_path), ["a"])


class Stream:
    """Nothing but the protocol."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def test_whatever_streams_arrow_is_a_table():
    chunks = pa.chunked_array([["x"], [], ["y", None]])
    table = Table.of(Stream(pa.table({"b": [1, 2, 3], "a": chunks})), ["a"])
    assert everything(table, "a") == ["x", "y", None]
    with pytest.raises(ManifestError, match="the table given: has no column 'c'"):
        Table.of(Stream(pa.table({"b": [1]})), ["c"])


@pytest.mark.parametrize(
    ("thing", "advice"), [(3, ""), ({"a": [1]}, ""), (None, ""), (["a.csv"], r".*a pattern, .* or .* ConcatSource\(\[")]
)
def test_what_is_no_table(thing, advice):
    with pytest.raises(ConfigError, match=f"table: {type(thing).__name__} is neither{advice}"):
        Table.of(thing, ["a"])


def test_frames_that_are_no_table():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    with pytest.raises(ConfigError, match=r"table: a LazyFrame .*\.collect\(\)"):
        Table.of(polars.DataFrame({"a": [1]}).lazy(), ["a"])
    with pytest.raises(ManifestError, match="more than one column 'a'"):
        Table.of(pandas.DataFrame([[1, 2]], columns=["a", "a"]), ["a"])
    with pytest.raises(ManifestError, match="no column 'a'; it has 0, 1"):
        Table.of(pandas.DataFrame([[1, 2]]), ["a"])
    with pytest.raises(ManifestError, match="cannot be converted to Arrow"):
        Table.of(pandas.DataFrame({"a": [1, "x"]}, dtype=object), ["a"])
    with pytest.raises(ManifestError, match="has no rows"):
        Table.of(pandas.DataFrame({"a": []}), ["a"])


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


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("raw", "message"), [(b"\xff", "not UTF-8"), (b"a\0", "a NUL byte")])
def test_text_from_memory_is_checked_too(raw, message, encoded, listed):
    values = pa.array([b"x"] * 6 + [raw] + [b"x"] * 3)
    text = pa.Array.from_buffers(pa.string(), 10, values.buffers())
    if encoded:
        codes = pa.array([0] * 6 + [1] + [0] * 3)
        text = pa.DictionaryArray.from_arrays(codes, text.slice(5, 2))
    if listed:
        text = pa.ListArray.from_arrays(list(range(11)), text)
    with pytest.raises(ManifestError, match=f"row 6, column 'a': .*{message}"):
        held({"a": text})
    # What lies beside a slice or is not in use is none of the table's.
    held({"a": text.slice(0, 6)})


def test_text_comes_as_asked():
    table = held({"a": ["x", "ü", None], "n": [1, 2, 3], "f": [0.5, 1, 2]})
    assert table.text("a", []) == []
    assert table.text("n", [2, 0]) == ["3", "1"]
    with pytest.raises(ManifestError, match="the table given, row 2, column 'a': no value"):
        table.text("a", [1, 2])
    with pytest.raises(ManifestError, match="column 'f': holds double"):
        table.text("f", [0])
    for row in (-1, 3):
        with pytest.raises(IndexError, match="the table given has the rows 0 to 2"):
            table.text("a", [0, row])


CELLS = [("a", 1), ("b", 2), (None, 3), ("a", None), ("c", 5), ("7", -6)]
OPERATIONS = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
}


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


def test_filters_over_several_files_keep_the_rows_of_each(parquet, tmp_path):
    for number, name in enumerate("abc"):
        parquet(f"in/{name}.parquet", a=[f"{name}{row}" for row in range(10)], n=[number * row for row in range(10)])
    table = Table.of(tmp_path / "in", ["a"], filters=[["n", ">", 8]])
    assert everything(table, "a") == ["b9", "c5", "c6", "c7", "c8", "c9"]
    assert [table.origin.place(row)[1] for row in range(6)] == [9, 5, 6, 7, 8, 9]
    with pytest.raises(ManifestError, match=r"c.parquet, row 6, column 'a': 'c6' is not a number") as caught:
        Table.of(tmp_path / "in", ["a"], filters=[["n", ">", 11]]).labels("a", kind="number")
    assert (caught.value.file, caught.value.row) == (str(tmp_path / "in/c.parquet"), 6)


def test_filters_compare_whole_numbers_exactly():
    table = held({"n": [2**53, 2**53 + 1, 5]}, filters=[["n", "==", 2**53 + 1]])
    assert everything(table, "n") == [2**53 + 1]
    assert everything(held({"n": [5, 6]}, filters=[["n", ">", 5.5]]), "n") == [6]


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ("n > 5", "filters: 'n > 5' is not a list of"),
        (["n", ">", 5], r"filters: \['n', '>', 5\] is not a list of"),
        ([["n", ">"]], r"is not a list of \[column, operator, value\]"),
        ([[1, ">", 5]], r"is not \[column, operator, value\]"),
        ([["n", "=", 5]], r"filters: \['n', '=', 5\] is not .*; operators are ==, !=, <"),
        ([["n", "in", 5]], "'in' needs a list of values, not 5"),
        ([["n", "in", []]], "'in' needs a list of values"),
        ([["n", "in", "ab"]], "'in' needs a list of values"),
        ([["n", "==", None]], "None cannot be compared with"),
        ([["n", "==", float("nan")]], "nan cannot be compared with"),
        ([["n", "==", [5]]], "cannot be compared with"),
        ([["n", "not in", [5, None]]], "cannot be compared with"),
        ([["n", "==", "x"]], "column 'n' holds int64, which cannot be compared by == 'x'"),
        ([["n", "==", True]], "column 'n' holds int64, which cannot be compared by == True"),
        ([["n", "==", 2**70]], "column 'n' holds int64, which cannot be compared by == "),
        ([["b", "==", 1]], "column 'b' holds bool"),
    ],
)
def test_filters_that_are_none(filters, message):
    with pytest.raises(ConfigError, match=message):
        Table.of(pa.table({"n": [1, 2], "b": [True, False]}), ["n"], filters=filters)


def test_a_filter_on_a_missing_column_or_on_text_that_is_no_number(file):
    path = file("m.csv", "a,q\nx,1\ny,?\n")
    with pytest.raises(ManifestError, match="no column 'p'"):
        Table.of(path, ["a"], filters=[["p", ">", 1]])
    with pytest.raises(ManifestError, match=r"row 1, column 'q': '\?' is not a number"):
        Table.of(path, ["a"], filters=[["q", ">", 1]])
    assert everything(held({"b": [True, False]}, filters=[["b", "==", True]]), "b") == [True]


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_whole_numbers_become_int64(kind):
    values, classes, dropped, *_ = held({"y": pa.array([3, 0, 100], getattr(pa, kind)())}).labels("y")
    assert (values.tolist(), values.dtype, classes, dropped.tolist()) == ([3, 0, 100], np.int64, (), [])
    assert values.flags.writeable


def test_whole_numbers_with_nulls_never_go_through_floats():
    table = held({"y": [2**53 + 1, None, 2**63 - 1]})
    assert table.labels("y", null="ignore").values.tolist() == [2**53 + 1, -100, 2**63 - 1]
    dropped = table.labels("y", null="drop")
    assert (dropped.values[[0, 2]].tolist(), dropped.dropped.tolist()) == ([2**53 + 1, 2**63 - 1], [1])
    small = held({"y": pa.array([200, None], pa.uint8())}).labels("y", null="ignore")
    assert small.values.tolist() == [200, -100]


def test_a_number_beyond_int64_is_an_error():
    assert held({"y": pa.array([2**63 - 1], pa.uint64())}).labels("y").values.tolist() == [2**63 - 1]
    with pytest.raises(ManifestError, match=f"row 2, column 'y': {2**63} does not fit into int64"):
        held({"y": pa.array([1, None, 2**63], pa.uint64())}).labels("y", null="ignore")


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_fractions_stay_as_stored_and_nan_is_no_value(kind):
    table = held({"y": pa.array([np.float16(0.5), None, np.float16("nan"), np.float16(2)], getattr(pa, kind)())})
    labels = table.labels("y", null="ignore")
    assert labels.values.dtype == kind
    assert np.array_equal(labels.values, [0.5, np.nan, np.nan, 2], equal_nan=True)
    assert table.labels("y", null="drop").dropped.tolist() == [1, 2]
    with pytest.raises(ManifestError, match="no value in row 1, row 2; give one"):
        table.labels("y")


def test_rows_without_a_value_are_named():
    table = held({"y": [None, 1, *[None] * 9], "f": list(range(11))}, filters=[["f", ">", 0]])
    with pytest.raises(ManifestError, match=r"no value in row 2, row 3, row 4, row 5, row 6, … \(9 in all\)") as caught:
        table.labels("y")
    assert caught.value.row == 2


def test_true_and_false_stay():
    table = held({"y": [True, False], "n": [True, None]})
    assert table.labels("y", null="ignore").values.dtype == np.bool_
    assert table.labels("y").values.tolist() == [True, False]
    assert table.labels("n", null="drop").dropped.tolist() == [1]
    with pytest.raises(ManifestError, match="row 1, column 'n': null: bool has no value for ignore"):
        table.labels("n", null="ignore")


@pytest.mark.parametrize("encoded", [False, True])
def test_text_becomes_classes(encoded):
    column = pa.array(["no", "owl", "auk", None, "owl", "Ärger"])
    column = (column.dictionary_encode() if encoded else column).slice(1)
    table = held({"y": column})
    labels = table.labels("y", null="ignore")
    assert (labels.values.tolist(), labels.classes) == ([1, 0, -100, 1, 2], ("auk", "owl", "Ärger"))
    assert labels.values.dtype == np.int64
    again = table.labels("y", null="drop", classes=["owl", "emu", "Ärger", "auk"])
    assert (again.values[[0, 1, 3, 4]].tolist(), again.dropped.tolist()) == ([0, 3, 0, 2], [2])
    assert again.classes == ("owl", "emu", "Ärger", "auk")
    with pytest.raises(ManifestError, match="row 1, column 'y': 'auk' is not one of the classes owl, Ärger"):
        table.labels("y", null="ignore", classes=["owl", "Ärger"])


@pytest.mark.parametrize("shape", ["list", "large_list", "fixed"])
def test_lists_of_one_length_are_vectors(shape):
    kinds = {
        "list": pa.list_(pa.float32()),
        "large_list": pa.large_list(pa.float32()),
        "fixed": pa.list_(pa.float32(), 2),
    }
    table = held({"y": pa.array([[9, 9], [1, 2], None, [3, None]], kinds[shape]).slice(1)})
    labels = table.labels("y", null="ignore")
    assert labels.values.dtype == np.float32
    assert np.array_equal(labels.values, [[1, 2], [np.nan, np.nan], [3, np.nan]], equal_nan=True)
    assert table.labels("y", null="drop").dropped.tolist() == [1, 2]
    with pytest.raises(ManifestError, match="no value in row 1, row 2"):
        table.labels("y")


def test_vectors_of_whole_numbers_and_bools():
    table = held({"y": [[1, 2**53 + 1], None, [None, 4]], "b": [[True], [False], [True]]})
    assert table.labels("y", null="ignore").values.tolist() == [[1, 2**53 + 1], [-100, -100], [-100, 4]]
    assert table.labels("b").values.tolist() == [[True], [False], [True]]


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


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([None, [1, 2], [1, 2], [1], [2]], "row 3, column 'y': a list of 1, but row 1 has 2"),
        ([[], []], "row 0, column 'y': an empty list"),
        (pa.array([None, None], pa.list_(pa.int8())), "no row has a value"),
        (pa.nulls(2), "no row has a value"),
        (pa.array([[1], None, [2**63]], pa.list_(pa.uint64())), f"row 2, column 'y': {2**63} does not fit"),
        ([[[1]], [[2]]], "column 'y': holds list"),
        ([dt.date(2020, 1, 1)], "column 'y': holds date32"),
        ([dt.datetime(2020, 1, 1, tzinfo=dt.UTC)], "column 'y': holds timestamp"),
        ([{"a": 1}], "column 'y': holds struct"),
        ([b"x"], "column 'y': holds binary"),
    ],
)
def test_what_is_no_label(column, message):
    with pytest.raises(ManifestError, match=message):
        held({"y": column}).labels("y", null="drop")


def test_several_classes_a_row():
    lists = [["no"], ["b", "a", "b"], [], None, ["c"], ["a", None]]
    for kind in (
        pa.list_(pa.string()),
        pa.large_list(pa.large_string()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
    ):
        table = held({"y": pa.array(lists, kind).slice(1)})
        labels = table.labels("y", null="drop")
        assert (labels.values.dtype, labels.classes, labels.dropped.tolist()) == (np.uint8, ("a", "b", "c"), [2, 4])
        assert labels.values[[0, 1, 3]].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
        ignored = table.labels("y", null="ignore", classes=["c", "a", "b"])
        assert ignored.values.dtype == np.float32
        assert ignored.values[[0, 1, 3]].tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 0]]
        assert np.isnan(ignored.values[[2, 4]]).all()
        with pytest.raises(ManifestError, match="row 3, column 'y': 'c' is not one of the classes a, b"):
            table.labels("y", null="ignore", classes=["a", "b"])
        with pytest.raises(ManifestError, match="no value in row 2, row 4"):
            table.labels("y")
    assert held({"y": [["a"], []]}).labels("y", null="ignore").values.dtype == np.float32
    with pytest.raises(ManifestError, match="row 1, column 'y': 'z' is not one of"):
        held({"y": [["a", "a"], ["z"]]}).labels("y", classes=["a"])


def test_several_columns_side_by_side():
    table = held({"a": [1, None, 3], "b": [4, 5, None], "f": [0.5, None, 2], "c": [True, False, True], "t": ["x"] * 3})
    assert table.labels(["b", "a"], null="ignore").values.tolist() == [[4, 1], [5, -100], [-100, 3]]
    assert table.labels(["a", "b"], null="drop").dropped.tolist() == [1, 2]
    mixed = table.labels(["a", "f"], null="ignore").values
    assert mixed.dtype == np.float64
    assert np.array_equal(mixed, [[1, 0.5], [np.nan, np.nan], [3, 2]], equal_nan=True)
    with pytest.raises(ManifestError, match="row 2, column 'b': no value; give"):
        table.labels(["b", "a"])
    for names in (["a", "t"], ["a", "c"]):
        with pytest.raises(ConfigError, match="name: ") as caught:
            table.labels(names, null="ignore")
        assert caught.value.option == "name"
    large = held({"a": [1, -(2**53)], "f": [0.5, 1]})
    with pytest.raises(ManifestError, match="row 1, column 'a': -9007199254740992 would be rounded"):
        large.labels(["f", "a"])


def test_ids_must_be_different():
    table = held(
        {"a": ["x", "y", "z", "w"], "b": [1, 2, 1, 1], "c": list("xyxx"), "n": ["x", None, "y", "z"], "f": [0.5] * 4}
    )
    table.check_ids("a")
    for name, value in (("b", "1"), ("c", "'x'")):
        message = f"{value} in row 2 and row 0; give each row"
        with pytest.raises(ManifestError, match=message) as caught:
            table.check_ids(name)
        assert caught.value.row == 2
    with pytest.raises(ManifestError, match="row 1, column 'n': no id"):
        table.check_ids("n")
    with pytest.raises(ManifestError, match="column 'f': holds double; give text"):
        table.check_ids("f")
    with pytest.raises(ManifestError, match=r"'4' in row 9 and row 8, … \(7 ids in all\)"):
        held({"a": [str(row // 2) for row in range(14)]}).check_ids("a")


def test_values_in_messages_stay_on_one_line(file, tmp_path):
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


def test_an_origin_of_several_files_names_them():
    origin = RowOrigin(["a.csv", "b.csv", "c.csv"], np.array([0, 2, 2, 5]))
    assert [origin.place(row) for row in (1, 2, 4)] == [("a.csv", 1), ("c.csv", 0), ("c.csv", 2)]
    assert origin.name == "a.csv and 2 more"
    assert origin.where(3) == "row 1 of c.csv"


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"table: .*pip install pyarrow"):
        Table.of("m.csv", ["a"])
