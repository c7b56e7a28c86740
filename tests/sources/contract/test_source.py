"""`Source`: three members make a source; its samples by number, in loaders and in a DataLoader of torch."""

from multiprocessing import resource_tracker

import numpy as np
import pytest
import torch
from support.sources.parted import numbered
from support.sources.squares import ROWS, Squares
from torch.utils.data import DataLoader, TensorDataset

from lit_async_data import AsyncLoader, DatasetSource, HDF5Source, Source, SubsetSource, split
from lit_async_data.errors import MissingError
from lit_async_data.sources.contract.source import Part
from lit_async_data.testing import ArraySource

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
    pair = DatasetSource(TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3)))
    assert pair[1][0].tolist() == [2.0, 3.0]
    with pytest.raises(TypeError, match="not iterable"):  # it is no loader
        iter(pair)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataloader_takes_a_source_also_where_its_files_are_open(h5, method):
    images = np.random.default_rng(0).integers(0, 256, (ROWS, 3, 8, 8), np.uint8)
    packed = {"data": images, "chunks": (16, 3, 8, 8), "compression": "gzip"}
    files = [h5(f"{part}.h5", data=packed, labels=np.arange(ROWS) % 7) for part in range(2)]
    whole = HDF5Source(files, {"x": "data", "y": "labels"})
    source = SubsetSource(whole, np.arange(0, 2 * ROWS, 3))
    first = source[0]  # opens the files, before a fork
    loader = DataLoader(source, batch_size=16, num_workers=1, multiprocessing_context=method)
    batches = list(loader)
    assert torch.equal(batches[0]["x"][0], torch.from_numpy(first["x"]))
    labels = torch.cat([batch["y"] for batch in batches])
    assert labels.tolist() == [number % ROWS % 7 for number in range(0, 2 * ROWS, 3)]
    with AsyncLoader(source, {"batch_size": 16, "shuffle": False}) as ours:
        for mine, theirs in zip(ours, batches):
            assert torch.equal(mine["x"], theirs["x"])
    source.close()


def test_a_subclass_without_its_three_members_says_which_are_missing():
    class Half(Source):
        def __len__(self):
            return 1

    with pytest.raises(TypeError, match=r"abstract.*read_into.*spec"):
        Half()


def test_a_subclass_of_three_members_trains_shuffled_split_and_drawn():
    source = Squares()
    assert repr(source) == f"<Squares of {ROWS} samples: y int64, x float32 (3,); read by Python code>"
    with AsyncLoader(source, {"batch_size": 50, "shuffle": True, "return_indices": True, "workers": 1}) as loader:
        batches = list(loader)
    indices = torch.cat([batch["index"] for batch in batches])
    assert sorted(indices.tolist()) == list(range(ROWS))
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), indices**2)
    sides = split(source, {"train": 0.5, "val": 0.5}, groups="y")
    assert sum(map(len, sides.values())) == ROWS
    assert source.locate([7])[0] == ("Squares", "/", 7)


def test_a_source_without_parts_is_one_part_without_a_name():
    source = ArraySource({"x": np.zeros((5, 2)), "y": np.arange(5)})
    assert source.parts == (Part("ArraySource", "/", "", 5),)
    assert source.chunks.overlap == 0
    assert source.column("y").tolist() == [0, 1, 2, 3, 4]
    for name in ("x", "z"):
        with pytest.raises(MissingError, match=f"ArraySource: no field '{name}' .*: y$"):
            source.column(name)


def test_a_column_is_read_piece_by_piece(monkeypatch):
    monkeypatch.setattr("lit_async_data.sources.contract.source.BLOCK_SAMPLES", 3)
    assert numbered(8).column("y").tolist() == list(range(8))
