"""Columns of a table as asked for, ids, and columns that are read later."""

import os

import numpy as np
import pyarrow as pa
import pytest
from support.sources.tables import everything, held

from lit_async_data.errors import ChangedError, ManifestError
from lit_async_data.sources.table.table import TableReader


def test_text_comes_as_asked():
    table = held({"a": ["x", "ü", None], "n": [1, 2, 3], "f": [0.5, 1, 2]})
    assert table.text("a", []) == []
    assert table.text("n", [2, 0]) == ["3", "1"]
    with pytest.raises(ManifestError, match="the table given, row 2, column 'a': no value"):
        table.text("a", [1, 2])
    with pytest.raises(ManifestError, match="column 'f': holds double"):
        table.text("f", [0])


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
    with pytest.raises(ManifestError, match=r"7 ids occur more than once, as '0' in row 1 and row 0"):
        held({"a": [str(row // 2) for row in range(14)]}).check_ids("a")


def test_columns_that_are_read_later_leave_out_the_same_rows(file):
    reader = TableReader(file("t.csv", "y,site\n1,a\n2,b\n3,c\n4,d\n"), [["y", "!=", 2]])
    assert everything(reader.columns(["y"]), "y") == ["1", "3", "4"]
    reader.select(np.array([0, 2]))
    assert everything(reader.columns(["site"]), "site") == ["a", "d"]
    reader.select(np.array([1]))
    assert everything(reader.columns(["site"]), "site") == ["d"]


def test_a_table_that_was_written_to_is_not_read_again(file):
    path = file("t.csv", "y,site\n1,a\n2,b\n")
    reader = TableReader(path, None)
    reader.columns(["y"])
    reader.columns(["site"])
    file("t.csv", "y,site\n2,b\n1,a\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ChangedError, match=r"t\.csv: changed since the source was built"):
        reader.columns(["site"])


def test_a_table_that_can_be_read_once_is_held():
    table = pa.table({"y": [1, 2], "site": ["a", "b"]})
    reader = TableReader(pa.RecordBatchReader.from_batches(table.schema, table.to_batches()), None)
    assert [everything(reader.columns([name]), name) for name in table.column_names] == [[1, 2], ["a", "b"]]
