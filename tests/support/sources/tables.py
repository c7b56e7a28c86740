"""Tables in memory, and in files of every format."""

import os
import tempfile

import pyarrow as pa
from hypothesis import strategies as st

from lit_async_data import ManifestSource
from lit_async_data.sources.table.table import Table


def everything(table, name):
    return table.array(name).to_pylist()


def held(columns, **options):
    return Table.of(pa.table(columns), list(columns), **options)


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6)
wholes = st.integers(-(2**63), 2**63 - 1)
fractions = st.floats(allow_nan=False, allow_infinity=False)
cells = [st.none() | words, st.none() | wholes, st.none() | fractions, words | st.sampled_from(["NA", "007", "nan"])]
tables = st.lists(st.tuples(*cells), min_size=1, max_size=12)
NAMES = ["text", "whole", "fraction", "more"]


def read_back(name, content):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        with open(path, "wb") as target:
            target.write(content)
        table = Table.of(path, NAMES)
        return list(zip(*(everything(table, each) for each in NAMES)))


LABELS = ["Käfer", "Öl, Fett", 'ein "Wort"']


def labelled(delimiter, end="\n"):
    """The text of a table of these labels and their numbers."""
    quoted = ['"' + label.replace('"', '""') + '"' for label in LABELS]
    lines = [["label", "number"], *([label, str(number)] for number, label in enumerate(quoted))]
    return end.join(delimiter.join(cells) for cells in lines) + end


def assert_labelled(table, **options):
    source = ManifestSource(table, {"y": "label", "n": "number"}, **options)
    assert source.spec["y"].classes == tuple(sorted(LABELS))
    assert source.column("label").tolist() == LABELS
    assert source.column("n").tolist() == [0, 1, 2]
