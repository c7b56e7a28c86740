"""`Source`: three members make a source; its samples by number, in loaders and in a DataLoader of torch."""

import re
from multiprocessing import resource_tracker

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sources.parted import numbered, parted
from support.sources.squares import ROWS, Squares
from torch.utils.data import DataLoader, TensorDataset

import lit_async_data as lad
from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.sources.contract.source import Part, Places, StorageLayout
from lit_async_data.testing import ArraySource, check_contract

# With the first process that it spawns, multiprocessing starts another one, and keeps a pipe to it.
resource_tracker.ensure_running()


def test_samples_are_taken_by_number():
    source = Squares()
    assert source[3]["y"] == source[3 - ROWS]["y"] == 9
    assert source[3]["x"].tolist() == [3, 4, 5]
    assert [sample["y"] for sample in source.__getitems__([4, 2, 4])] == [16, 4, 16]
    assert source.__getitems__([]) == []
    for wrong in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError, match=f"sample .* of {ROWS} in Squares"):
            source[wrong]
    with pytest.raises(IndexError, match="whole numbers"):
        source[0.5]
    pair = lad.DatasetSource(TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3)))
    assert pair[1][0].tolist() == [2.0, 3.0]
    with pytest.raises(TypeError, match="not iterable"):  # it is no loader
        iter(pair)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataloader_takes_a_source_also_where_its_files_are_open(h5, method):
    images = np.random.default_rng(0).integers(0, 256, (ROWS, 3, 8, 8), np.uint8)
    packed = {"data": images, "chunks": (16, 3, 8, 8), "compression": "gzip"}
    files = [h5(f"{part}.h5", data=packed, labels=np.arange(ROWS) % 7) for part in range(2)]
    whole = lad.HDF5Source(files, {"x": "data", "y": "labels"})
    source = lad.SubsetSource(whole, np.arange(0, 2 * ROWS, 3))
    first = source[0]  # opens the files, before a fork
    loader = DataLoader(source, batch_size=16, num_workers=1, multiprocessing_context=method)
    batches = list(loader)
    assert torch.equal(batches[0]["x"][0], torch.from_numpy(first["x"]))
    labels = torch.cat([batch["y"] for batch in batches])
    assert labels.tolist() == [number % ROWS % 7 for number in range(0, 2 * ROWS, 3)]
    with lad.AsyncLoader(source, {"batch_size": 16, "shuffle": False}) as ours:
        for mine, theirs in zip(ours, batches):
            assert torch.equal(mine["x"], theirs["x"])
    source.close()


def test_a_subclass_of_three_members_keeps_the_contract_is_split_and_drawn():
    source = Squares()
    check_contract(source)
    assert repr(source) == f"<Squares of {ROWS} samples: y int64, x float32 (3,); read by Python code>"
    sides = lad.split(source, {"train": 0.5, "val": 0.5}, groups="y")
    assert sum(map(len, sides.values())) == ROWS
    assert source.locate([7])[0] == ("Squares", "/", 7)


def test_a_source_without_parts_is_one_part_without_a_name():
    source = ArraySource({"x": np.zeros((5, 2)), "y": np.arange(5)})
    assert source.parts == (Part("ArraySource", "/", "", 5),)
    assert source.chunks.overlap == 0
    assert [StorageLayout(chunks_per_run=n).width(64) for n in (1, 4, 8, 9, 60)] == [64, 16, 8, 8, 8]
    assert [StorageLayout(chunks_per_run=60).width(n) for n in (1, 7, 16, 600)] == [1, 7, 8, 10]
    assert source.column("y").tolist() == [0, 1, 2, 3, 4]
    for name in ("x", "z"):
        with pytest.raises(MissingError, match=f"ArraySource: no field '{name}' .*: y$"):
            source.column(name)


def test_a_column_is_read_piece_by_piece(monkeypatch):
    monkeypatch.setattr("lit_async_data.sources.contract.source.BLOCK_SAMPLES", 3)
    assert numbered(8).column("y").tolist() == list(range(8))


@given(st.permutations(range(10)))
def test_places_are_ordered_by_part_and_then_by_row(samples):
    places = parted({"a.h5": 4, "b.h5": 4, "c.h5": 2}).places().taken(np.array(samples))
    assert np.array(samples)[places.order()].tolist() == list(range(10))


def test_a_file_that_is_in_two_of_the_sources_is_one_part():
    whole, other = parted(), parted({"c.h5": 2})
    both = lad.ConcatSource([lad.SubsetSource(whole, [9, 1]), other, lad.SubsetSource(whole, [2, 8])])
    places = both.places()
    assert [part.name for part in places.parts] == ["a.h5", "b.h5", "c.h5"]
    assert places.which.tolist() == [1, 0, 2, 2, 0, 1]
    assert places.rows.tolist() == [5, 1, 0, 1, 2, 4]


def test_a_file_and_a_link_to_it_are_one_part(h5, tmp_path):
    path = h5("a.h5", y=np.arange(40))
    (tmp_path / "b.h5").symlink_to(path)
    both = lad.ConcatSource([lad.HDF5Source(each, ["y"]) for each in (path, str(tmp_path / "b.h5"))])
    places = both.places()
    assert [(part.file, part.name) for part in places.parts] == [(path, "a.h5")]
    assert places.rows.tolist() == [*range(40)] * 2
    sides = lad.split(both, {"train": 0.5, "val": 0.5})
    assert not {*sides["train"].column("y").tolist()} & {*sides["val"].column("y").tolist()}
    assert "overlap 80 samples" in lad.split(both, {"train": ["1"], "val": ["2"]}, groups=[1] * 40 + [2] * 40).described


def test_parts_of_one_file_with_other_names_stay_apart():
    names = ["a.h5:/x", "a.h5:/y", "a.h5", "a.h5:/x"]
    whole = Places(tuple(Part("files/a.h5", "/", name, 1) for name in names), np.arange(4), np.arange(4))
    for places in (whole.distinct(), Places.joined([whole.distinct(), whole]).taken(np.arange(4))):
        assert [part.name for part in places.parts] == names[:3]
        assert places.which.tolist() == [0, 1, 2, 0]


def test_an_address_is_one_part_whatever_the_folder_that_names_begin_at():
    named = {"x.h5": "s3://b/d/x.h5", "d/x.h5": "s3://b/d/x.h5", "d//x.h5": "s3://b/d//x.h5"}
    parts = [Part(file, "/", name, 1) for name, file in named.items()]
    every = (Places((part,), np.zeros(1, int), np.zeros(1, int)) for part in parts)
    assert Places.joined(every).which.tolist() == [0, 0, 1]


class Rebinds(Squares):
    def read_into(self, samples, out):
        super().read_into(samples, out)  # fills both arrays
        out["y"] = samples**2


class Misspells(Squares):
    def read_into(self, samples, out):
        out["X"] = samples


class Returns(Squares):
    def read_into(self, samples, out):
        return {key: np.empty_like(array) for key, array in out.items()}


class Draws(Rebinds):
    chunks = StorageLayout(reading="python", random=True)


UNFILLED = [
    (Rebinds, "Rebinds: read_into replaced out['y']; fill the arrays that are in out: out['y'][...] = values"),
    (Misspells, "Misspells: read_into added out['X']; fill the arrays that are in out: out['y'][...] = values"),
    (Returns, "Returns: read_into returned a dict; fill the arrays that are in out: out['y'][...] = values"),
    (Draws, "Draws: read_random replaced out['y']"),
]


@pytest.mark.parametrize(("kind", "said"), UNFILLED)
def test_a_source_that_fills_no_array_is_an_error_and_no_batch_of_other_values(kind, said):
    sources = [kind(), lad.ConcatSource([lad.SubsetSource(kind(), np.arange(9)), Squares()])]
    sources.append(lad.MixtureSource({"mine": (kind(), 0.5), "other": (Squares(), 0.5)}))
    options = {"batch_size": 8, "workers": 0, "shuffle": False, "on_error": "skip"}
    for source in sources:
        with lad.AsyncLoader(source, options) as loader, pytest.raises(ConfigError, match=re.escape(said)):
            next(iter(loader))
    if kind is not Draws:
        with pytest.raises(ConfigError, match=re.escape(said)):
            kind()[3]
