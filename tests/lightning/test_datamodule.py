"""`AsyncDataModule` without a Trainer: options of stages, classes, and the description of loaders."""

import contextlib
import re
import threading
import types

import h5py
import numpy as np
import pytest
import torch

from lit_async_data import AsyncDataModule, AsyncLoader, Balanced, HDF5Source, LoaderOptions, Normalize
from lit_async_data.engine.resources.plan import ResourcePlan
from lit_async_data.errors import ConfigError, TransformError
from lit_async_data.lightning.stages import LoaderArguments
from lit_async_data.lightning.summary import summary_lines
from lit_async_data.sources.hdf5.readers import part_reader
from lit_async_data.testing import ArraySource


def source(length=1000, **arrays):
    return ArraySource({"x": np.zeros((length, 3), np.float32), **arrays})


def dm_of(**options):
    return AsyncDataModule(**{"train": source(), "val": source(100), "loader": {"batch_size": 10}} | options)


def test_what_will_happen_is_said_for_every_rank():
    with AsyncLoader(source(10_000), {"batch_size": 128}, rank=3, world_size=8) as loader:
        first, second, third = summary_lines(loader)
    assert first.startswith("10,000 samples from ")
    assert first.endswith(": x float32 (3,)")
    assert second == "batch 128 × 8 ranks = 1024, 10 steps, shuffle global: every sample is read alone, once per epoch"
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
    with AsyncLoader(source, {"batch_size": 10, "shuffle_chunks": 5, "workers": 2}) as loader:
        assert summary_lines(loader)[1] == (
            "batch 10, 640 steps, shuffle chunk: 5 of 100 chunks at a time, 0.52 of the mixing of a global shuffle; "
            "every chunk is decoded once per epoch; decoded chunks take 4.8 KiB"
        )
        assert "5 slots of 1.5 KiB + 4.8 KiB decoded = 12.3 KiB" in summary_lines(loader)[2]
    with AsyncLoader(source, {"batch_size": 10, "shuffle_chunks": 6}, world_size=4) as loader:
        assert "every chunk is decoded by 2 ranks each" in summary_lines(loader)[1]
    assert not caplog.messages


def test_evaluation_takes_the_options_of_training_without_shuffle_and_drops_nothing():
    dm = dm_of(loader={"batch_size": 10, "shuffle": True, "drop_last": True, "workers": 2}, test=source(15))
    options = dm.test_dataloader()[0].options
    assert (options.shuffle, options.drop_last, options.workers, options.batch_size) == ("none", False, 2, 10)
    assert len(dm.test_dataloader()[0]) == 2


def test_a_stage_may_differ_and_null_inherits():
    dm = dm_of(val_loader={"batch_size": 50, "workers": None})
    options = dm.val_dataloader()[0].options
    assert (options.batch_size, options.workers) == (50, "auto")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loader": None}, "loader.batch_size: missing"),
        ({"loader": {"batch_size": 0}}, "loader.batch_size: 0 is not"),
        ({"loader": 64}, 'loader: 64 is neither LoaderOptions nor a mapping; write {"batch_size": 64}'),
        ({"val_loader": {"batch_sise": 3}}, "val_loader.batch_sise: no such option; did you mean batch_size"),
        ({"predict_loader": {"workers": -1}}, "predict_loader.workers: -1 is not"),
        ({"train": [source()]}, "train: .* is not a source"),
        ({"val": [source(), 3]}, "val: 3 is not a source or a list of sources"),
        ({"val": "x.h5"}, "val: 'x.h5' is not a source or a list of sources"),
        (
            {"val": {"day": source(), "night": source()}},
            r"val: .* the names day, night, .*write a list: val=\[day, night\]",
        ),
        ({"train": None, "val": None}, "train: there is no source"),
        ({"device_transform": {"training": print}}, "device_transform: 'training' is not one of train, val"),
    ],
)
def test_a_wrong_argument_is_named(options, said):
    with pytest.raises(ConfigError, match=said):
        dm_of(**options)


def test_the_batch_size_cannot_be_set_beyond_the_data():
    dm = dm_of()
    dm.batch_size = 5000
    assert dm.batch_size == 1000


@pytest.mark.parametrize("shape", [(1000,), (1000, 1)])
def test_classes_are_counted(shape):
    labels = (np.arange(1000) % 7).reshape(shape)
    dm = dm_of(train=source(y=labels, z=np.zeros((1000, 2), np.int64)))
    assert dm.num_classes == {"y": 7}


def test_numbers_below_zero_are_no_classes():
    assert dm_of(train=source(y=np.arange(1000) % 5, shift=np.arange(1000) - 3)).num_classes == {"y": 5}


def test_close_closes_loaders_and_files(h5):
    path = h5(data=np.zeros((30, 2)), labels=np.zeros(30, int))
    dm = dm_of(train=HDF5Source(path), val=None)
    loader = dm.train_dataloader()
    next(loader)
    dm.close()
    dm.close()
    assert len(list(dm.train_dataloader())) == 3
    dm.close()


class Counting(ArraySource):
    """Counts the reads of all values of a field."""

    whole = 0

    def read_into(self, samples, out):
        self.whole += len(samples) == len(self)
        super().read_into(samples, out)


def balanced():
    train = Counting({"x": np.zeros((1000, 3)), "y": np.arange(1000) % 5})
    return train, AsyncDataModule(train=train, val=source(100), loader={"batch_size": 10, "weights": Balanced("y")})


def test_what_is_described_is_what_is_handed_out_and_labels_are_read_once():
    train, dm = balanced()
    described = dm.describe()
    first = dm.train_dataloader()
    assert (train.whole, dm.describe()) == (1, described)
    assert dm.train_dataloader() is not first
    dm.close()


def test_a_loader_is_described_from_one_footprint(monkeypatch):
    computed = []
    of = ResourcePlan.of
    monkeypatch.setattr(ResourcePlan, "of", lambda *given, **named: computed.append(given) or of(*given, **named))
    _, dm = balanced()
    dm.describe()
    dm.train_dataloader(), dm.val_dataloader()
    assert len(computed) == 2
    assert dm.train_dataloader().footprint.workers.threads == 1
    assert len(computed) == 3


@pytest.mark.parametrize("change", ["batch_size", "source", "close"])
def test_a_described_loader_that_no_longer_fits_is_built_anew(change):
    _, dm = balanced()
    dm.describe()
    if change == "batch_size":
        dm.batch_size = 20
    elif change == "source":
        dm.sources["train"] = [ArraySource({"x": np.zeros((50, 3)), "y": np.arange(50) % 5})]
    else:
        dm.close()
    loader = dm.train_dataloader()
    next(loader)
    assert len(loader) == {"batch_size": 50, "source": 5, "close": 100}[change]
    dm.close()


def fails(values):
    raise OSError("no such colour")


@pytest.mark.parametrize("name", ["sample_transform", "batch_transform", "device_transform"])
@pytest.mark.parametrize(("given", "key"), [({"eval": fails}, ".eval"), ({"val": fails}, ".val"), (fails, "")])
def test_an_error_of_a_transform_names_its_option_and_the_stage(name, given, key):
    with contextlib.closing(dm_of(**{name: given})) as dm:
        (loader,) = dm.val_dataloader()
        with pytest.raises(TransformError, match=f"^{name}{key}, stage val: .*OSError: no such colour"):
            next(loader)


def test_a_footprint_follows_what_is_set_later():
    with AsyncLoader(source(), {"batch_size": 10}) as loader:
        assert loader.footprint.workers.threads == 1
        loader.device_depth = 0
        assert loader.footprint.workers.threads == 0
        loader.device_depth = 2
        assert loader.footprint.workers.threads == 1


class Unpicklable:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, sample):
        return sample


@pytest.mark.processes
def test_what_cannot_go_to_a_reader_process_is_said_before_the_first_batch():
    dm = dm_of(sample_transform={"train": Unpicklable()})
    why = r"sample_transform.train, stage train cannot be pickled \(TypeError: .*\), because of its lock"
    assert re.search(rf"^ +no workers \({why}\): the training loop reads: ", dm.describe(["train"]), re.MULTILINE)
    dm = dm_of(sample_transform={"train": Unpicklable()}, loader={"batch_size": 10, "worker_kind": "process"})
    with pytest.raises(
        ConfigError, match=rf"^worker_kind: .* cannot go to a reader process: {why}; .* worker_kind=thr"
    ):
        dm.describe(["train"])


class Ranks:
    """What the arguments of a loader take from a Trainer."""

    global_rank, world_size = 1, 4
    strategy = types.SimpleNamespace(root_device=None)

    def __init__(self, num_devices):
        self.num_devices = num_devices


@pytest.mark.parametrize(("devices", "torchrun", "ranks"), [(1, "4", 4), (4, "", 4), (4, "4", 4), (1, "", 1)])
def test_ranks_on_this_machine_are_those_of_the_trainer_or_of_who_started_it(monkeypatch, devices, torchrun, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", torchrun)
    arguments = LoaderArguments.of(Ranks(devices), source(), LoaderOptions(batch_size=4))
    assert arguments.local_world_size == ranks


def test_the_loaders_of_a_datamodule_know_their_stage_and_share_what_was_said():
    source = ArraySource({"x": np.zeros(8)})
    dm = AsyncDataModule(train=source, val=[source, source], loader={"batch_size": 4})
    train, (first, second) = dm.train_dataloader(), dm.val_dataloader()
    assert [each.machinery.wiring.label for each in (train, first, second)] == ["train", "val", "val[1]"]
    assert train.machinery.wiring.logged is first.machinery.wiring.logged is second.machinery.wiring.logged


def recorded(length=20, tuples=False):
    x = (np.random.default_rng(0).random((length, 3, 4, 4)) * 200).astype("u1")
    return ArraySource({"y": np.arange(length) % 3, "x": x})  # labels come first


@pytest.mark.parametrize("given", [None, Normalize(0.5, 0.5, scale="type", fields=["x", "y"], dtype="float64")])
def test_every_stage_is_normalised_by_the_statistics_of_training(given, tmp_path):
    options = {"loader": {"batch_size": 20}, "device_transform": given, "statistics": "train", "cache_dir": tmp_path}
    for _ in range(2):
        dm = AsyncDataModule(source=recorded(), split={"train": 0.5, "val": 0.5}, **options)
        assert dm.normalize is None
        with contextlib.closing(dm):
            val, train = dm.val_dataloader()[0].next(), dm.train_dataloader().next()
        for values in train["x"].transpose(0, 1):
            assert (abs(values.mean()), values.std(correction=0)) == (pytest.approx(0, abs=1e-5), pytest.approx(1))
        assert abs(val["x"].mean()) > 1e-4
        assert torch.is_floating_point(train["y"]) == (given is not None)
        assert dm.normalize.dtype == ("float64" if given else "float32")
    assert len(list(tmp_path.iterdir())) == 1


def test_statistics_that_cannot_be_used_are_refused():
    train = {"train": recorded(), "loader": {"batch_size": 4}}
    for options, said in [
        ({"statistics": "val"} | train, r"^statistics: 'val' is not train"),
        ({"statistics": "train", "val": recorded(), "loader": {"batch_size": 4}}, "no source for training"),
        ({"statistics": "train", "device_transform": abs} | train, "device_transform is another transform"),
    ]:
        with pytest.raises(ConfigError, match=said):
            AsyncDataModule(**options)
    dm = AsyncDataModule(
        **train, statistics="train", sample_transform=lambda sample: {"x": sample["x"] / np.float32(255)}
    )
    with pytest.raises(ConfigError, match=r"'x' is stored as uint8, but a host transform makes float32"):
        dm.train_dataloader()
