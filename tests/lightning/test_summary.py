"""The lines that describe a loader before training."""

import h5py
import numpy as np
from support.lightning.datamodules import source

from lit_async_data import AsyncLoader, Balanced, HDF5Source
from lit_async_data.lightning.display import summary_lines
from lit_async_data.sources.hdf5.readers import part_reader
from lit_async_data.testing import ArraySource


def test_what_will_happen_is_said_for_every_rank():
    with AsyncLoader(source(10_000), {"batch_size": 128, "shuffle": True}, rank=3, world_size=8) as loader:
        first, second, third = summary_lines(loader)
    assert first.startswith("10,000 samples from ")
    assert first.endswith(": x float32 (3,)")
    assert second == (
        "batch 128 × 8 ranks = 1024, 10 steps, seed 0, shuffle global: every sample is read alone, once per epoch"
    )
    assert third.startswith(
        "1 reader thread (a test of threads), queue depth 4: 5 slots of 1.5 KiB = 7.5 KiB, of at most "
    )


def test_the_price_of_a_shuffle_over_compressed_chunks_is_said(tmp_path, caplog, monkeypatch):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.zeros((6400, 4), "u1"), chunks=(64, 4), compression="gzip")
    source = HDF5Source(path, ["data"])
    with AsyncLoader(source, {"batch_size": 10, "shuffle": "global"}) as loader:
        assert "shuffle global: each chunk is decoded once and kept" in summary_lines(loader)[1]
    monkeypatch.setattr(part_reader, "RECENT_BYTES", 0)  # as if the file were larger
    with AsyncLoader(source, {"batch_size": 10, "shuffle": "global"}) as loader:
        assert (
            "61.2 samples are decoded for each one used, since 64 share a compressed chunk" in summary_lines(loader)[1]
        )
        assert not caplog.messages
        next(loader)
        assert "shuffle=global decodes 61.2 samples for each one used, since 64 share" in caplog.messages[0]
    caplog.clear()
    with AsyncLoader(source, {"batch_size": 10, "shuffle": "global", "cache_bytes": 10**6}) as loader:
        assert "shuffle global: each chunk is decoded once and kept" in summary_lines(loader)[1]
        assert "25.0 KiB cache" in summary_lines(loader)[2]
    with AsyncLoader(source, {"batch_size": 10, "shuffle": True, "shuffle_chunks": 5, "workers": 2}) as loader:
        assert summary_lines(loader)[1] == (
            "batch 10, 640 steps, seed 0, shuffle chunk: a batch draws from about 5 of 100 chunks; "
            "every chunk is decoded once per epoch; decoded chunks take 4.8 KiB"
        )
        assert "5 slots of 1.5 KiB + 4.8 KiB decoded = 12.3 KiB" in summary_lines(loader)[2]
    assert not caplog.messages


def test_a_footprint_follows_what_is_set_later():
    with AsyncLoader(source(), {"batch_size": 10}) as loader:
        assert loader.footprint.workers.threads == 1
        loader.device_depth = 0
        assert loader.footprint.workers.threads == 0
        loader.device_depth = 2
        assert loader.footprint.workers.threads == 1


def test_samples_that_are_drawn_are_not_said_to_be_read_once():
    source = ArraySource({"x": np.zeros((100, 2)), "y": np.arange(100) % 3})
    with AsyncLoader(source, {"batch_size": 10, "weights": Balanced("y")}) as loader:
        assert summary_lines(loader)[1].endswith(
            "100 samples drawn by balanced y, seed 0, shuffle global: every sample is read alone, each time it is drawn"
        )
