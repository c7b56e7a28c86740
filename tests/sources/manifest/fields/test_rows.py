"""The rows of a table as samples: what errors say of them, and what leaves them out."""

import ast
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import ManifestSource
from lit_async_data.errors import CorruptError, MissingError


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.zeros(2))
    return tmp_path


@pytest.mark.parametrize("id", ["number", "label", None])
def test_a_damaged_file_says_how_to_leave_it_out(id, folder):  # noqa: A002  # the user's word
    (folder / "t.csv").write_text('path,label\n0.npy,a\n1.npy,"a, ""b"""\n2.npy,c\n')
    (folder / "1.npy").write_bytes((folder / "1.npy").read_bytes()[:-1])
    paths = pa.table({"number": [0, 1, 2], "path": ["0.npy", "1.npy", "2.npy"]})
    table = paths if id == "number" else folder / "t.csv"
    with pytest.raises(CorruptError, match=r"; python -m .* inspect --check-all lists all such files$") as caught:
        ManifestSource(table, {"x": "path"}, id=id, root=folder)
    filters = ast.literal_eval(re.search(r"leave it out: filters=(.*); python", str(caught.value))[1])
    assert len(ManifestSource(table, {"x": "path"}, id=id, root=folder, filters=filters)) == 2


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("sub\\1.npy", "backslashes"),
        (" 1.npy", "spaces around a name"),
        ("sub/1.npy ", "spaces around a name"),
        (unicodedata.normalize("NFD", "Bär/1.npy"), r"another Unicode form of a name: .*\.normalize\('NFC', path\)"),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_paths_that_differ_from_those_of_files_say_in_what(path, hint, kind, folder):
    for inside in ("", "sub", "Bär"):
        (folder / inside).mkdir(exist_ok=True)
        (folder / inside / "1.npy").write_bytes((folder / "1.npy").read_bytes())
    table = pa.table({"path": [path], "row": [0]})
    message = rf"^row 0 of the table given: .*no such file; .*\? '.*1\.npy' exists; the table has {hint}"
    with pytest.raises(MissingError, match=message):
        ManifestSource(table, {"x": {"name": "path", "kind": kind}}, root=folder)


def test_a_path_that_leads_to_nothing_at_all_has_no_hint(folder):
    for path in ("gone.npy", "sub\\gone.npy", " gone.npy"):
        with pytest.raises(MissingError) as caught:
            ManifestSource(pa.table({"path": [path]}), {"x": "path"}, root=folder)
        assert "exists; the table has" not in str(caught.value)
