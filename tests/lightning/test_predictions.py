"""`PredictionWriter` in the Trainer and on simulated ranks, and which values it can store."""

import os

import h5py
import numpy as np
import pyarrow as pa
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
from support.lightning.trainer import NO_STAGES, pl, trainer
from support.plans import plan_of
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.lightning import predictions as parts
from lit_async_data.lightning.predictions import fields_of, predicted

pytestmark = [NO_STAGES, pytest.mark.filterwarnings("ignore:(.*does not have many workers|predict returned None)")]


class Predictor(pl.LightningModule):
    def __init__(self, predicted=predicted_of):
        super().__init__()
        self.predicted = predicted

    def predict_step(self, batch, number, dataloader_idx=0):
        return self.predicted(batch["y"])


def module(source, **options):
    return lad.AsyncDataModule(predict=source, loader={"batch_size": 4, "queue_depth": 3, "timeout_s": 60} | options)


def predict(path, source, predicted=predicted_of, callbacks=(), **options):
    """Predicts into a folder, and asserts that nothing else is left."""
    runs = trainer(lad.PredictionWriter(path), *callbacks, **options)
    runs.predict(Predictor(predicted), datamodule=module(source), return_predictions=False)
    assert not os.path.exists(f"{path}.partial")


@pytest.mark.parametrize(
    ("samples", "callbacks"), [(1, []), (4, [lad.DevicePrefetcher]), (22, []), (22, [lad.DevicePrefetcher])]
)
def test_predictions_come_back_in_the_order_of_the_dataset(tmp_path, samples, callbacks):
    predict(tmp_path / "out", numbered(samples), callbacks=[kind() for kind in callbacks])
    check_files(tmp_path / "out", range(samples))


def test_windows_in_groups_of_several_files_have_their_places(tmp_path):
    for file in range(2):
        with h5py.File(tmp_path / f"{file}.h5", "w") as rec:
            for group in range(2):
                rec[f"patient_{group}/data"] = np.arange(10 + file)
    source = lad.HDF5Source(tmp_path / "*.h5", {"y": lad.Field("data", window=(0, 3))}, group="patient_*", stride=3)
    predict(tmp_path / "out", source, lambda y: {"mean": y.double().mean(1), "mask": y[:, None].expand(-1, 2, 3)})
    rows, arrays = rows_in(tmp_path / "out"), arrays_in(tmp_path / "out")
    located = source.locate(source.ids(np.arange(len(source))))
    for found in (rows, arrays):
        assert found.keys() == {"sample", "file", "group", "row", "mean" if found is rows else "mask"}
        for name in ("file", "group", "row"):
            assert list(found[name]) == [getattr(each, name) for each in located]
    assert [row + 1 for row in rows["row"]] == rows["mean"]


def test_samples_with_and_without_ids_leave_the_column_empty_where_there_is_none(tmp_path):
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", np.full(2, number))
    names = [f"{number}.npy" for number in range(6)]
    table = pa.table({"id": [f"00{n}" for n in range(6)], "path": names, "good": [1, 1, 0, 1, 1, 1]})
    birds = lad.ManifestSource(table, {"y": "path"}, root=tmp_path, id="id", filters=[["good", "==", 1]])
    h5py.File(tmp_path / "x.h5", "w").create_dataset("g/y", data=np.zeros((3, 2), np.int64))
    source = lad.ConcatSource([birds, lad.HDF5Source(tmp_path / "x.h5", {"y": "y"}, group="g")])
    predict(tmp_path / "out", source, lambda y: {"first": y[:, 0], "mask": y[:, None]})
    rows, arrays = rows_in(tmp_path / "out"), arrays_in(tmp_path / "out")
    assert list(rows)[:6] == ["sample", "file", "group", "row", "id", "path"]
    assert rows["id"][4:] == ["005", None, None, None]
    assert arrays["id"][4:] == ["005", "", "", ""]
    assert rows["group"] == ["/"] * 5 + ["/g"] * 3


def test_each_of_several_sources_has_its_own_files(tmp_path):
    predict(tmp_path / "out", [numbered(9), numbered(3)], lambda y: y + 1)
    assert rows_in(tmp_path / "out", "predictions_0")["prediction"] == list(range(1, 10))
    assert rows_in(tmp_path / "out", "predictions_1")["prediction"] == [1, 2, 3]


def test_a_limit_writes_what_was_predicted_and_says_how_many(tmp_path, caplog):
    caplog.set_level("INFO")
    predict(tmp_path / "out", numbered(22), limit_predict_batches=2)
    check_files(tmp_path / "out", range(8))
    (line,) = [record.message for record in caplog.records if "predictions of" in record.message]
    assert line.startswith(f"{tmp_path}/out: predictions of 8 of 22 samples: score float64, classes float32 (3,), text")


def test_what_fills_a_short_batch_is_not_written(tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    data, seen = lad.AsyncDataModule(predict=numbered(6), loader={"batch_size": 4, "pad_last": True}), []
    assert [len(batch["y"]) for batch in data.predict_dataloader()] == [4, 2]
    data = lad.AsyncDataModule(predict=numbered(6), loader={"batch_size": 4}, predict_loader={"pad_last": True})
    runs = trainer(lad.PredictionWriter(tmp_path / "out"))
    runs.predict(Predictor(lambda y: (seen.append(len(y)), predicted_of(y))[1]), data, return_predictions=False)
    check_files(tmp_path / "out", range(6))
    assert seen == [4, 4]


@pytest.mark.filterwarnings("ignore:Your `predict_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "global"}, "predict loader 0 shuffles or drops samples; set shuffle=False"),
        ({"shuffle": False, "drop_last": True}, "predict loader 0 shuffles or drops samples; set shuffle=False"),
        ({"on_error": "substitute"}, "on_error: .*replaces bad samples by other ones; set on_error=skip"),
        ({"shuffle": False, "rank": 1}, "predict loader 0 has rank 1 of 2, and the Trainer another"),
    ],
)
def test_a_loader_that_has_not_each_sample_once_in_order_is_refused(tmp_path, options, message):
    ranks = {"rank": options.pop("rank"), "world_size": 2} if "rank" in options else {}
    loader = lad.AsyncLoader(numbered(10), {"batch_size": 4} | options, **ranks)
    with loader, pytest.raises(ConfigError, match=message):
        trainer(lad.PredictionWriter(tmp_path / "out")).predict(Predictor(), loader)
    assert os.listdir(tmp_path) == []


def test_a_dataloader_of_torch_is_refused_with_what_to_do(tmp_path):
    loader = DataLoader([{"y": torch.tensor(number)} for number in range(4)])
    with pytest.raises(ConfigError, match=r"predict loader 0 is a DataLoader, .* DatasetSource\(dataset\)"):
        trainer(lad.PredictionWriter(tmp_path / "out"), lad.DevicePrefetcher()).predict(Predictor(), loader)
    assert os.listdir(tmp_path) == []


def test_a_result_that_exists_is_refused_before_anything_is_predicted(tmp_path):
    predict(tmp_path / "out", numbered(6))
    called = []
    with pytest.raises(ConfigError, match=r"path: .*/out exists; move or delete it"):
        predict(tmp_path / "out", numbered(8), called.append)
    assert not called
    check_files(tmp_path / "out", range(6))


@pytest.mark.usefixtures("process_as_before")
@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError, RuntimeError), (KeyboardInterrupt, SystemExit), (StopIteration, MissingError)]
)
def test_a_run_that_ends_early_leaves_no_result_and_its_writer_starts_anew(tmp_path, error, raised):
    left = [2]

    def fails(y):
        left[0] -= 1
        if left[0] < 0:
            raise error("mine")
        return predicted_of(y)

    writer, dm = lad.PredictionWriter(tmp_path / "out"), module(numbered(22))
    with pytest.raises(raised) as caught:
        trainer(writer).predict(Predictor(fails), datamodule=dm, return_predictions=False)
    if raised is MissingError:
        assert str(caught.value).endswith("out: predict_step was called for 2 of 6 batches; predict again")
    assert os.listdir(tmp_path) == ["out.partial"]
    (tmp_path / "out.partial/predictions.part-7.h5").touch()
    for name in ("a", "b"):
        trainer(writer).predict(Predictor(), datamodule=dm, return_predictions=False)
        os.rename(tmp_path / "out", tmp_path / name)
        check_files(tmp_path / name, range(22))
        assert sorted(os.listdir(tmp_path / name)) == ["predictions.h5", "predictions.parquet"]


@pytest.mark.parametrize(("path", "said"), [(3, "is not the path of a folder"), ("s3://b/p", "an address, not a path")])
def test_what_is_no_path_is_refused(path, said):
    with pytest.raises(ConfigError, match=said):
        lad.PredictionWriter(path)


def test_the_predictions_of_a_subset_have_the_numbers_of_the_whole_source_in_the_order_of_the_subset(tmp_path):
    chosen = [7, 3, 3, 9, 0]
    predict_with_ranks(tmp_path, 2, lad.SubsetSource(numbered(10), chosen), torch.from_numpy, batch_size=2)
    rows = rows_in(tmp_path)
    assert rows["sample"] == rows["row"] == chosen
    assert rows["prediction"] == [0, 1, 2, 3, 4]  # positions in the subset


def test_a_mixture_is_refused_even_if_it_repeats_no_samples(tmp_path):
    mixture = lad.MixtureSource({"a": (numbered(8), 1), "b": (numbered(8), 1)})
    with pytest.raises(ConfigError, match=r"predict: .* would lose its shares; use its sources one"):
        predict(tmp_path / "out", mixture)
    assert os.listdir(tmp_path) == []


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


def test_batches_come_once_in_order_and_with_the_same_predictions(tmp_path):
    ((predictions, _),) = ranks_of(tmp_path, 1, numbered(16))
    predictions.add(0, predicted_of(range(4)))
    for step in (0, 2):
        with pytest.raises(ConfigError, match=f"predict_step, batch {step}: batch 1 comes next"):
            predictions.add(step, predicted_of(range(4)))
    with pytest.raises(ConfigError, match=r"predict_step, batch 1: p int64, but the first batch had score float64"):
        predictions.add(1, {"p": torch.arange(4)})


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), "float32"),
        (torch.arange(24, dtype=torch.float16).reshape(3, 4, 2).permute(2, 0, 1), "float16 (3, 4)"),
        (torch.eye(2).to_sparse(), "float32 (2,)"),
        (torch.ones(2, requires_grad=True), "float32"),
        (np.array([1, 2], ">i4"), "int32"),
        (np.array(["a", "bc"]), "text"),
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
        ({1: torch.zeros(2)}, "1 cannot be a name; give text other than sample, file"),
        ({"id": torch.zeros(2)}, "'id' cannot be a name; give text other than sample, file, group, row, id, path$"),
        ({"p": torch.tensor(1.0)}, "p is a single number; return"),
        ({"p": torch.zeros(3, 2)}, r"p has 3 values of shape \(2,\) for a batch of 2 samples"),
        ({"p": torch.zeros(2, dtype=torch.complex64)}, "p is of type complex64; return bools, whole numbers or floats"),
        ({"masks/left": torch.zeros(2, 3, 3)}, "'masks/left' cannot be a dataset of HDF5"),
    ],
)
def test_what_cannot_be_stored_is_refused(outputs, message):
    with pytest.raises(ConfigError, match=f"^here: {message}"):
        predicted(outputs, 2, "here")


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=25)
def test_parts_of_any_ranks_and_batches_merge_into_the_order_of_the_dataset(tmp_path_factory, count, more, size, steps):
    samples = count - 1 + more  # at least one for each rank
    path = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "HELD_BYTES", 3 * count * 64 * 64)  # several pieces
        predict_with_ranks(path, count, numbered(samples), batch_size=size, steps=steps)
    options = {"length": samples, "batch_size": size, "shuffle": "none", "epoch": 0, "world_size": count}
    plans = [plan_of(**options, rank=rank) for rank in range(count)]
    dealt = np.concatenate([plan.stretch(0, min(steps, len(plan)))[0].samples for plan in plans])
    check_files(path, sorted(dealt.tolist()))
    assert sorted(os.listdir(path)) == ["predictions.h5", "predictions.parquet"]


def test_row_groups_hold_the_rows_of_all_ranks_and_not_more_than_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "HELD_BYTES", 6 * (3 * 8 + parts.TEXT_BYTES))  # sample, row, prediction and file
    predict_with_ranks(tmp_path, 3, numbered(20), torch.from_numpy)
    with pyarrow.parquet.ParquetFile(tmp_path / "predictions.parquet") as file:
        assert [file.metadata.row_group(number).num_rows for number in range(4)] == [6, 6, 6, 2]


def test_a_buffer_that_is_used_again_for_the_next_batch_is_copied(tmp_path):
    buffer = torch.zeros(4, dtype=torch.int64)
    again = {"a": buffer, "b": buffer[:, None]}
    predict_with_ranks(tmp_path, 1, numbered(12), lambda samples: [again, buffer.copy_(torch.from_numpy(samples))][0])
    rows = rows_in(tmp_path)
    assert rows["a"] == [row[0] for row in rows["b"]] == list(range(12))
