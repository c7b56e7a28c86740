"""The command that the verdict names packs what the loader reads."""

from __future__ import annotations

import argparse
import io
import shlex

import numpy as np
import pytest
from PIL import Image

import lit_async_data as lad
from lit_async_data import AsyncLoader
from lit_async_data.testing import ArraySource
from lit_async_data.tools.given_source import GivenSource
from lit_async_data.tools.pack.command import add_arguments
from lit_async_data.verdict.facts import Readers, packing_of
from lit_async_data.verdict.finding import PACKING

# Its first table starts threads that stay.
pytest.importorskip("pyarrow.csv", reason="pip install 'lit-async-data[manifest]'").read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def typed(command):
    """What the command would pack, and the file that it writes."""
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "lit_async_data", "pack"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words[4:])
    return GivenSource.of(args.input, args).open(), args.output


def same(source, command):
    """The command reads what the source reads."""
    packed, output = typed(command)
    every = np.arange(len(source))
    with_shapes = {key: np.empty((len(source), *field.stored_shape), field.dtype) for key, field in source.spec.items()}
    again = {key: np.empty_like(array) for key, array in with_shapes.items()}
    source.read_into(every, with_shapes)
    packed.read_into(every, again)
    for each in (source, packed):
        each.close()
    assert output == "packed.h5"
    assert len(packed) == len(source)
    for key, array in with_shapes.items():
        np.testing.assert_array_equal(again[key], array)


def test_of_hdf5_files(h5, tmp_path):
    (tmp_path / "a b").mkdir()
    h5("a b/1.h5", **{"scan/data": np.arange(24).reshape(4, 6), "scan/labels": np.arange(4)})
    source = lad.HDF5Source("a b/*.h5", {"x": "data", "y": "labels"}, layout={"x": "NC"}, group="scan")
    command = packing_of(source)
    fields = "--fields x=data y=labels --layout x=NC --group scan"
    assert command == f"python -m lit_async_data pack 'a b/*.h5' -o packed.h5 {fields}"
    same(source, command)
    assert packing_of(lad.SubsetSource(source, [0, 2])) == command


def test_of_files_elsewhere_and_of_selected_rows(h5, tmp_path, monkeypatch):
    path = h5("x.h5", data=np.arange(24).reshape(4, 6), labels=np.arange(4), kept=np.array([1, 3]))
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert packing_of(lad.HDF5Source([path], rows=[1, 3])).split()[4] == str(path)
    source = lad.HDF5Source(path, rows="kept")
    assert packing_of(source).endswith(" --rows kept")
    same(source, packing_of(source))


def test_of_tables_and_folders(tmp_path):
    for name in ("auk", "owl"):
        (tmp_path / "birds" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(tmp_path / "birds" / name / "1.png")
    folder = lad.ManifestSource.from_folder("birds", image_size=(8, 9), resize="crop")
    options = "--fields x=path y=label --image-size 8 9 --resize crop"
    assert packing_of(folder) == f"python -m lit_async_data pack birds -o packed.h5 {options}"
    same(folder, packing_of(folder))
    (tmp_path / "birds.csv").write_text("name,file,n\na,auk/1.png,1\nb,owl/1.png,2\n")
    table = lad.ManifestSource("birds.csv", {"x": "file", "n": "n"}, root="birds", id="name")
    assert packing_of(table).endswith("pack birds.csv -o packed.h5 --fields x=file n=n --root birds --id name")
    same(table, packing_of(table))
    random = lad.ManifestSource("birds.csv", {"x": "file"}, root="birds", image_size=8, resize="random_crop")
    assert packing_of(random) == ""


def test_what_no_command_line_can_name_is_packed_from_python(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pip install 'lit-async-data[manifest]'")
    (tmp_path / "t.csv").write_text("n;m\n1;2\n")
    arrays = ArraySource({"x": np.zeros(4)})
    for source in (
        arrays,
        lad.ConcatSource([arrays, arrays]),
        lad.ManifestSource(arrow.table({"y": [1, 2]}), {"y": "y"}),
        lad.ManifestSource("t.csv", {"y": "n"}, delimiter=";"),
    ):
        assert packing_of(source) == PACKING


def test_how_well_a_chunk_shuffle_would_mix_is_looked_up_where_chunks_are_decoded_in_vain(h5):
    values = np.arange(256 * 50).reshape(256, 50)
    path = h5("z.h5", labels=np.arange(256), data={"data": values, "chunks": (8, 50), "compression": 1})
    for shuffle, known in (("global", True), ("chunk", False)):
        options = {"batch_size": 16, "shuffle": shuffle, "workers": 0, "shuffle_chunks": 8, "cache_bytes": 0}
        with AsyncLoader(lad.HDF5Source(path), options) as loader:
            readers = Readers.of(loader, loader.stats())
            loader.source.close()
        assert (0 < readers.mixing < 1) is known
        assert readers.compressed
