"""JSON lines: what Python's own reader gives, or an error that names the row."""

import codecs
import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.tables import LABELS, NAMES, assert_labelled, everything, read_back, tables

from lit_async_data.errors import ManifestError
from lit_async_data.sources.table.table import Table


@given(tables, st.booleans())
def test_json_lines_are_what_pythons_json_reads(rows, packed):
    content = "".join(json.dumps(dict(zip(NAMES, row))) + "\n" for row in rows).encode()
    expected = [tuple(json.loads(line).values()) for line in content.splitlines()]
    assert read_back("m.ndjson.gz" if packed else "m.jsonl", gzip.compress(content) if packed else content) == expected


def test_types_of_later_lines_and_keys_that_come_late(file):
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
        (b'{"a": "\xff"}\n', 0, "row 0: not valid JSON in UTF-8: .* correct it, or save the file as UTF-8"),
        (b'{"a": "x"}\n{"a": "\\ud800"}\n', 1, "row 1, column 'a': half of a surrogate pair"),
        (b'{"a": ["x"]}\n{"a": ["x", "\\udfff"]}\n', 1, "row 1, column 'a': half of a surrogate pair"),
        (b'{"a": 1}\n{"a": 18446744073709551615}\n', None, "column 'a': .*; write large whole numbers as text"),
        (b'{"a": 9007199254740993}\n{"a": 0.5}\n', None, "column 'a': .* 9007199254740993 .*; write large whole"),
        (b'{"a": [0.5]}\n{"a": [9007199254740993]}\n', None, "column 'a': .* 9007199254740993 .*; write large"),
    ],
)
def test_faulty_json_lines_are_an_error_that_names_the_row(file, lines, row, message):
    path = file("m.jsonl", lines)
    with pytest.raises(ManifestError, match=message) as caught:
        Table.of(path, ["a"])
    assert (caught.value.file, caught.value.row) == (path, row)


def test_a_byte_order_mark_is_no_part_of_a_line(file):
    for mark in (b"", codecs.BOM_UTF8):
        assert everything(Table.of(file("m.jsonl", mark + b'{"a": "x"}\n{"a": "y"}\n'), ["a"]), "a") == ["x", "y"]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_in_json_lines_is_named(indent, file):
    rows = [{"label": label, "number": number} for number, label in enumerate(LABELS)]
    path = file("t.jsonl", json.dumps(rows, indent=indent))
    with pytest.raises(ManifestError, match=r"row 0: the file is a JSON array, .* pandas\.read_json") as caught:
        Table.of(path, ["label"])
    assert caught.value.file == path
    assert_labelled(pd.read_json(path))


@pytest.mark.parametrize(
    "values",
    [
        ["x", "a\udcff"],
        [["x"], ["x", "a\udcff"]],
        [Path("x"), Path("a\udcff")],
        [r"\ud83d", "a\udcff"],
        [np.array(["x"]), np.array([*["x"] * 1500, "a\udcff", *["x"] * 1500])],
    ],
    ids=ascii,
)
def test_text_of_a_data_frame_that_is_not_utf8_is_named(values):
    with pytest.raises(ManifestError, match="the table given, row 1, column 'a': text that is not UTF-8"):
        Table.of(pd.DataFrame({"b": [1, 2], "a": pd.Series(values, dtype=object)}), ["b", "a"])
