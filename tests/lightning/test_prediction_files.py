"""What simulated ranks write into files, and how these are merged."""

import os

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lightning.predictions import check_files, numbered, predict_with_ranks, rows_in

from lit_async_data.lightning import prediction_files as parts
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
