"""Filters keep the rows that Python would keep."""

import json
from operator import eq, ge, gt, le, lt, ne

import pyarrow as pa
import pytest
from support.sources.tables import everything, held

from lit_async_data import ManifestSource
from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.sources.table.table import Table

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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "memory", "categories"])
def test_text_is_no_number_where_a_table_knows_its_types(file, parquet, suffix):
    given_table = {
        "jsonl": lambda: file("m.jsonl", "".join(json.dumps({"t": t}) + "\n" for t in ("003", "3", "10"))),
        "parquet": lambda: parquet(t=["003", "3", "10"]),
        "memory": lambda: pa.table({"t": ["003", "3", "10"]}),
        "categories": lambda: pa.table({"t": pa.array(["003", "3", "10"]).dictionary_encode()}),
    }[suffix]()
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
    path = file("m.csv", "a,quality\nx,1\ny,?\n")
    with pytest.raises(ManifestError, match="no column 'qualty'; did you mean 'quality'\\?"):
        Table.of(path, ["a"], filters=[["qualty", ">", 1]])
    with pytest.raises(ManifestError, match=r"row 1, column 'quality': '\?' is not a number"):
        Table.of(path, ["a"], filters=[["quality", ">", 1]])
    assert everything(held({"b": [True, False]}, filters=[["b", "==", True]]), "b") == [True]


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
