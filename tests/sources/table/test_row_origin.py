"""The origin of rows, and what messages make of columns and values."""

import numpy as np
import pytest
from support.sources.tables import held

from lit_async_data.errors import ManifestError
from lit_async_data.sources.table.row_origin import RowOrigin, printable_path, quoted
from lit_async_data.sources.table.table import Table


def test_near_names_are_suggested(file):
    with pytest.raises(ManifestError, match="no column 'spcies'; did you mean 'species'\\?"):
        Table.of(file("m.csv", "species,path\n1,2\n"), ["spcies"])


def test_values_in_messages_stay_on_one_line(file):
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
