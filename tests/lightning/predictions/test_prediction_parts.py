"""Parts of simulated ranks, and what becomes of them: merging, completeness, the folder."""

from __future__ import annotations

import os
import shutil

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lightning.predictions import Rank, check_files, numbered, predict_with_ranks, predicted_of, rows_in

from lit_async_data import SubsetSource
from lit_async_data.device import streams as device_streams
from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, MissingError
from lit_async_data.host.resources import memory
from lit_async_data.lightning.predictions import arrays, ranks, tables
from lit_async_data.lightning.predictions.folder import ResultFolder
from lit_async_data.lightning.predictions.values import HostCopies, PredictedField, field_of
from lit_async_data.order.plan import EpochPlan
from lit_async_data.testing import FakeStreams

# -- ranks and order ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=25)
def test_parts_of_any_ranks_and_batches_merge_into_the_order_of_the_dataset(tmp_path_factory, count, more, size, steps):
    samples = count - 1 + more  # at least one for each rank
    path = tmp_path_factory.mktemp("base") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "GROUP_ROWS", 3 * count)  # several row groups, and several pieces of arrays
        patch.setattr(arrays, "MERGED_BYTES", 40_000)
        first = predict_with_ranks(path, count, samples, batch_size=size, steps=steps)
        first.finish()
    dealt = np.concatenate([samples_of(size, rank, count, samples, steps) for rank in range(count)])
    check_files(path, sorted(dealt.tolist()))
    assert first.predictions.total == len(dealt)
    assert os.listdir(path.parent) == ["out"]
    assert sorted(os.listdir(path)) == ["predictions.h5", "predictions.parquet"]


def samples_of(size, rank, count, samples, steps):
    """The samples of the first batches of a rank."""
    options = {"length": samples, "batch_size": size, "shuffle": "none", "seed": 0, "epoch": 0}
    plan = EpochPlan(**options, rank=rank, world_size=count)
    return plan.stretch(0, min(steps, len(plan)))[0]


def test_the_predictions_of_a_subset_have_the_numbers_of_the_whole_source_in_the_order_of_the_subset(tmp_path):
    chosen = [7, 3, 3, 9, 0]
    subset = SubsetSource(numbered(10), chosen)
    every = [Rank(tmp_path / "out", rank, 2, 5, batch_size=2, source=subset) for rank in range(2)]
    for rank, each in enumerate(every):
        each.predict(predicted=torch.from_numpy)  # positions in the subset
        assert os.path.exists(tmp_path / f"out.partial/predictions.part-{rank}.parquet")
    every[0].finish()
    rows = rows_in(tmp_path / "out")
    assert rows["sample"] == rows["row"] == chosen
    assert rows["prediction"] == [0, 1, 2, 3, 4]


def test_row_groups_of_the_merged_table_hold_the_rows_of_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "GROUP_ROWS", 6)
    predict_with_ranks(tmp_path / "out", 3, 20).finish()
    with pyarrow.parquet.ParquetFile(tmp_path / "out/predictions.parquet") as file:
        assert [file.metadata.row_group(number).num_rows for number in range(4)] == [6, 6, 6, 2]


def test_masks_are_compressed_sample_by_sample_and_merged_without_being_decompressed(tmp_path, monkeypatch):
    rank = predict_with_ranks(tmp_path / "out", 2, 9)
    with h5py.File(tmp_path / "out.partial/predictions.part-1.h5") as part:
        stored = [part["mask"].id.read_direct_chunk((row, 0, 0)) for row in range(4)]
    monkeypatch.setattr(h5py.Dataset, "__setitem__", only_contiguous(h5py.Dataset.__setitem__))
    rank.finish()
    with h5py.File(tmp_path / "out/predictions.h5") as file:
        assert file["mask"].chunks == (1, 64, 64)
        assert file["points"].chunks is None
        assert [file["mask"].id.read_direct_chunk((row, 0, 0)) for row in (1, 3, 5, 7)] == stored
        assert file["mask"].id.get_storage_size() < 9 * 64 * 64 / 20


def only_contiguous(original):
    def write(dataset, *arguments):
        assert dataset.chunks is None, "a compressed dataset was written through its filters"
        original(dataset, *arguments)

    return write


# -- completeness ------------------------------------------------------------------------------------------------------


def part(path, rank, suffix="parquet"):
    return f"{path}.partial/predictions.part-{rank}.{suffix}"


@pytest.mark.parametrize("suffix", ["parquet", "h5"])
@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda of: os.unlink(of(1)), MissingError, ": missing; predict again"),
        (
            lambda of: shutil.copy(of(0), of(1)),
            MissingError,
            "of 12 samples, missing: 1, 4, 7, … (4 in all); too often: 0, 3, 6, … (4 in all)",
        ),
        (
            lambda of: (os.rename(of(1), of(9)), os.rename(of(2), of(1)), os.rename(of(9), of(2))),
            CorruptError,
            "of 12 samples, some not at their places",
        ),
    ],
    ids=["lost", "duplicated", "exchanged"],
)
def test_parts_that_do_not_have_each_sample_once_are_refused(tmp_path, suffix, damage, kind, message):
    rank = predict_with_ranks(tmp_path / "out", 3, 12, batch_size=2)
    damage(lambda number: part(tmp_path / "out", number, suffix))
    with pytest.raises(kind) as caught:
        rank.finish()
    assert message in str(caught.value)
    assert str(caught.value).endswith("predict again")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_a_rank_that_ended_early_is_missed(tmp_path, count):
    every = [Rank(tmp_path / "out", rank, count, 20, batch_size=2) for rank in range(count)]
    for each in every[:-1]:
        each.predict()
    every[-1].predict(steps=3)
    with pytest.raises(MissingError, match="of 20 samples, missing: ") as caught:
        every[0].finish()
    assert ("13, 15, 17" if count == 2 else "6, 7, 8") in str(caught.value)


def test_a_part_with_more_samples_than_the_rank_has_is_refused(tmp_path):
    more = predict_with_ranks(tmp_path / "more", 2, 16)
    rank = predict_with_ranks(tmp_path / "out", 2, 12)
    shutil.copy(part(tmp_path / "more", 1), part(tmp_path / "out", 1))
    with pytest.raises(CorruptError, match="too often: 13, 15"):
        rank.finish()
    more.folder.release()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"score": torch.zeros(2)}, "out.partial: predictions.part-1.h5: missing"),
        (
            {"mask": torch.zeros(2, 3, 4)},
            "part-1.h5: file text (), mask float32 (3, 4), row int64 (), sample int64 (); but",
        ),
    ],
)
def test_ranks_that_predict_different_things_are_refused(tmp_path, other, message):
    every = [Rank(tmp_path / "out", rank, 2, 4, batch_size=2) for rank in range(2)]
    for each, predicted in zip(every, ({"mask": torch.zeros(2, 3, 3)}, other)):
        each.predict(predicted=lambda _, predicted=predicted: predicted)
    with pytest.raises(AsyncDataError) as caught:
        every[0].finish()
    assert message in str(caught.value)


def test_a_part_that_only_one_rank_has_is_refused(tmp_path):
    every = [Rank(tmp_path / "out", rank, 2, 4, batch_size=2) for rank in range(2)]
    every[0].predict(predicted=lambda samples: samples)
    every[1].predict()
    with pytest.raises(ConfigError, match=r"predictions.part-1.h5: rank 0 has no such part"):
        every[0].finish()


def test_without_a_single_prediction_there_is_no_result(tmp_path):
    rank = Rank(tmp_path / "out", 0, 1, 4)
    rank.predict(steps=0)
    with pytest.raises(MissingError, match="predict_step was not called"):
        rank.finish()


# -- the folder --------------------------------------------------------------------------------------------------------


def test_what_a_dead_run_left_is_cleared(tmp_path):
    Rank(tmp_path / "out", 0, 1, 12).folder.release()
    (tmp_path / "out.partial/predictions_3.part-17.h5").write_text("half")
    (tmp_path / "out.partial/predictions.parquet").write_text("half")
    predict_with_ranks(tmp_path / "out", 1, 5).finish()
    check_files(tmp_path / "out", range(5))
    assert sorted(os.listdir(tmp_path / "out")) == ["predictions.h5", "predictions.parquet"]


def test_files_of_others_in_the_temporary_folder_are_not_touched(tmp_path):
    (tmp_path / "out.partial").mkdir()
    for name in ("predictions.h5", "mine.txt"):
        (tmp_path / "out.partial" / name).write_text("x")
    with pytest.raises(ConfigError, match=r"mine.txt is not of PredictionWriter"):
        ResultFolder(tmp_path / "out").begin()
    assert sorted(os.listdir(tmp_path / "out.partial")) == ["mine.txt", "predictions.h5"]


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    first, second = ResultFolder(tmp_path / "out"), ResultFolder(tmp_path / "out")
    first.begin()
    with pytest.raises(ConfigError, match="another run is writing to"):
        second.begin()
    first.release()
    second.begin()
    second.release()


def test_a_result_that_appears_meanwhile_is_not_overwritten(tmp_path):
    rank = predict_with_ranks(tmp_path / "out", 1, 5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/theirs").write_text("x")
    with pytest.raises(
        AsyncDataError, match=r"not empty; the predictions are complete and lie in .*out.partial: rename"
    ):
        rank.finish()
    assert os.listdir(tmp_path / "out") == ["theirs"]
    os.rename(tmp_path / "out.partial", tmp_path / "mine")
    check_files(tmp_path / "mine", range(5))


def test_a_link_or_a_mount_point_is_refused_since_no_folder_can_be_renamed_to_it(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "there")
    with pytest.raises(ConfigError, match="out exists"):
        ResultFolder(tmp_path / "out").check_free()
    with pytest.raises(ConfigError, match="path: /proc is a mount point"):
        ResultFolder("/proc/").check_free()


# -- rank 0 and the others ---------------------------------------------------------------------------------------------


class Strategy:
    """Records what a rank says, and lets it hear what rank 0 says."""

    def __init__(self, heard=None):
        self.heard, self.said = heard, []

    def broadcast(self, word):
        self.said.append(word)
        return word if self.heard is None else self.heard.pop(0)


class Trainer:
    def __init__(self, strategy, *, is_global_zero):
        self.strategy, self.is_global_zero = strategy, is_global_zero


def test_rank_zero_gives_signs_of_life_while_it_works(monkeypatch):
    monkeypatch.setattr(ranks, "BEAT_S", -1.0)
    rank_0, rank_1 = Strategy(), Strategy()
    ranks.on_rank_zero(Trainer(rank_0, is_global_zero=True), iter([None, None]))
    assert rank_0.said == [ranks.GOES_ON, ranks.GOES_ON, None]
    rank_1.heard = list(rank_0.said)
    ranks.on_rank_zero(Trainer(rank_1, is_global_zero=False), iter([]))
    assert len(rank_1.said) == len(rank_0.said)


def test_an_error_of_rank_zero_is_raised_on_every_rank():
    def failing():
        yield
        raise CorruptError("a part is wrong")

    rank_0, rank_1 = Strategy(), Strategy()
    with pytest.raises(CorruptError, match="a part is wrong"):
        ranks.on_rank_zero(Trainer(rank_0, is_global_zero=True), failing())
    rank_1.heard = list(rank_0.said)
    with pytest.raises(AsyncDataError, match="rank 0 failed: CorruptError: a part is wrong"):
        ranks.on_rank_zero(Trainer(rank_1, is_global_zero=False), failing())


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (torch.tensor([True, False]), "bool"),
        (torch.tensor([1, 2], dtype=torch.uint8), "uint8"),
        (torch.tensor([1, 2], dtype=torch.int16), "int16"),
        (torch.tensor([1, 2]), "int64"),
        (torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), "float32"),
        (torch.tensor([1.5, float("nan")], dtype=torch.float16), "float32"),
        (torch.tensor([1.5, 2.0]).to(torch.float8_e5m2), "float32"),
        (torch.tensor([1.5, float("inf")], dtype=torch.float64), "float64"),
        (torch.arange(8.0).reshape(2, 4)[:, ::2], "float32 (2,)"),
        (torch.arange(24, dtype=torch.float16).reshape(3, 4, 2).permute(2, 0, 1), "float16 (3, 4)"),
        (torch.ones(2, requires_grad=True), "float32"),
        (np.array([1, 2], ">i4"), "int32"),
        (np.array(["a", "bc"]), "text"),
        (["a", "bc"], "text"),
        (("a", "bc"), "text"),
    ],
)
def test_values_arrive_in_host_memory_as_they_are_stored(value, stored):
    field = field_of("p", value, 2, "here")
    assert str(field) == stored
    (there,) = HostCopies({"p": value}, {"p": field}, lambda device: None).values().values()
    if field.dtype is None:
        assert there == list(value)
    else:
        wanted = value.detach().double().numpy() if isinstance(value, torch.Tensor) else value
        assert (there.dtype, there.shape[1:]) == (field.dtype, field.shape)
        assert there.flags.c_contiguous
        np.testing.assert_array_equal(there.astype(float), wanted)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "p is None; return a tensor or array whose first axis is the samples"),
        (3.0, "p is of type float; return"),
        ([torch.zeros(1), torch.zeros(1)], "p is a list of 2 Tensor; return"),
        ((torch.zeros(2), "a"), "p is a tuple of 2 Tensor and str; return"),
        ([1, 2], "p is a list of 2 int; return"),
        ({"q": torch.zeros(2)}, "p is of type dict; return"),
        (torch.tensor(1.0), "p has a single number for a batch of 2 samples"),
        (torch.zeros(3, 2), "p has 3 values on its first axis for a batch of 2 samples"),
        (["a"], "p has 1 values on its first axis for a batch of 2 samples"),
        (torch.zeros(2, 0), r"p has shape \(2, 0\), which holds no value; leave it out"),
        (torch.zeros(2, dtype=torch.complex64), "p is of type torch.complex64; return bools, whole numbers or floats"),
        (torch.eye(2).to_sparse(), r"p is a tensor of layout torch.sparse_coo; return its to_dense\(\)"),
        (np.array([b"a", b"b"]), r"p is of type \|S1; return bools"),
        (np.array([1, "a"], object), "p is of type object; return bools"),
        (np.zeros(2, np.longdouble), "p is of type float128; return bools"),
    ],
)
def test_a_value_that_cannot_be_stored_is_refused(value, message):
    with pytest.raises(ConfigError, match=f"^here: {message}"):
        field_of("p", value, 2, "here")


@pytest.mark.parametrize("name", [".", "masks/left"])
def test_a_name_that_no_dataset_of_hdf5_can_have_is_refused(name):
    assert field_of(name, torch.zeros(2, 3), 2, "here").shape == (3,)
    with pytest.raises(ConfigError, match="a dataset of HDF5 cannot have this name"):
        field_of(name, torch.zeros(2, 3, 3), 2, "here")


class Device(FakeStreams):
    """A device that computes as late as possible, so that a missing wait gives zeros."""

    def __init__(self):
        super().__init__("compute")


def test_predictions_on_a_device_are_written_while_it_computes_the_next_batch(tmp_path, monkeypatch):
    device, kept = Device(), []
    monkeypatch.setattr(device_streams, "streams_of", lambda _: device)
    monkeypatch.setattr(memory, "allocated", lambda nbytes, *, pinned: np.zeros(nbytes, np.uint8))

    def predicted(samples):
        kept.append(torch.from_numpy(samples + 0.5))  # a kernel reads memory that is the device's until it has run
        return kept[-1]

    rank = Rank(tmp_path / "out", 0, 1, 12)
    written = []
    monkeypatch.setattr(tables.TablePart, "write", noted(written, tables.TablePart.write))
    for step in range(rank.steps):
        rank.predictions.add(step, predicted(rank.loader.order.batch(step).samples))
        assert len(written) == step  # the batch before
    rank.predictions.close()
    rank.finish()
    assert rows_in(tmp_path / "out")["prediction"] == (np.arange(12) + 0.5).tolist()


def noted(written, original):
    def write(self, columns):
        written.append(columns["sample"].tolist())
        original(self, columns)

    return write


def test_a_table_part_keeps_no_memory_of_the_model(tmp_path):
    part = tables.TablePart(str(tmp_path / "x.parquet"), ["sample"], {"p": PredictedField(np.dtype("f8"), (2,))})
    buffer = np.zeros((2, 2))
    for number in range(3):
        buffer[:] = number
        part.write({"sample": np.arange(2), "p": buffer})
    part.close()
    part.close()
    assert [row[0] for row in rows_in(tmp_path, "x")["p"]] == [0, 0, 1, 1, 2, 2]


def test_predictions_that_differ_between_batches_are_refused(tmp_path):
    rank = Rank(tmp_path / "out", 0, 1, 12)
    rank.predictions.add(0, predicted_of(range(4)))
    with pytest.raises(
        ConfigError, match=r"^predictions: predict_step, batch 1: p int64; but it began with score float64"
    ):
        rank.predictions.add(1, {"p": torch.arange(4)})
    rank.predictions.abandon()
    rank.predictions.abandon()
    assert pyarrow.parquet.read_metadata(part(tmp_path / "out", 0)).num_rows == 4  # what there is can be read
    rank.folder.release()
