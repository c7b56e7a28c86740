"""NaN in the first batch: counted and logged once, whoever reads it and wherever it goes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.device.training_loop import pretend

from lit_async_data import AsyncDataModule, AsyncLoader, HDF5Source
from lit_async_data.host.nan_check import with_nan
from lit_async_data.sources.composed.subset import SubsetSource
from lit_async_data.testing import ArraySource, FakeStreams


def source(bad=(1, 2), dtype=np.float32, **arrays):
    values = np.ones((12, 2, 3), dtype)
    for sample in bad:
        values[sample, 1, 2] = np.nan
    return ArraySource({"x": values, "y": np.arange(12), **arrays})


def warned(caplog):
    return [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]


@pytest.mark.parametrize("options", [{}, {"workers": 0}, {"workers": 2}, {"queue_depth": 1}, {"return_indices": True}])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_nan_in_the_first_batch_is_counted_and_logged_once(caplog, options, dtype):
    chosen = {"batch_size": 4, "shuffle": False, **options}
    with AsyncLoader(source((1, 3, 4, 11), dtype), chosen) as loader:
        for _ in range(2):
            assert len(list(loader)) == 3
        loader.device_depth = 0  # whatever reads from here on is new
        list(loader)
    (line,) = warned(caplog)
    assert line.startswith("x: 2 of the 4 samples of the first batch hold NaN, the first in row 1 of ArraySource; ")
    assert "torch.nan_to_num" in line


def test_nothing_is_logged_where_the_first_batch_holds_none(caplog):
    infinite = np.ones((12, 4), np.float32)
    infinite[0] = [np.inf, -np.inf, 1, 1]
    many = np.full((12, 9), np.finfo(np.float16).max, np.float16)  # of which the sum is infinite
    with AsyncLoader(source((4, 11), z=infinite, w=many), {"batch_size": 4, "shuffle": False}) as loader:
        for _ in range(2):
            list(loader)
    assert not warned(caplog)


def test_each_field_has_a_line(caplog):
    labels = np.array([np.nan] * 3 + [0.5] * 9)
    with AsyncLoader(source(z=labels), {"batch_size": 4, "shuffle": False}) as loader:
        next(loader)
    assert [line.split(" samples")[0] for line in warned(caplog)] == ["x: 2 of the 4", "z: 3 of the 4"]


def test_the_first_batch_is_the_first_of_the_order(caplog):
    with AsyncLoader(source(range(12)), {"batch_size": 5, "shuffle": True, "return_indices": True}) as loader:
        loader.set_epoch(3)  # as after a resume
        first = next(loader)["index"][0].item()
    (line,) = warned(caplog)
    assert line.startswith(f"x: 5 of the 5 samples of the first batch hold NaN, the first in row {first} of ")


def test_the_row_is_that_of_the_file(caplog, h5):
    path = h5("x.h5", data=np.array([[1.0], [2.0], [np.nan]]))
    with AsyncLoader(SubsetSource(HDF5Source(path, ["data"]), [2, 0]), {"batch_size": 2, "shuffle": False}) as loader:
        next(loader)
    (line,) = warned(caplog)
    assert f"the first in row 2 of {path}; " in line


def test_each_stage_has_a_line(caplog):
    dm = AsyncDataModule(train=source(), val=[source(), source((0,))], loader={"batch_size": 4, "shuffle": False})
    with contextlib.closing(dm):
        list(dm.train_dataloader())
        for loader in dm.val_dataloader():
            list(loader)
    assert [line[:10] for line in warned(caplog)] == ["x: 2 of th", "x: 2 of th", "x: 1 of th"]


def test_batches_for_a_device_are_looked_at_on_the_host(caplog, monkeypatch):
    streams = FakeStreams("side")
    pretend(monkeypatch, lambda device: streams)
    with AsyncLoader(source(), {"batch_size": 4, "shuffle": False}) as loader:
        for _ in range(2):
            for _ in loader:
                streams.synchronize()
    assert len(warned(caplog)) == 1


def test_what_holds_no_floats_holds_no_nan():
    assert not with_nan(np.full((3, 2), 2**62)).any()
    assert with_nan(np.zeros((3, 0, 2), np.float32)).tolist() == [False] * 3
    assert with_nan(np.zeros((0, 2), np.float32)).tolist() == []
    assert with_nan(np.array([np.nan, 1.0])).tolist() == [True, False]
