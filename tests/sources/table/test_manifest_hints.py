"""Tables as people have them: each is read, or the message says what to do; and what it says to do works."""

import ast
import codecs
import gzip
import json
import pathlib
import re
import unicodedata
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from support.sources.oracle import read

from lit_async_data import ManifestSource
from lit_async_data.errors import ConfigError, CorruptError, ManifestError, MissingError
from lit_async_data.sources.table.delimited import TextFormat
from lit_async_data.sources.table.table import Table

COUNT = 3
NAMES = ["Käfer", "Öl, Fett", 'ein "Wort"']


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        np.save(tmp_path / f"{number}.npy", np.full(2, number, "f4"))
    return tmp_path


def written(delimiter, end="\n"):
    quoted = ['"' + name.replace('"', '""') + '"' for name in NAMES]
    lines = [["path", "label", "number"], *([f"{n}.npy", quoted[n], str(n)] for n in range(COUNT))]
    return end.join(delimiter.join(cells) for cells in lines) + end


def checked(path, **options):
    source = ManifestSource(path, {"x": "path", "y": "label", "n": "number"}, **options)
    assert source.spec["y"].classes == tuple(sorted(NAMES))
    batch = read(source, np.arange(COUNT))
    assert batch["x"][:, 0].tolist() == batch["n"].tolist() == [0, 1, 2]
    assert source.column("label").tolist() == NAMES
    return source


@pytest.mark.parametrize(
    ("delimiter", "name"),
    [*((each, "t.csv") for each in (";", "\t", "|", ",", " ", ":")), (",", "t.tsv"), (";", "t.csv.gz")],
)
def test_any_delimiter(delimiter, name, folder):
    content = written(delimiter).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    checked(folder / name, delimiter=delimiter)


@pytest.mark.parametrize(
    ("delimiter", "name"), [(";", "t.csv"), ("\t", "t.csv"), ("|", "t.csv"), (",", "t.tsv"), (";", "t.tsv")]
)
def test_another_delimiter_is_named(delimiter, name, folder):
    (folder / name).write_text(written(delimiter))
    with pytest.raises(ManifestError, match=r"has no column 'path'; its cells seem to be separated by") as caught:
        checked(folder / name)
    assert f"set delimiter={delimiter!r}" in str(caught.value)
    assert caught.value.file == str(folder / name)


def test_a_column_that_is_not_there_is_no_question_of_the_delimiter(folder):
    (folder / "t.csv").write_text("a;b,label\n1,2\n")
    with pytest.raises(
        ManifestError,
        match=r"has no column 'path'; it has 'a;b', 'label'; if its first line is a row, put a line of names before it",
    ):
        Table.of(folder / "t.csv", ["path"])


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *(("delimiter", wrong) for wrong in ("", ";;", '"', "\n", "ä", 3)),
        *(("encoding", wrong) for wrong in ("utf-99", "", 3, "base64", "rot13")),
    ],
)
def test_what_is_no_delimiter_and_no_encoding(option, wrong, folder):
    (folder / "t.csv").write_text(written(","))
    with pytest.raises(ConfigError, match=rf"^{option}: .* is not a (single character|text encoding of Python)"):
        checked(folder / "t.csv", **{option: wrong})


@pytest.mark.parametrize(
    ("encoding", "name", "end"),
    [
        *((each, "t.csv", "\n") for each in ("latin-1", "utf-16", "utf-16-le", "utf-8", "utf-8-sig", "mac-roman")),
        ("cp1252", "t.csv.gz", "\r\n"),
        ("utf-16", "t.csv.gz", "\r\n"),
    ],
)
def test_any_encoding(encoding, name, end, folder):
    content = written(";", end).encode(encoding)
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    checked(folder / name, delimiter=";", encoding=encoding)


@pytest.mark.parametrize("where", ["header", "cell"])
def test_another_encoding_is_named(where, folder):
    content = "pfäd,label\n0.npy,a\n" if where == "header" else "path,label\n0.npy,a\n1.npy,Käfer\n"
    (folder / "t.csv").write_bytes(content.encode("cp1252"))
    place = "its first line is" if where == "header" else r"row 1, column 'label': text that is"
    with pytest.raises(ManifestError, match=f"{place} not UTF-8; set encoding=cp1252 if Windows wrote it, else save"):
        Table.of(folder / "t.csv", ["label"])
    (folder / "t.csv").write_bytes(content.encode("cp1252").replace(b"\xe4", b"\x81"))  # nothing in cp1252
    place = "its first line is" if where == "header" else "is"
    with pytest.raises(ManifestError, match=f"{place} not cp1252, as encoding says; leave out encoding if it is UTF-8"):
        Table.of(folder / "t.csv", ["label"], text_format=TextFormat.of(None, "cp1252"))


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_utf16_is_named(mark, folder):
    kind = "utf-16-le" if mark == codecs.BOM_UTF16_LE else "utf-16-be"
    (folder / "t.csv").write_bytes(mark + written(",").encode(kind))
    with pytest.raises(ManifestError, match="its first line is not UTF-8, but UTF-16: say encoding=utf-16, or save"):
        checked(folder / "t.csv")
    checked(folder / "t.csv", encoding="utf-16")
    (folder / "t.jsonl").write_bytes(mark + '{"a": 1}'.encode(kind))
    with pytest.raises(ManifestError, match="not UTF-8, but UTF-16: save the table as UTF-8"):
        Table.of(folder / "t.jsonl", ["a"])


@pytest.mark.parametrize(("option", "value"), [("delimiter", ";"), ("encoding", "cp1252")])
def test_forms_of_text_say_nothing_of_other_tables(option, value, folder):
    (folder / "t.jsonl").write_text('{"number": 1}\n')
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"number": [1]}), folder / "t.parquet")
    for given, what in (
        (folder / "t.jsonl", r"\.jsonl files"),
        (folder / "t.parquet", r"\.parquet files"),
        (pa.table({"number": [1]}), "a table in memory"),
    ):
        with pytest.raises(ConfigError, match=f"^{option}: does not apply to {what}, only to CSV and TSV files"):
            ManifestSource(given, {"n": "number"}, **{option: value})


def test_what_is_packed_and_called_csv_is_named(folder):
    (folder / "t.csv").write_bytes(gzip.compress(written(",").encode()))
    with pytest.raises(ManifestError, match=r"is compressed by gzip; name it t\.csv\.gz"):
        checked(folder / "t.csv")
    (folder / "t.csv").rename(folder / "t.csv.gz")
    checked(folder / "t.csv.gz")
    (folder / "t.jsonl").write_bytes(gzip.compress(b'{"a": 1}\n'))
    with pytest.raises(ManifestError, match=r"is compressed by gzip; name it t\.jsonl\.gz"):
        Table.of(folder / "t.jsonl", ["a"])
    with zipfile.ZipFile(folder / "z.csv", "w") as archive:
        archive.writestr("t.csv", written(","))
    with pytest.raises(
        ManifestError, match=r"is a ZIP archive or a spreadsheet; unpack it, or give the result of pandas\.read_ex"
    ):
        checked(folder / "z.csv")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t.xlsx", r"it is a spreadsheet; give pandas\.read_excel\('.*/t\.xlsx'\), or save it as CSV"),
        ("T.XLS", r"it is a spreadsheet; give pandas\.read_excel"),
        ("t.json", r"name a file of JSON lines \.jsonl; for a JSON array, give pandas\.read_json\('.*/t\.json'\)"),
        ("t.zip", "it is an archive; unpack it"),
        ("t.csv.bz2", "it is an archive; unpack it"),
        ("t.feather", r"give pyarrow\.feather\.read_table\('.*/t\.feather'\)"),
        ("t.txt", r"name it \.csv and set delimiter="),
        ("t.pkl", r"does not end in one of \.csv, .*\.ndjson\.gz$"),
    ],
)
def test_files_of_other_kinds_say_what_reads_them(name, message, folder):
    (folder / name).write_bytes(b"anything")
    with pytest.raises(
        ConfigError,
        match=rf"^table: .*{re.escape(name)} does not end in one of .*{message.lstrip('^')}"
        if name != "t.pkl"
        else f"^table: .*t.pkl {message}",
    ):
        checked(folder / name)


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_in_json_lines_is_named(indent, folder):

    rows = [{"path": f"{n}.npy", "label": NAMES[n], "number": n} for n in range(COUNT)]
    (folder / "t.jsonl").write_text(json.dumps(rows, indent=indent))
    with pytest.raises(ManifestError, match=r"row 0: the file is a JSON array, .* pandas\.read_json") as e:
        checked(folder / "t.jsonl")
    assert e.value.file == str(folder / "t.jsonl")
    checked(pd.read_json(folder / "t.jsonl"), root=folder)


@pytest.mark.parametrize("id", ["number", "label", None])
def test_a_damaged_file_says_how_to_leave_it_out(id, folder):  # noqa: A002  # the user's word
    (folder / "t.csv").write_text(written(","))
    (folder / "1.npy").write_bytes((folder / "1.npy").read_bytes()[:-1])
    paths = pa.table({"number": [0, 1, 2], "path": [f"{number}.npy" for number in range(3)]})
    table = paths if id == "number" else folder / "t.csv"
    with pytest.raises(CorruptError, match=r"; python -m .* inspect --check-all lists all such files$") as caught:
        ManifestSource(table, {"x": "path"}, id=id, root=folder)
    filters = ast.literal_eval(re.search(r"leave it out: filters=(.*); python", str(caught.value))[1])
    assert len(ManifestSource(table, {"x": "path"}, id=id, root=folder, filters=filters)) == 2


def test_path_objects_are_paths(folder):
    paths = [folder / f"{number}.npy" for number in range(COUNT)]
    given = pd.DataFrame({"path": paths, "label": NAMES, "number": range(COUNT)})
    checked(given, root=folder)
    given = pd.DataFrame({"path": [pathlib.PurePosixPath("1.npy"), None, "2.npy"]})
    source = ManifestSource(given, {"x": {"name": "path", "null": "drop"}}, root=folder)
    assert read(source, [0, 1])["x"][:, 0].tolist() == [1, 2]


def test_an_index_that_is_wanted_as_a_column_is_named(folder):

    frame = pd.DataFrame({"id": ["a", "b", "c"], "path": [f"{n}.npy" for n in range(COUNT)]})
    with pytest.raises(
        ManifestError, match=r"no column 'id'; .*; it is the index of the DataFrame; give frame\.reset_ind"
    ):
        ManifestSource(frame.set_index("id"), {"x": "path"}, id="id", root=folder)
    with pytest.raises(ManifestError, match=r"no column 'id'; it has 'path'$"):
        ManifestSource(frame[["path"]], {"x": "path"}, id="id", root=folder)
    assert len(ManifestSource(frame.set_index("id").reset_index(), {"x": "path"}, id="id", root=folder)) == COUNT


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("sub\\1.npy", "backslashes"),
        (" 1.npy", "spaces around a name"),
        ("sub/1.npy ", "spaces around a name"),
        (
            unicodedata.normalize("NFD", "Bär/1.npy"),
            r"another Unicode form of a name: unicodedata\.normalize\('NFC', path\)",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_paths_that_differ_from_those_of_files_say_in_what(path, hint, kind, folder):
    for inside in ("", "sub", "Bär"):
        (folder / inside).mkdir(exist_ok=True)
        (folder / inside / "1.npy").write_bytes((folder / "1.npy").read_bytes())
    table = pa.table({"path": [path], "row": [0]})
    with pytest.raises(
        MissingError, match=rf"^row 0 of the table given: .*no such file; .*\? '.*1\.npy' exists; .*{hint}"
    ):
        ManifestSource(table, {"x": {"name": "path", "kind": kind}}, root=folder)


def test_a_path_that_leads_to_nothing_at_all_has_no_hint(folder):
    for path in ("gone.npy", "sub\\gone.npy", " gone.npy"):
        with pytest.raises(MissingError) as caught:
            ManifestSource(pa.table({"path": [path]}), {"x": "path"}, root=folder)
        assert "There is" not in str(caught.value)
