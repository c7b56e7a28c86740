"""Labels: one value per row; what people write for numbers never becomes classes unless they say so."""

import datetime as dt
import traceback

import numpy as np
import pyarrow as pa
import pytest
from support.sources.oracle import read
from support.sources.tables import held

from lit_async_data import ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.errors import AsyncDataError, ConfigError, ManifestError
from lit_async_data.sources.table.formats import quoted
from lit_async_data.sources.table.labels import no_classes, note_names
from lit_async_data.sources.table.table import Table


@pytest.mark.parametrize(
    ("values", "kind"),
    [([200, None], "uint8"), ([3, -7], "int16"), ([2**53 + 1, None, 2**63 - 1], "int64"), ([2**63 - 1], "uint64")],
)
def test_whole_numbers_become_int64_and_never_go_through_floats(values, kind):
    table = held({"y": pa.array(values, kind)})
    found = table.labels("y", null="ignore")
    assert found.values.tolist() == [-100 if value is None else value for value in values]
    assert (found.values.dtype, found.classes, found.values.flags.writeable) == (np.int64, (), True)
    assert table.labels("y", null="drop").dropped.tolist() == [n for n, value in enumerate(values) if value is None]


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
    whole = [[1, 2**53 + 1], None, [None, 4]]
    table = held({"y": pa.array([[9, 9], [1, 2], None, [3, None]], kind).slice(1), "n": whole, "b": [[True]] * 3})
    labels = table.labels("y", null="ignore")
    assert labels.values.dtype == np.float32
    assert np.array_equal(labels.values, [[1, 2], [np.nan, np.nan], [3, np.nan]], equal_nan=True)
    assert table.labels("y", null="drop").dropped.tolist() == [1, 2]
    with pytest.raises(ManifestError, match="no value in row 1, row 2"):
        table.labels("y")
    assert table.labels("n", null="ignore").values.tolist() == [[1, 2**53 + 1], [-100, -100], [-100, 4]]
    assert table.labels("b").values.tolist() == [[True]] * 3


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([None, [1, 2], [1, 2], [1], [2]], "row 3, column 'y': a list of 1, but row 1 has 2"),
        ([[], []], "row 0, column 'y': an empty list"),
        (pa.nulls(2), "no row has a value"),
        (pa.array([[1], None, [2**63]], pa.list_(pa.uint64())), f"row 2, column 'y': {2**63} does not fit into int64"),
        ([[[1, 2]], [[3, 4], [5, 6]]], r"holds large_list<.*, lists in lists.* boxes\.reshape\(len\(boxes\), -1, 4\)"),
        ([dt.date(2020, 1, 1)], r"column 'y': holds date32.*: source\.column\('y'\) gives its values"),
        ([{"a": 1}], "column 'y': holds struct.*; give numbers, text or lists"),
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


@pytest.mark.parametrize(("cells", "kind"), [(["a", ""], "class"), ([1, None], None), (["1.5", ""], "number")])
def test_zero_is_for_several_classes_only(cells, kind):
    with pytest.raises(ConfigError, match=r"^fields\.y\.null: zero is for several classes") as caught:
        ManifestSource(pa.table({"tags": cells}), {"y": {"name": "tags", "null": "zero", "kind": kind}})
    assert caught.value.option == "fields.y.null"


def test_so_many_different_texts_are_no_classes():
    table = pa.table({"p": [f"a/{number}" for number in range(2**16 + 1)]})
    with pytest.raises(ConfigError, match=r"fields.y.classes: 65537 distinct texts, which seem to be ids or paths"):
        ManifestSource(table, {"y": "p"})


DISGUISED = [
    ["1.5", "2"],
    ["0,5", "1,5", "", "2"],
    ["\u22120,5", "1,5"],
    ["1,234", "12", "1,234,567"],
    ["[1, 2]", "[3.5, 4]", "[]"],
    ["True", "true", "FALSE"],
    ["y", "yes", "n"],
    ["?", "34", "35.5"],
    ["5%", "6 %"],
    ["0x10", "0X0a"],
    ["1/2", "3/4"],
    ["\u00bd", "\u00bc"],
    ["5 mm", "6.5mm"],
    ["scans/1.nii.gz", "scans/2.nii.gz", "none"],
    ["gs://b/0", "gs://b/1"],
    ["C:/data/a", "D:/data/b"],
    ["/home/me/a", "/scratch2/b"],
    ["$DATA/a", "${DATA}/b"],
    ["[[1, 2, 3, 4]]", "[[5, 6, 7, 8], [9, 10, 11, 12]]"],
    ["['a.png', 'b.png']", "[]"],
    ["{'a': 1}", "{'b': 2}"],
]
CLASSES = [
    ["owl", "0,5"],
    ["1-2", "3-4"],
    ["2020-01-01", "2020-01-02"],
    ["A1", "007"],
    ["True", "False"],
    ["x", "34", "35.5"],
    ["/m/01g317", "/m/09x0r"],
    ["2D", "3D"],
    ["5'UTR", "5HT"],
    [".jpg", ".png"],
    ["<5", ">5"],
    ["10:1", "cat.png", "dog"],
    ["S. aureus", "v1.0"],
]
IN_ALL_TABLES = [DISGUISED[1], DISGUISED[-1], CLASSES[0], CLASSES[-1]]


def tables(cells, tmp_path):
    """The cells as a table of each kind, for some of them."""
    table = pa.table({"y": pa.array(cells)})
    yield table
    if cells not in IN_ALL_TABLES:
        return
    (tmp_path / "t.csv").write_text("n\ty\n" + "".join(f"0\t{cell}\n" for cell in cells))
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(f'{{"y": "{cell}"}}\n' for cell in cells))
    coded, lists = table["y"].combine_chunks().dictionary_encode(), pa.array([[cell] for cell in cells])
    yield from (tmp_path / "t.parquet", tmp_path / "t.jsonl", pa.table({"y": coded}), pa.table({"y": lists}))
    yield pa.table({"y": [f"{cell}|{cell}" for cell in cells]})
    yield tmp_path / "t.csv"


def field(table, **options):
    separator = "|" if isinstance(table, pa.Table) and "|" in str(table["y"][0]) else None
    delimiter = "\t" if str(table).endswith("csv") else None
    column = {"name": "y", "null": "drop", "separator": separator, **options}
    return ManifestSource(table, {"y": column}, delimiter=delimiter).spec["y"]


@pytest.mark.parametrize("cells", DISGUISED, ids=" and ".join)
def test_numbers_and_booleans_in_disguise_are_refused_with_a_way_out(cells, tmp_path):
    for table in tables(cells, tmp_path):
        with pytest.raises(ManifestError, match=r"column 'y': .* look like .*, or set kind: class if these") as caught:
            field(table)
        assert caught.value.dataset == "y"
        assert field(table, kind="class").classes
        assert field(table, classes=sorted(set(cells))).classes == tuple(sorted(set(cells)))


def test_no_message_and_no_report_has_the_signatures_of_addresses_in_cells(tmp_path, capsys):
    table = tmp_path / "t.csv"
    rows = [f"https://host/{row}.png?sig=SECRET{row}&e=1,{row % 2}" for row in range(6)]
    table.write_text("\n".join(["photo,label", *rows]))
    for options in ({}, {"kind": "image"}, {"kind": "number"}, {"separator": ";"}, {"kind": "class", "classes": ["a"]}):
        with pytest.raises((ManifestError, ConfigError), match=r"https://host/\d\.png\?…") as caught:
            ManifestSource(str(table), {"x": {"name": "photo", **options}})
        assert "SECRET" not in "".join(traceback.format_exception(caught.value))
    assert main(["inspect", str(table)]) in (0, 1)
    said = capsys.readouterr()
    assert "https://host/0.png?…" in said.out
    assert "SECRET" not in said.out + said.err


@pytest.mark.parametrize("cells", CLASSES, ids=" and ".join)
def test_other_text_is_classes(cells, tmp_path):
    for table in tables(cells, tmp_path):
        assert field(table).classes == tuple(sorted(cells))


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (["C:\\data\\a", "\\\\server\\share"], "paths; if they only name something, set kind: text"),
        (['{"a": [1, 2]}', '[{"b": "c"}]'], "JSON or Python objects; store numbers as numbers"),
        (["1_000", "2_000"], "numbers; write them"),
        (["\\alpha", "\\beta"], ""),
        (["[" * 100_000 + "]" * 100_000], ""),
    ],
)
def test_text_of_other_kinds(texts, what):
    found = no_classes(texts)
    assert found.startswith(f"{quoted(texts[0])}, ") is bool(what)
    assert what in found


def test_blanks_around_a_name_make_no_other_class(caplog):
    note_names.cache_clear()
    cells = ["cat", "cat ", " cat", "dog", "a b"]
    source = ManifestSource(pa.table({"y": cells}), {"y": "y"})
    assert (source.spec["y"].classes, source.column("y").tolist()) == (("a b", "cat", "dog"), [1, 1, 1, 2, 0])
    (message,) = caplog.messages
    assert message.endswith("'cat ', ' cat' differ from other names only by blanks or Unicode form, and count as these")
    given = ManifestSource(pa.table({"y": cells[:4]}), {"y": {"name": "y", "classes": ["dog", "cat ", "cat"]}})
    assert given.column("y").tolist() == [2, 1, 2, 0]
    ids = ManifestSource(pa.table({"y": cells}), {"y": {"name": "y", "kind": "text"}})
    assert ids.spec["y"].texts == tuple(sorted(cells))


BLANK = ["a", "", "  ", "b"]


@pytest.mark.parametrize("kind", [None, "text"])
@pytest.mark.parametrize("cells", [BLANK, pa.array(BLANK).dictionary_encode()], ids=["text", "categories"])
def test_text_of_blanks_is_a_missing_value(cells, kind):
    table = pa.table({"y": cells, "n": [0, 1, 2, 3]})
    with pytest.raises(ManifestError, match=r"column 'y': no value in row 1, row 2; give one, or set null"):
        ManifestSource(table, {"y": {"name": "y", "kind": kind}})
    source = ManifestSource(table, {"y": {"name": "y", "kind": kind, "null": "drop"}, "n": "n"})
    assert source.column("n").tolist() == [0, 3]
    assert (source.spec["y"].classes or source.spec["y"].texts) == ("a", "b")


def test_a_blank_is_a_class_or_an_id_only_if_it_is_listed():
    kept = ManifestSource(pa.table({"y": ["a", "", None]}), {"y": {"name": "y", "classes": ["", "a"], "null": "drop"}})
    assert kept.column("y").tolist() == [1, 0]
    lists = pa.table({"y": [["a", ""], ["b", " "], [" "]], "t": [["a", ""], ["b", " "], [" "]]})
    several = ManifestSource(lists, {"y": "y", "t": {"name": "t", "kind": "text"}})
    assert read(several, [0, 1, 2])["y"].tolist() == [[1, 0], [0, 1], [0, 0]]
    assert set(several.spec["t"].texts) == {"a", "", "b", " "}
    ordered = pa.DictionaryArray.from_arrays([0, 1, 2, 2], pa.array(["b", " ", "a"]), ordered=True)
    ranked = ManifestSource(pa.table({"y": ordered}), {"y": {"name": "y", "null": "ignore"}})
    assert (ranked.spec["y"].classes, ranked.column("y").tolist()) == (("b", "a"), [0, -100, 1, 1])
    with pytest.raises(ManifestError, match="no id, as in 2 rows in all; give each row one"):
        ManifestSource(pa.table({"y": BLANK}), {"y": "y"}, id="y")


@pytest.mark.parametrize(
    ("cells", "classes", "wanted"),
    [
        (["cat ", "cat "], ("ape", "cat"), [1, 1]),
        (["cat", None], ("ape", "cat"), [1, -100]),
        ([["a"], ["b", "a"]], ("c", "b", "a"), [[0, 0, 1], [0, 1, 1]]),
        (["caf\u00e9", "cafe\u0301", "\ufeffcaf\u00e9 ", "cafe"], ("caf\u00e9", "cafe"), [0, 0, 0, 1]),
    ],
)
def test_stages_take_names_without_blanks_or_unicode_forms(cells, classes, wanted):
    source = ManifestSource(pa.table({"y": cells}), {"y": {"name": "y", "null": "ignore"}})
    assert read(source.with_classes({"y": classes}), range(len(cells)))["y"].tolist() == wanted


def test_a_word_for_no_value_gets_a_note(caplog):
    note_names.cache_clear()
    ManifestSource(pa.table({"y": ["cat", "nan", "None", "dog"]}), {"y": "y"})
    assert "column 'y': names 'None', 'nan' may stand for no" in caplog.text


@pytest.mark.parametrize("kind", [None, "text"])
def test_lists_that_a_cell_shows_are_refused_as_text_too(kind, file):
    path = file("t.csv", """a,b\n"['x.png', 'y.png']",1.0\n"['z.png']",2.0\n""")
    with pytest.raises(ManifestError, match=r"look.* like .*Parquet and JSON Lines keep lists, and with separator="):
        ManifestSource(path, {"x": {"name": "a", "kind": kind}})


def vectors(table, **options):
    source = ManifestSource(table, {"y": {"name": "tags", **options}})
    return source._fields.labels["y"].values.tolist(), source.spec["y"].classes


def test_an_empty_cell_can_mean_no_class_in_every_kind_of_table(tmp_path):
    (tmp_path / "t.csv").write_text("n,tags\n0,a|b\n1,\n2,b\n")
    texts = [pa.table({"tags": ["a|b", cell, "b"]}) for cell in ("", " ", None)]
    for table in (tmp_path / "t.csv", *texts):
        with pytest.raises(ManifestError, match=r"'tags': no value; give one, or set null: zero if"):
            vectors(table, separator="|")
        assert vectors(table, separator="|", null="zero") == ([[1, 1], [0, 0], [0, 1]], ("a", "b"))
    lists = pa.table({"tags": [["a", "b"], [], ["b"]]})
    assert vectors(lists) == vectors(lists, null="zero") == ([[1, 1], [0, 0], [0, 1]], ("a", "b"))
    assert vectors(pa.table({"tags": [["a", "b"], None, ["b"]]}), null="zero")[0][1] == [0, 0]
    with pytest.raises(ManifestError, match="row 0, column 'tags': no value; give"):  # one of several is missing
        vectors(pa.table({"tags": [["a", None], ["b"]]}), null="zero")


def test_numbers_that_are_classes_are_said_to_be_and_sorted(tmp_path):
    (tmp_path / "t.csv").write_text("n,tags\n0,1 2\n1,2\n2,10 1\n")
    with pytest.raises(ManifestError, match=r"a list of 1, but row 0 has 2; make all lists .*, or set kind: class if"):
        vectors(tmp_path / "t.csv", separator=" ")
    expected = ([[1, 1, 0], [0, 1, 0], [1, 0, 1]], ("1", "2", "10"))
    assert vectors(tmp_path / "t.csv", separator=" ", kind="class") == expected
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int8())):
        assert vectors(pa.table({"tags": pa.array([[1, 2], [2], [10, 1]], kind)}), kind="class") == expected


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
        *(("1", cell, "is not a number") for cell in ("x", "1,5")),
        *(("1", cell, "is not a finite decimal number") for cell in ("0x10", "-Infinity")),
        ("1", "9223372036854775808", "rounded"),
        ("0.5", "-9007199254740993", "rounded"),
    ],
)
def test_text_that_is_no_number_or_would_be_rounded_is_an_error(file, first, cell, message):
    path = file("m.csv", f'x\n{first}\n"{cell}"\n2\n')
    with pytest.raises(ManifestError, match=f"row 1, column 'x': .*{message}") as caught:
        Table.of(path, ["x"]).labels("x", kind="number")
    assert caught.value.row == 1


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_text_from_memory_is_checked_too(encoded, listed):
    values = pa.array([b"x"] * 6 + [b"\xff"] + [b"x"] * 3)
    text = pa.Array.from_buffers(pa.string(), 10, values.buffers())
    if encoded:
        codes = pa.array([0] * 6 + [1] + [0] * 3)
        text = pa.DictionaryArray.from_arrays(codes, text.slice(5, 2))
    if listed:
        text = pa.ListArray.from_arrays(list(range(11)), text)
    with pytest.raises(ManifestError, match="row 6, column 'a': text that is not UTF-8"):
        held({"a": text})
    # What lies beside a slice or is not in use is none of the table's.
    held({"a": text.slice(0, 6)})


@pytest.mark.parametrize("cell", ["nan", "NA", "NaN", " N/A "])
def test_words_for_nothing_are_no_numbers(file, cell):
    path = file("t.csv", f'y\n1\n"{cell}"\n3\n')
    with pytest.raises(ManifestError, match=r"row 1.*no value"):
        ManifestSource(path, {"y": "y"})
    values = ManifestSource(path, {"y": {"name": "y", "null": "ignore"}}).column("y")
    assert (values.tolist(), values.dtype) == ([1, -100, 3], np.int64)


@pytest.mark.parametrize("kind", ["int64", "uint8"])
def test_whole_numbers_are_classes_if_the_user_says_so(kind):
    table = pa.table({"y": pa.array([10, 30, None, 20, 10], kind), "f": [0.5] * 5})
    source = ManifestSource(table, {"y": {"name": "y", "kind": "class", "null": "drop"}})
    assert (source.spec["y"].classes, source.column("y").tolist()) == (("10", "20", "30"), [0, 2, 1, 0])
    assert source.with_classes({"y": ("30", "20", "10")}).column("y").tolist() == [2, 0, 1, 2]
    for classes in ([30, 20, 10], ["30", "20", "10"]):  # with or without the kind
        given = ManifestSource(table, {"y": {"name": "y", "classes": classes, "null": "ignore"}})
        assert (given.spec["y"].classes, given.column("y").tolist()) == (("30", "20", "10"), [2, 0, -100, 1, 2])
    wrong = {"y": ([10, 20], None, "'30' is not one of"), "f": (None, "class", "double, neither text nor whole")}
    for name, (classes, chosen, said) in wrong.items():
        with pytest.raises(AsyncDataError, match=said):
            ManifestSource(table, {"y": {"name": name, "kind": chosen, "classes": classes, "null": "drop"}})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_missing_number_of_floats_is_nan_and_minus_100_a_number(dtype):
    table = pa.table(
        {"age": [31, None, -100], "count": [None, 2, 3], "kind": ["a", "", "b"], "boxes": [[1, 2], None, [3, None]]}
    )
    for name, wanted in (
        ("age", [31, np.nan, -100]),
        (["age", "count"], [[31, np.nan], [np.nan, 2], [-100, 3]]),
        ("kind", [0, np.nan, 1]),
        ("boxes", [[1, 2], [np.nan, np.nan], [3, np.nan]]),
    ):
        source = ManifestSource(table, {"y": {"name": name, "null": "ignore", "dtype": dtype}})
        found = source._fields.labels["y"].values
        assert found.dtype == dtype
        assert np.array_equal(found, wanted, equal_nan=True), name


def test_names_that_differ_in_case_are_named(caplog):
    source = ManifestSource(pa.table({"y": ["auk", "AUK", " Auk", "owl", "A", "a"]}), {"y": "y"})
    assert source.spec["y"].classes == ("A", "AUK", "Auk", "a", "auk", "owl")
    assert "'AUK', 'Auk', 'auk' differ only in upper and lower case" in caplog.text
