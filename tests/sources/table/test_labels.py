"""Labels: one value per row, from columns of numbers, text or lists."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
from support.sources.tables import held

from lit_async_data import ManifestSource
from lit_async_data.errors import ConfigError, ManifestError


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


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2)], ids=str
)
def test_lists_of_one_length_are_vectors(kind):
    table = held({"y": pa.array([[9, 9], [1, 2], None, [3, None]], kind).slice(1)})
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
    text, categories = pa.string(), pa.dictionary(pa.int8(), pa.string())
    for kind in (pa.list_(text), pa.large_list(pa.large_string()), pa.list_(categories)):
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


def test_whole_numbers_are_sorted_as_numbers():
    assert held({"y": ["10", "2", "-1"]}).labels("y").classes == ("-1", "2", "10")
    assert held({"y": ["10", "2", "x"]}).labels("y").classes == ("10", "2", "x")


def test_zero_is_for_several_classes_only():
    for cells, kind in ((["a", ""], "class"), ([1, None], None), (["1.5", ""], "number")):
        with pytest.raises(ConfigError, match=r"^fields\.y\.null: zero is for several classes") as caught:
            ManifestSource(pa.table({"tags": cells}), {"y": {"name": "tags", "null": "zero", "kind": kind}})
        assert caught.value.option == "fields.y.null"


def test_so_many_different_texts_are_no_classes(tmp_path):
    table = pa.table({"p": [f"a/{number}" for number in range(2**16 + 1)]})
    with pytest.raises(ConfigError, match=r"fields.y.classes: 65537 distinct texts, which seem to be ids or paths"):
        ManifestSource(table, {"y": "p"})
