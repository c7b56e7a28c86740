"""What simulated ranks write, how it is merged, and which values can be stored."""

import os

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lightning.predictions import (
    arrays_in,
    check_files,
    numbered,
    predict_with_ranks,
    predicted_of,
    ranks_of,
    rows_in,
)

from lit_async_data import HDF5Source, SubsetSource
from lit_async_data.errors import ConfigError
from lit_async_data.lightning import prediction_files as parts
from lit_async_data.lightning.predictions import fields_of, predicted
from lit_async_data.order.plan import EpochPlan


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=25)
def test_parts_of_any_ranks_and_batches_merge_into_the_order_of_the_dataset(tmp_path_factory, count, more, size, steps):
    samples = count - 1 + more  # at least one for each rank
    path = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "HELD_BYTES", 3 * count * 64 * 64)  # several pieces
        predict_with_ranks(path, count, numbered(samples), batch_size=size, steps=steps)
    dealt = np.concatenate([samples_of(size, rank, count, samples, steps) for rank in range(count)])
    check_files(path, sorted(dealt.tolist()))
    assert sorted(os.listdir(path)) == ["predictions.h5", "predictions.parquet"]


def samples_of(size, rank, count, samples, steps):
    """The samples of the first batches of a rank."""
    options = {"length": samples, "batch_size": size, "shuffle": "none", "seed": 0, "epoch": 0}
    plan = EpochPlan(**options, rank=rank, world_size=count)
    return plan.stretch(0, min(steps, len(plan)))[0]


def test_the_predictions_of_a_subset_have_the_numbers_of_the_whole_source_in_the_order_of_the_subset(tmp_path):
    chosen = [7, 3, 3, 9, 0]
    predict_with_ranks(tmp_path, 2, SubsetSource(numbered(10), chosen), torch.from_numpy, batch_size=2)
    rows = rows_in(tmp_path)
    assert rows["sample"] == rows["row"] == chosen
    assert rows["prediction"] == [0, 1, 2, 3, 4]  # positions in the subset


def test_row_groups_hold_the_rows_of_all_ranks_and_not_more_than_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "HELD_BYTES", 6 * (3 * 8 + parts.TEXT_BYTES))  # sample, row, prediction and file
    predict_with_ranks(tmp_path, 3, numbered(20), torch.from_numpy)
    with pyarrow.parquet.ParquetFile(tmp_path / "predictions.parquet") as file:
        assert [file.metadata.row_group(number).num_rows for number in range(4)] == [6, 6, 6, 2]


def test_masks_are_compressed_sample_by_sample_and_merged_without_being_decompressed(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "read_chunk", lambda source, place: (0, b"%d of %d" % (place[0], len(source))))
    predict_with_ranks(tmp_path, 2, numbered(9))
    with h5py.File(tmp_path / "predictions.h5") as file:
        assert file["mask"].chunks == (1, 64, 64)
        assert file["points"].chunks is None
        stored = [file["mask"].id.read_direct_chunk((row, 0, 0))[1] for row in range(9)]
    assert stored == [b"%d of %d" % (row // 2, (5, 4)[row % 2]) for row in range(9)]


def test_a_buffer_that_is_used_again_for_the_next_batch_is_copied(tmp_path):
    buffer = torch.zeros(4, dtype=torch.int64)
    again = {"a": buffer, "b": buffer[:, None]}
    predict_with_ranks(tmp_path, 1, numbered(12), lambda samples: [again, buffer.copy_(torch.from_numpy(samples))][0])
    rows = rows_in(tmp_path)
    assert rows["a"] == [row[0] for row in rows["b"]] == list(range(12))


def test_a_file_whose_name_is_no_text_is_named_with_its_bytes(tmp_path):
    name = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"\xe4 \xc3\xb6.h5"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["y"] = np.arange(5)
    try:
        os.rename(tmp_path / "x.h5", name)
    except OSError:
        pytest.skip("this file system takes only names that are text")
    predict_with_ranks(tmp_path, 1, HDF5Source(name, {"y": "y"}))
    for rows in (rows_in(tmp_path), arrays_in(tmp_path)):
        assert {os.path.basename(each) for each in rows["file"]} == {"\\xe4 ö.h5"}


def test_a_rank_that_ended_early_or_predicts_something_else_has_a_fault(tmp_path):
    (first, _), (second, loader) = ranks_of(tmp_path, 2, numbered(16))
    for step in range(2):
        first.add(step, {"score": np.zeros(4)})
    assert first.fault(str(first)) == ""
    assert second.fault(str(first)) == "predict_step was called for 0 of 2 batches"
    second.add(0, predicted_of(loader.order.batch(0)))
    assert second.fault(str(first)) == "predict_step was called for 1 of 2 batches"
    second.add(1, predicted_of(loader.order.batch(1)))
    assert second.fault(str(first)).endswith("; but on rank 0 16 of 16 samples: score float64")


def test_batches_come_once_and_in_order(tmp_path):
    ((predictions, _),) = ranks_of(tmp_path, 1, numbered(16))
    predictions.add(0, torch.zeros(4))
    for step in (0, 2):
        with pytest.raises(ConfigError, match=f"predict_step, batch {step}: batch 1 comes next"):
            predictions.add(step, torch.zeros(4))


def test_predictions_that_differ_between_batches_are_refused(tmp_path):
    ((predictions, _),) = ranks_of(tmp_path, 1, numbered(12))
    predictions.add(0, predicted_of(range(4)))
    with pytest.raises(ConfigError, match=r"predict_step, batch 1: p int64; but it began with score float64"):
        predictions.add(1, {"p": torch.arange(4)})


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), "float32"),
        (torch.tensor([1.5, 2.0]).to(torch.float8_e5m2), "float32"),
        (torch.tensor([1.5, float("inf")], dtype=torch.float64), "float64"),
        (torch.arange(8.0).reshape(2, 4)[:, ::2], "float32 (2,)"),
        (torch.arange(24, dtype=torch.float16).reshape(3, 4, 2).permute(2, 0, 1), "float16 (3, 4)"),
        (torch.eye(2).to_sparse(), "float32 (2,)"),
        (torch.ones(2, requires_grad=True), "float32"),
        (np.array([1, 2], ">i4"), "int32"),
        (np.array(["a", "bc"]), "text"),
        (("a", "bc"), "text"),
    ],
)
def test_values_are_in_host_memory_as_they_are_stored(value, stored):
    there = predicted({"p": value}, 2, "here")
    assert str(fields_of(there)["p"]) == stored
    if stored == "text":
        assert there["p"] == ["a", "bc"]
    else:
        wanted = value.detach().to_dense().double().numpy() if isinstance(value, torch.Tensor) else value
        np.testing.assert_array_equal(there["p"].astype(float), wanted)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "prediction is of type NoneType; return a tensor or array whose first axis is the samples"),
        ((torch.zeros(2), "a"), "prediction is of type tuple; return"),
        ({}, "an empty dict; return"),
        ({1: torch.zeros(2)}, "1 cannot be the name of a prediction"),
        ({"sample": torch.zeros(2)}, "'sample' cannot be the name of a prediction"),
        ({"p": torch.tensor(1.0)}, "p is a single number; return"),
        ({"p": torch.zeros(3, 2)}, r"p has 3 values of shape \(2,\) for a batch of 2 samples"),
        ({"p": torch.zeros(2, 0)}, r"p has 2 values of shape \(0,\) for a batch of 2 samples"),
        ({"p": torch.zeros(2, dtype=torch.complex64)}, "p is of type complex64; return bools, whole numbers or floats"),
        ({"p": np.array([1, "a"], object)}, "p is of type object; return bools"),
        ({"masks/left": torch.zeros(2, 3, 3)}, "'masks/left' cannot be a dataset of HDF5"),
    ],
)
def test_what_cannot_be_stored_is_refused(outputs, message):
    with pytest.raises(ConfigError, match=f"^here: {message}"):
        predicted(outputs, 2, "here")
