"""What each stage of an `AsyncDataModule` gets: its sources, options, transforms, loaders and statistics."""

import contextlib

import numpy as np
import pytest
import torch
from support.failures import raising
from support.lightning.trainer import Run, dm_of, source

from lit_async_data import (
    AsyncDataModule,
    ConcatSource,
    Field,
    HDF5Source,
    LoaderOptions,
    ManifestSource,
    MixtureSource,
    Normalize,
    SubsetSource,
    split,
    statistics,
)
from lit_async_data.errors import ConfigError, ResumeError, TransformError
from lit_async_data.lightning.stages import loader_of, shared_data
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize(("stage", "batch_size"), [("test", 10), ("val", 50)])
def test_evaluation_takes_the_options_of_training_without_shuffle_and_drops_nothing(stage, batch_size):
    loader = {"batch_size": 10, "shuffle": True, "drop_last": True, "workers": 2}
    dm = dm_of(loader=loader, val_loader={"batch_size": 50, "workers": None}, test=source(15), val=source(60))
    found = getattr(dm, f"{stage}_dataloader")()
    options = found.options
    assert (options.shuffle, options.drop_last, options.augment) == ("none", False, False)
    assert (options.workers, options.batch_size) == (2, batch_size)
    assert len(found) == 2


STAGES = [  # without a source to split
    ({"loader": None}, "loader.batch_size: missing"),
    ({"loader": 64}, 'loader: 64 is neither LoaderOptions nor a mapping; write {"batch_size": 64}'),
    ({"val_loader": {"batch_sise": 3}}, "val_loader.batch_sise: no such option; did you mean batch_size"),
    ({"val": [source(), 3]}, "val: 3 is not a source or a list of sources"),
    ({"train": None, "val": None}, "train: there is no source"),
    ({"device_transform": {"training": print}}, "device_transform: 'training' is not one of train, val"),
    ({"device_transform": {"train": "augment"}}, "device_transform.train: 'augment' cannot be called"),
    ({"val_loader": {"augment": True}}, "val_loader.augment: in training only; evaluation"),
    ({"statistics": "val"}, "^statistics: 'val' is not train"),
    ({"statistics": "train", "train": None}, "no source for training"),
    ({"statistics": "train", "device_transform": abs}, "device_transform is another transform"),
    ({"val_loader": LoaderOptions(batch_size=3)}, "val_loader: LoaderOptions.* is not a mapping of options"),
]
SPLIT = [
    ({"split": {"train": 0.7, "valid": 0.3}}, "split: 'valid' is not one of train, val, test, predict"),
    ({"split": {"train": 0.7, "val": 0.7}}, "split: the fractions add up to 1.4"),
    ({"val": source(), "split": {"train": 1}}, "val: cannot be combined with source"),
    ({"fold": 3, "by": "y"}, "fold: 3 is not one of the folds 0, 1, 2$"),
    ({"by": np.array(["train", "dev"] * 50)}, "split: 'dev' is not one of train, val, test, predict"),
    ({"source": None, "groups": "file"}, "source: missing"),
]
WEIGHTS = [
    ({"balanced": "z"}, "weights: 'z' is not one of the fields x, y, f, v, n"),
    ({"balanced": "v"}, "weights: give 1 for each label of a sample .*; no sample has a label"),
    ({"balanced": [1, 0]}, r"loader.weights: \[1, 0\] is not the key.*=class_weights\(labels\)"),
    (np.ones(99), "weights: there are 99 for 100 samples"),
    ({"balance": "y"}, "loader.weights: {'balance': 'y'} is neither .*{balanced: KEY}"),
]
SPLIT += [({"loader": {"weights": weights}}, said) for weights, said in WEIGHTS]


@pytest.mark.parametrize(("given", "said"), STAGES)
def test_a_wrong_argument_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        dm_of(**given)


@pytest.mark.parametrize(("given", "said"), SPLIT)
def test_a_wrong_argument_beside_a_source_is_named(given, said):
    rows = np.arange(100)
    whole = source(100, y=rows % 3, f=rows / 99, v=np.zeros((100, 2), int), n=np.full(100, np.nan))
    loader = {"batch_size": 10} | given.get("loader", {})
    with pytest.raises(ConfigError, match=f"^{said}"):
        AsyncDataModule(**{"source": whole} | given | {"loader": loader}).train_dataloader()


fails = raising(OSError("no such colour"))


@pytest.mark.parametrize("of_evaluation", [False, True])
def test_a_transform_of_training_that_draws_is_told_of_in_evaluation_alone(of_evaluation, caplog):
    def noisy(batch):
        return {**batch, "x": batch["x"] + torch.rand(3)}

    with contextlib.closing(dm_of(device_transform={"eval": noisy} if of_evaluation else noisy)) as dm:
        for loader in (dm.train_dataloader(), dm.val_dataloader()):
            loader.next()
            assert ("drew random numbers from" in caplog.text) == (loader.evaluation and not of_evaluation)


@pytest.mark.parametrize("name", ["sample_transform", "batch_transform", "device_transform"])
@pytest.mark.parametrize(("given", "key"), [({"eval": fails}, ".eval"), ({"val": fails}, ".val"), (fails, "")])
def test_an_error_of_a_transform_names_its_option_and_the_stage(name, given, key):
    with contextlib.closing(dm_of(**{name: given})) as dm:
        loader = dm.val_dataloader()
        with pytest.raises(TransformError, match=f"^{name}{key}, stage val: .*OSError: no such colour"):
            next(loader)


@pytest.mark.parametrize(("devices", "torchrun", "ranks"), [(1, "4", 4), (4, "", 4), (4, "4", 4), (1, "", 1)])
def test_ranks_on_this_machine_are_those_of_the_trainer_or_of_who_started_it(monkeypatch, devices, torchrun, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", torchrun)
    trainer = Run(global_rank=1, world_size=4, num_devices=devices, strategy=Run(root_device=None))
    loader = loader_of(source(), LoaderOptions(batch_size=4), "train", 0, trainer)
    assert (loader.rank, loader.world_size, loader.local_world_size) == (1, 4, ranks)


def recorded():
    x = (np.random.default_rng(0).random((20, 3, 4, 4)) * 200).astype("u1")
    return ArraySource({"y": np.arange(20) % 3, "x": x})  # labels come first


@pytest.mark.parametrize("given", [None, Normalize(0.5, 0.5, scale="type", fields=["x", "y"], dtype="float64")])
def test_every_stage_is_normalised_by_the_statistics_of_training(given, tmp_path):
    options = {"loader": {"batch_size": 20}, "device_transform": given, "statistics": "train", "cache_dir": tmp_path}
    for _ in range(2):
        dm = AsyncDataModule(source=recorded(), split={"train": 0.5, "val": 0.5}, **options)
        assert dm.normalize is None
        with contextlib.closing(dm):
            val, train = dm.val_dataloader().next(), dm.train_dataloader().next()
        for values in train["x"].transpose(0, 1):
            assert (abs(values.mean()), values.std(correction=0)) == (pytest.approx(0, abs=1e-5), pytest.approx(1))
        assert abs(val["x"].mean()) > 1e-4
        assert torch.is_floating_point(train["y"]) == (given is not None)
        assert dm.normalize.dtype == ("float64" if given else "float32")
    assert len(list(tmp_path.iterdir())) == 1


DRAWN = np.random.default_rng(0).random
IMAGES = (DRAWN((50, 24, 20, 3)) * 200).astype("u1")
SERIES = (DRAWN((50, 16, 3)) * [1, 5, 9] + [0, 10, 99]).astype("f4")
NUMBERS, PLANES = DRAWN((50, 5)) * np.arange(1, 6), DRAWN((50, 3, 24, 4))
ROWS = ArraySource({"a": SERIES, "q": NUMBERS, "image": IMAGES, "planes": PLANES})
MEASURED = Normalize.of(statistics(ROWS, "q", axis=0) | statistics(ROWS, "a", axis=1), ["a", "q"], dtype="float64")


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        (Normalize([0, 0, 0], [1, 1, 1], axis=1, fields="a"), {"a": (1,)}),
        (Normalize(axis=-1, scale="type", fields=["a"]), {"a": (1,)}),
        (Normalize(axis=[0, 1], fields="a"), {"a": (0, 1)}),
        (Normalize(0, 1, fields="q"), {"q": ()}),
        (None, {"a": ()}),
        (Normalize(axis=2, fields="image"), {"image": (2,)}),
        (Normalize(fields="image"), {"image": (0,)}),
        (Normalize(fields="planes"), {"planes": (0,)}),
        (MEASURED, {"a": (1,), "q": (0,)}),
    ],
    ids=str,
)
def test_statistics_keep_the_axes_of_the_normalize_that_they_replace(given, axes, caplog):
    options = {"loader": {"batch_size": 50}, "statistics": "train", "device_transform": given}
    with contextlib.closing(AsyncDataModule(train=ROWS, val=ROWS, **options)) as dm:
        batch = dm.train_dataloader().next()
        for key, kept in axes.items():
            values = batch[key].double()
            over = [axis for axis in range(values.ndim) if axis - 1 not in kept]
            assert values.mean(over).abs().max() < 1e-4
            assert torch.allclose(values.std(over, correction=0), torch.tensor(1.0).double(), atol=1e-4)
        assert dm.normalize.dtype == getattr(given, "dtype", "float32")
    lines = ["statistics: image of (24, 20, 3) has 24 means"] if axes.get("image") == (0,) else []
    assert [line.partition(", one for")[0] for line in caplog.messages if "holds the channels" in line] == lines


def test_axes_of_samples_that_are_put_end_to_end_are_those_of_their_elements(h5):
    values = (DRAWN((40, 3)) * [1, 5, 9]).astype("f4")
    path = h5(**{"x/values": values, "x/offsets": np.array([0, 7, 20, 22, 40])})
    source = HDF5Source(path, [Field("x", ragged="concat")])  # a tuple
    options = {"loader": {"batch_size": 4}, "statistics": "train", "device_transform": Normalize(axis=0, fields=0)}
    with contextlib.closing(AsyncDataModule(train=source, **options)) as dm:
        made = dm.train_dataloader().next()[0]
    assert made.mean(0).abs().max() < 1e-5


def test_statistics_of_what_a_host_transform_converts_are_refused():
    scaled = {"sample_transform": lambda sample: {"x": sample["x"] / np.float32(255)}}
    dm = AsyncDataModule(train=recorded(), loader={"batch_size": 4}, statistics="train", **scaled)
    with pytest.raises(ConfigError, match=r"'x' is stored as uint8, but a host transform converts it to float32"):
        dm.train_dataloader()


@pytest.mark.parametrize("shape", [(1000,), (1000, 1)])
def test_classes_are_counted_where_no_number_is_below_zero(shape, monkeypatch):
    monkeypatch.setattr("lit_async_data.sources.contract.source.BLOCK_SAMPLES", 300)
    labels = np.minimum(np.arange(1000), 7 + np.arange(1000) // 999).reshape(shape)
    dm = dm_of(train=source(y=labels, z=np.zeros((1000, 2), np.int64), shift=labels - 3))
    assert dm.num_classes == {"y": 9}


def of_classes(h5, *names):
    numbers = np.arange(30) % min(len(names), 3)
    path = h5(f"{'-'.join(names)}.h5", data=np.zeros((30, 2), np.float32), labels=numbers)
    return HDF5Source(path, {"x": "data", "y": Field("labels", classes=names)})


@pytest.mark.parametrize("stage", ["val", "predict"])
def test_stages_in_which_the_same_number_is_another_class_are_refused(h5, stage):
    train = of_classes(h5, "cat", "dog")

    def dm(*names):
        every = {"train": train, stage: [of_classes(h5, "cat", "dog", "eel"), of_classes(h5, *names)]}
        return AsyncDataModule(**every, loader={"batch_size": 9})

    for names in [("dog", "cat"), ("cat", "dog", "fox")]:
        with pytest.raises(ConfigError) as caught:
            dm(*names)
        said = f"{stage}: the classes of y are {', '.join(names)}, but those of {stage} are cat, dog, eel: the same"
        assert str(caught.value).startswith(said)
    for names in [("cat", "dog"), ("cat", "dog", "eel", "fox")]:
        assert dm(*names).classes == {"y": ("cat", "dog")}
    assert dm_of(train=of_classes(h5, "cat", "dog", "eel", "fox"), val=None).num_classes == {"y": 4}, "not those found"


def named(h5, *names):
    return AsyncDataModule(train=of_classes(h5, *names), loader={"batch_size": 10})


@pytest.mark.parametrize("names", [("dog", "cat", "eel"), ("cat", "dog"), ("cat", "dog", "eel", "fox")])
def test_a_checkpoint_of_other_classes_is_refused_and_both_are_named(h5, names):
    saved = named(h5, "cat", "dog", "eel").state_dict()
    with pytest.raises(ResumeError) as caught:
        named(h5, *names).load_state_dict(saved)
    assert f"the classes of y are {', '.join(names)}, but were cat, dog, eel in the checkpoint" in str(caught.value)
    assert "classes=['cat', 'dog', 'eel']" in str(caught.value)


def said(train, val, stage="val"):
    return shared_data({"train": [train], "val": [val], "test": [val]}, stage)


@pytest.fixture
def subjects(h5):
    """Three files, each with a volume and a recording of ten episodes."""
    values = {"ct": np.zeros((12, 8, 8), "f4"), "eeg": np.zeros((100, 2), "f4"), "other": np.zeros((100, 2), "f4")}
    return sorted(h5(**values, id=np.repeat(np.arange(10), 10), name=f"s{number}.h5") for number in range(3))


def patches(paths, **options):
    return HDF5Source(paths, {"x": Field("ct", patch=(4, 8, 8))}, **options)


def windows(paths, name="eeg", **options):
    return HDF5Source(paths, {"x": Field(name, window=(-9, 1))}, **options)


def test_data_of_training_in_another_stage_are_named_once(subjects):
    one, other = patches(subjects, patches_per_volume=4), patches(subjects[1:])
    line = said(SubsetSource(one, range(8)), other)  # of the first two files
    assert line.startswith(f"3 of 6 samples of val share data with train, such as sample 0 ({subjects[1]}, row 0); ")
    assert "split(other, {'train': [...], 'test': [...]}, by='file')" in said(one, other, "test")
    assert not said(SubsetSource(one, range(4)), other)


def test_windows_of_one_recording_share_rows_whatever_their_stride(subjects):
    train, val = windows(subjects, stride=10), windows(subjects, stride=90)
    assert said(train, val).startswith("6 of 6 samples of val")
    mixed = MixtureSource({"a": (windows(subjects[:1]), 1), "b": (ConcatSource([train, train]), 1)})
    assert said(mixed, SubsetSource(val, [5, 4])).startswith(
        "2 of 2 samples of val share data with train, such as sample 5"
    )
    assert not said(train, windows(subjects, "other"))  # as train_x and test_x in one file


@pytest.mark.parametrize("groups", ["file", "time", "episode", None])
def test_sides_of_a_split_share_nothing(subjects, groups):
    cut = {
        "file": patches(subjects, patches_per_volume=4),
        "time": windows(subjects, stride=2),
        "episode": HDF5Source(subjects, {"x": Field("eeg", window=(-9, 1), pad="last")}, episodes="id"),
        None: HDF5Source(subjects, {"x": "eeg"}),
    }[groups]
    sides = split(cut, {"train": 0.6, "val": 0.4}, groups=groups)
    assert not said(sides["train"], sides["val"])
    assert said(sides["val"], cut).startswith(f"{len(sides['val'])} of {len(cut)} samples" if groups != "time" else "")


def test_sources_of_one_table_or_of_the_same_files_share_samples(tmp_path, subjects):
    (tmp_path / "t.csv").write_text("y\n" + "".join(f"{row}\n" for row in range(5)))
    some, rest = (ManifestSource(tmp_path / "t.csv", ["y"], filters=[["y", op, 2]]) for op in (">", "<="))
    whole = ManifestSource(tmp_path / "t.csv", ["y"])
    assert not said(some, rest)
    assert said(some, whole).startswith("2 of 5 samples of val share data with train, such as sample 3 (")
    for name, paths in (("a", "01"), ("b", "12")):
        (tmp_path / f"{name}.csv").write_text("x\n" + "".join(f"{path}.npy\n" for path in paths))
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.zeros(3))
    a, b = (ManifestSource(tmp_path / f"{name}.csv", [{"name": "x", "kind": "npy"}]) for name in "ab")
    assert said(a, b).startswith("1 of 2 samples of val share data with train, such as sample 0 (")
    own = source(10)
    assert said(SubsetSource(own, [1, 2]), SubsetSource(own, [2, 3])).startswith("1 of 2 samples of val")
    assert not said(own, source(10))
    own.locate = lambda ids: 1 / 0
    assert " of 10 samples of val share data with train, such as sample 0 (" in said(own, own)


@pytest.mark.parametrize(("stage", "lines"), [("fit", 1), ("test", 1), ("predict", 0)])
def test_setup_warns_of_shared_data(stage, lines, caplog):
    own = source(10)
    dm = dm_of(train=own, val=own, test=own, predict=own)
    dm.setup(stage)
    assert sum("share data with train" in record.getMessage() for record in caplog.records) == lines


def test_prediction_refuses_patches_that_are_drawn(subjects):
    drawn = patches(subjects, patches_per_volume=4)
    dm = AsyncDataModule(predict=ConcatSource([drawn]), loader={"batch_size": 2})
    with pytest.raises(ConfigError, match=r"s0\.h5.*: patches_per_volume draws .* predict on a grid: the same source"):
        dm.setup("predict")
    assert len(AsyncDataModule(val=drawn, loader={"batch_size": 2}).val_dataloader()) == 6
    assert AsyncDataModule(predict=patches(subjects), loader={"batch_size": 2}).predict_dataloader()
