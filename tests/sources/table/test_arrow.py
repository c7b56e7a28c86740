"""Columns of every type of Arrow as single arrays of few types."""

import decimal
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sources.oracle import read
from support.sources.tables import everything, held

from lit_async_data import ManifestSource
from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.sources.table.table import Table


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
