"""`PredictionWriter` in the Trainer."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from support.lightning.predictions import arrays_in, check_files, numbered, predicted_of, rows_in, table_in
from support.lightning.trainer import NO_STAGES, CountingSource, Recorder, datamodule, pl, trainer
from support.ranks.processes import as_ranks, run_together
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.errors import ConfigError, MissingError

pytestmark = [
    NO_STAGES,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:predict returned None"),
]


class Predictor(pl.LightningModule):
    """Returns what ``predicted`` returns for the values of ``y``."""

    def __init__(self, predicted=predicted_of):
        super().__init__()
        self.predicted = predicted

    def predict_step(self, batch, number, dataloader_idx=0):
        return self.predicted(batch["y"])


def module(source, **options):
    return lad.AsyncDataModule(predict=source, loader={"batch_size": 4, "queue_depth": 3, "timeout_s": 30} | options)


def predict(path, source, predicted=predicted_of, callbacks=(), **options):
    """Predicts into a folder, and asserts that nothing else is left."""
    runs = trainer(lad.PredictionWriter(path), *callbacks, **options)
    runs.predict(Predictor(predicted), datamodule=module(source), return_predictions=False)
    assert not os.path.exists(f"{path}.partial")


@pytest.mark.parametrize("callbacks", [(), (lad.DevicePrefetcher,)], ids=["alone", "with DevicePrefetcher"])
@pytest.mark.parametrize("samples", [1, 3, 4, 22])
def test_predictions_come_back_in_the_order_of_the_dataset(tmp_path, samples, callbacks):
    predict(tmp_path / "out", numbered(samples), callbacks=[kind() for kind in callbacks])
    check_files(tmp_path / "out", range(samples))


def test_a_bare_tensor_becomes_the_column_prediction(tmp_path):
    predict(tmp_path / "runs/3/out", numbered(5), lambda y: y * 2)
    assert rows_in(tmp_path / "runs/3/out")["prediction"] == [0, 2, 4, 6, 8]
    assert os.listdir(tmp_path / "runs/3/out") == ["predictions.parquet"]


def test_masks_alone_make_no_table(tmp_path):
    predict(tmp_path / "out", numbered(5), lambda y: {"mask": y[:, None, None].expand(-1, 2, 3) > 2})
    assert os.listdir(tmp_path / "out") == ["predictions.h5"]
    assert arrays_in(tmp_path / "out")["mask"].any((1, 2)).tolist() == [False, False, False, True, True]


def test_class_scores_are_a_list_of_fixed_length(tmp_path):
    predict(tmp_path / "out", numbered(5), lambda y: torch.stack([y, y + 0.5], 1).bfloat16())
    table = table_in(tmp_path / "out")
    assert table.schema.field("prediction").type == pa.list_(pa.float32(), 2)


def test_nan_and_infinity_stay(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -0.0])
    predict(tmp_path / "out", numbered(3), lambda y: {"p": values, "mask": values[:, None, None]})
    for found in (rows_in(tmp_path / "out")["p"], arrays_in(tmp_path / "out")["mask"][:, 0, 0]):
        np.testing.assert_array_equal(np.array(found), values.numpy())


def test_a_tensor_that_is_used_again_for_the_next_batch_is_copied(tmp_path):
    buffer = torch.zeros(4, dtype=torch.int64)
    predict(tmp_path / "out", numbered(12), buffer.copy_)
    assert rows_in(tmp_path / "out")["prediction"] == list(range(12))


# -- locations ---------------------------------------------------------------------------------------------------------


def check_locations(source, found):
    """Assert that the location columns are what the source says, and return their names."""
    ids = source.ids(np.arange(len(source)))
    located = source.locate(ids)
    assert list(found["sample"]) == ids.tolist()
    for name in ("file", "row", "group", "id", "path"):
        if name in found:
            assert list(found[name]) == [getattr(each, name) for each in located]
    return [name for name in ("sample", "file", "group", "row", "id", "path") if name in found]


def test_windows_in_groups_of_several_files_have_their_places(tmp_path):
    for file in range(2):
        with h5py.File(tmp_path / f"{file}.h5", "w") as rec:
            for group in range(2):
                rec[f"patient_{group}/data"] = np.arange(10 + file)
    source = lad.HDF5Source(tmp_path / "*.h5", {"y": lad.Field("data", window=(0, 3))}, group="patient_*", stride=3)
    predict(tmp_path / "out", source, lambda y: {"mean": y.double().mean(1), "mask": y[:, None].expand(-1, 2, 3)})
    rows, arrays = rows_in(tmp_path / "out"), arrays_in(tmp_path / "out")
    assert check_locations(source, rows) == ["sample", "file", "group", "row"]
    assert check_locations(source, arrays) == ["sample", "file", "group", "row"]
    assert rows["row"] == rows["mean"] or [row + 1 for row in rows["row"]] == rows["mean"]
    assert set(rows["group"]) == {"/patient_0", "/patient_1"}


def bird_table(tmp_path):
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", np.full(2, number))
    names = [f"{number}.npy" for number in range(6)]
    table = pa.table({"id": [f"00{n}" for n in range(6)], "path": names, "good": [1, 1, 0, 1, 1, 1]})
    return lad.ManifestSource(table, {"y": "path"}, root=tmp_path, id="id", filters=[["good", "==", 1]])


@pytest.fixture
def no_log():
    """Keeps out of the log what is no text: it could not go from one process of pytest-xdist to another."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_a_file_whose_name_is_no_text_is_named_with_its_bytes(tmp_path, no_log):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["y"] = np.arange(5)
    name = os.path.join(os.fsencode(tmp_path), b"\xe4 \xc3\xb6.h5")
    try:
        os.rename(tmp_path / "x.h5", name)
    except OSError:
        pytest.skip("this file system takes only names that are text")
    predict(tmp_path / "out", lad.HDF5Source(os.fsdecode(name), {"y": "y"}))
    for rows in (rows_in(tmp_path / "out"), arrays_in(tmp_path / "out")):
        assert {os.path.basename(each) for each in rows["file"]} == {"\\xe4 ö.h5"}


def test_rows_of_a_table_have_their_ids_and_paths(tmp_path):
    source = bird_table(tmp_path)
    predict(tmp_path / "out", source, lambda y: {"first": y[:, 0], "mask": y[:, None]})
    rows, arrays = rows_in(tmp_path / "out"), arrays_in(tmp_path / "out")
    assert check_locations(source, rows) == ["sample", "file", "row", "id", "path"]
    assert check_locations(source, arrays) == ["sample", "file", "row", "id", "path"]
    assert rows["id"] == ["000", "001", "003", "004", "005"]
    assert rows["first"] == [0, 1, 3, 4, 5]


def test_samples_with_and_without_ids_leave_the_column_empty_where_there_is_none(tmp_path):
    h5py.File(tmp_path / "x.h5", "w").create_dataset("g/y", data=np.zeros((3, 2), np.int64))
    of_file = lad.HDF5Source(tmp_path / "x.h5", {"y": "y"}, group="g")
    source = lad.ConcatSource([bird_table(tmp_path), of_file])
    predict(tmp_path / "out", source, lambda y: {"first": y[:, 0], "mask": y[:, None]})
    rows, arrays = rows_in(tmp_path / "out"), arrays_in(tmp_path / "out")
    assert list(rows)[:6] == ["sample", "file", "group", "row", "id", "path"]
    assert rows["id"][4:] == ["005", None, None, None]
    assert arrays["id"][4:] == ["005", "", "", ""]
    assert rows["group"] == ["/"] * 5 + ["/g"] * 3


def test_the_side_of_a_split_has_the_numbers_of_the_whole_source(tmp_path):
    side = lad.split(numbered(30), {"train": 0.5, "test": 0.5})["test"]
    predict(tmp_path / "out", side, lambda y: y)
    rows = rows_in(tmp_path / "out")
    assert check_locations(side, rows) == ["sample", "file", "row"]
    assert rows["prediction"] == rows["sample"] == side.samples.tolist()


# -- loaders and limits ------------------------------------------------------------------------------------------------


def test_each_of_several_sources_has_its_own_files(tmp_path, caplog):
    predict(tmp_path / "out", [numbered(9), numbered(3)], lambda y: y + 1)
    assert rows_in(tmp_path / "out", "predictions_0")["prediction"] == list(range(1, 10))
    assert rows_in(tmp_path / "out", "predictions_1")["prediction"] == [1, 2, 3]


def test_a_limit_writes_what_was_predicted_and_says_how_many(tmp_path, caplog):
    with caplog.at_level("INFO"):
        predict(tmp_path / "out", numbered(22), limit_predict_batches=2)
    check_files(tmp_path / "out", range(8))
    (line,) = [record.message for record in caplog.records if "predictions of" in record.message]
    assert line == (
        f"{tmp_path}/out: predictions of 8 of 22 samples: score float64, classes float32 (3,), text in "
        "predictions.parquet, mask uint8 (64, 64), points float32 (2, 2) in predictions.h5"
    ).replace(", text in", ", text text in")


def test_a_limit_of_no_batches_writes_nothing(tmp_path):
    predict(tmp_path / "out", numbered(22), limit_predict_batches=0)
    assert os.listdir(tmp_path) == []


def test_an_async_loader_of_ones_own_will_do(tmp_path):
    with lad.AsyncLoader(numbered(10), {"batch_size": 4, "shuffle": False}) as loader:
        trainer(lad.PredictionWriter(tmp_path / "out")).predict(Predictor(), loader, return_predictions=False)
    check_files(tmp_path / "out", range(10))


def test_a_loader_of_ones_own_shuffles_only_if_asked_for_by_name(tmp_path):
    with lad.AsyncLoader(numbered(10), {"batch_size": 4}) as loader:
        trainer(lad.PredictionWriter(tmp_path / "out")).predict(Predictor(), loader, return_predictions=False)
    check_files(tmp_path / "out", range(10))


@pytest.mark.filterwarnings("ignore:Your `predict_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "global"}, "predict loader 0 shuffles, and predictions are in dataset order; set shuffle=False"),
        ({"shuffle": False, "drop_last": True}, "predict loader 0 drops samples, and each must have a prediction"),
        ({"shuffle": False, "rank": 1}, "predict loader 0 is that of rank 1 of 2 in rank 0 of 1, so samples would be"),
    ],
)
def test_a_loader_that_has_not_each_sample_once_in_order_is_refused(tmp_path, options, message):
    ranks = {"rank": options.pop("rank"), "world_size": 2} if "rank" in options else {}
    with (
        lad.AsyncLoader(numbered(10), {"batch_size": 4} | options, **ranks) as loader,
        pytest.raises(ConfigError, match=f"^PredictionWriter: {message}"),
    ):
        trainer(lad.PredictionWriter(tmp_path / "out")).predict(Predictor(), loader)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("callbacks", [(), (lad.DevicePrefetcher,)], ids=["alone", "with DevicePrefetcher"])
def test_a_dataloader_of_torch_is_refused_with_what_to_do(tmp_path, callbacks):
    loader = DataLoader([{"y": torch.tensor(number)} for number in range(4)])
    runs = trainer(lad.PredictionWriter(tmp_path / "out"), *[kind() for kind in callbacks])
    with pytest.raises(ConfigError, match=r"predict loader 0 is a DataLoader, .* DatasetSource\(dataset\)"):
        runs.predict(Predictor(), loader)
    assert os.listdir(tmp_path) == []


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"path: the folder .*file/out.partial cannot be made: Not a directory; give"):
        predict(tmp_path / "file" / "out", numbered(4))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_predict_step_that_takes_the_iterator_is_refused(tmp_path):
    class Iterating(Predictor):
        def predict_step(self, dataloader_iter):
            raise AssertionError

    with pytest.raises(ConfigError, match="let it take batch and batch_idx"):
        trainer(lad.PredictionWriter(tmp_path / "out")).predict(Iterating(), datamodule=module(numbered(4)))


# -- results that exist, and runs that end early -----------------------------------------------------------------------


def test_a_result_that_exists_is_refused_before_anything_is_predicted(tmp_path):
    predict(tmp_path / "out", numbered(6))
    called = []
    with pytest.raises(ConfigError, match=r"path: .*/out exists, and predictions are never overwritten; move or del"):
        predict(tmp_path / "out", numbered(8), called.append)
    assert not called
    check_files(tmp_path / "out", range(6))


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    (tmp_path / "out").mkdir()
    predict(tmp_path / "out", numbered(6))
    check_files(tmp_path / "out", range(6))


def test_one_writer_predicts_again_where_the_first_result_was_moved_away(tmp_path):
    writer, dm = lad.PredictionWriter(tmp_path / "out"), module(numbered(6))
    for name in ("a", "b"):
        trainer(writer).predict(Predictor(), datamodule=dm, return_predictions=False)
        os.rename(tmp_path / "out", tmp_path / name)
        check_files(tmp_path / name, range(6))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_ends_early_leaves_no_result_and_the_next_one_starts_anew(tmp_path, error):
    seen = []

    def fails(y):
        seen.append(y)
        if len(seen) == 3:
            raise error("mine")
        return predicted_of(y)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        predict(tmp_path / "out", numbered(22), fails)
    signal.signal(signal.SIGINT, before)
    assert os.listdir(tmp_path) == ["out.partial"]
    predict(tmp_path / "out", numbered(22))
    check_files(tmp_path / "out", range(22))


def test_a_predict_step_that_ends_the_run_early_leaves_no_result(tmp_path):
    def stops(y):
        if y[0] == 8:
            raise StopIteration
        return y

    with pytest.raises(MissingError, match="of 22 samples, missing: 8, 9, 10, … "):
        predict(tmp_path / "out", numbered(22), stops)
    assert os.listdir(tmp_path) == ["out.partial"]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        (
            lambda y: None,
            "prediction is None; return a tensor or array whose first axis is the samples of the batch",
        ),
        (lambda y: (y, y), "prediction is a tuple of 2 Tensor; return a tensor"),
        (lambda y: y.sum(), "prediction has a single number for a batch of 4 samples"),
        (lambda y: {}, "an empty dict; return a tensor"),
        (lambda y: {1: y}, "1 is not a name; the keys of the dict are the names of columns"),
        (lambda y: {"sample": y}, "'sample' is a column that PredictionWriter adds; give it another name"),
        (lambda y: {"p": y[:-1]}, "p has 3 values on its first axis for a batch of 4 samples"),
        (
            lambda y: {"p": ["a", "\ud800", "c", "d"]},
            r"p: text 1 of the batch, '\\ud800', cannot be stored as UTF-8",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_with_what_is_wanted(tmp_path, predicted, message):
    with pytest.raises(ConfigError, match=f"^predictions: predict_step, batch 0: {message}"):
        predict(tmp_path / "out", numbered(8), predicted)


@pytest.mark.parametrize("path", [None, 3, ""])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ConfigError, match="is not the path of a folder"):
        lad.PredictionWriter(path)


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"install it by pip install 'lit-async-data\[manifest\]'"):
        predict(tmp_path / "out", numbered(8))
    assert os.listdir(tmp_path) == []


# -- besides -----------------------------------------------------------------------------------------------------------


def test_predictions_that_the_trainer_keeps_are_written_too_and_it_says_so(tmp_path, caplog):
    with caplog.at_level("INFO"):
        kept = trainer(lad.PredictionWriter(tmp_path / "out")).predict(
            Predictor(lambda y: y), datamodule=module(numbered(6))
        )
    assert torch.cat(kept).tolist() == rows_in(tmp_path / "out")["prediction"] == list(range(6))
    assert "return_predictions=False" in caplog.text


def test_in_training_it_does_nothing(tmp_path):
    trainer(lad.PredictionWriter(tmp_path / "out")).fit(Recorder(), datamodule=datamodule(train=CountingSource(8, 1)))
    assert os.listdir(tmp_path) == []


def test_it_can_be_pickled_for_strategies_that_spawn(tmp_path):
    writer = lad.PredictionWriter(tmp_path / "out")
    assert repr(pickle.loads(pickle.dumps(writer))) == f"PredictionWriter('{tmp_path}/out')"


RANKS = """
import json, os, sys
import numpy as np, torch
sys.path.insert(0, os.environ["TESTS"])
from support.lightning.predictions import numbered, predicted_of
from support.lightning.trainer import trainer, pl
from support.ranks.processes import leave_process_group
import lit_async_data as lad

class Predictor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def predict_step(self, batch, number):
        return predicted_of(batch["y"])

def predict():
    dm = lad.AsyncDataModule(predict=numbered(21), loader={"batch_size": 4})
    runs = trainer(lad.PredictionWriter("out"), devices=2, strategy="ddp")
    runs.predict(Predictor(), datamodule=dm, return_predictions=False)

predict()
seen = os.listdir(".")  # by each rank, when predict has returned
try:
    predict()
except Exception as error:
    said = f"{type(error).__name__}: {error}"
with open(f"{os.environ['LOCAL_RANK']}.json", "w") as file:
    json.dump({"seen": seen, "said": said}, file)
leave_process_group()
"""


def test_two_ranks(tmp_path):
    (tmp_path / "program.py").write_text(RANKS)
    run_together(as_ranks([sys.executable, "program.py"], TESTS=Path(__file__).parents[2]), tmp_path)
    check_files(tmp_path / "out", range(21))
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for each in facts:
        assert "out" in each["seen"]
        assert "out.partial" not in each["seen"]
        assert "path: out exists, and predictions are never overwritten" in each["said"]
    assert facts[0]["said"].startswith("ConfigError: path")
    assert facts[1]["said"].startswith("AsyncDataError: rank 0 failed: ConfigError: path")
