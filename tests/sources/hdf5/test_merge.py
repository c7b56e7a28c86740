"""`merge_patches`: volumes from predictions of patches equal what each element's patches say."""

import h5py
import numpy as np
import pytest
import torch
from support.files.damage import damage_chunk
from support.lightning.trainer import NO_STAGES, pl, trainer
from support.sources.oracle import read

from lit_async_data import AsyncDataModule, ConcatSource, Field, HDF5Source, PredictionWriter, merge_patches, split
from lit_async_data.errors import ConfigError, SourceError

SHAPES = {"a": (9, 14, 11), "b": (4, 20, 8), "c": (12, 6, 7)}
SIZE = (5, 6, 8)


@pytest.fixture
def path(h5):
    rng = np.random.default_rng(1)
    return h5(**{f"scans/{name}/ct": rng.random(shape) for name, shape in SHAPES.items()})


def source_of(path, stride=(2, 3, 4), **options):
    return HDF5Source(path, {"x": Field("ct", patch=SIZE, stride=stride, pad="zero")}, group="scans/*", **options)


def test_overlapping_predictions_are_averaged(path, tmp_path):
    source = source_of(path)
    values = np.random.default_rng(0).random((len(source), *SIZE), np.float32)
    with h5py.File(tmp_path / "predictions.h5", "w") as file:
        file["prediction"] = values
        merge_patches(file["prediction"], source, tmp_path / "merged.h5")
    origins = read(source, np.arange(len(source)), ["x_origin"])["x_origin"]
    ends = np.cumsum([part.samples for part in source.parts])
    with h5py.File(tmp_path / "merged.h5") as file:
        for name, first, end in zip(SHAPES, [0, *ends], ends):
            merged = file[f"x.h5/scans/{name}"][...]
            assert merged.dtype == np.float32
            for place in np.random.default_rng(1).integers(0, SHAPES[name], (200, 3)):
                inside = place - origins[first:end]
                own = np.flatnonzero(((inside >= 0) & (inside < SIZE)).all(axis=1))
                expected = np.mean([values[first + each][tuple(inside[each])] for each in own])
                np.testing.assert_allclose(merged[tuple(place)], expected, rtol=1e-5)


def test_a_side_of_a_split_gives_its_volumes(path, tmp_path):
    source = source_of(path)
    side = split(source, {"train": 0.5, "val": 0.5}, groups="group", seed=3)["val"]
    merge_patches(read(side, np.arange(len(side)))["x"], side, tmp_path / "merged.h5")
    with h5py.File(tmp_path / "merged.h5") as file, h5py.File(path) as given:
        assert 0 < len(file["x.h5/scans"]) < 3
        for name, merged in file["x.h5/scans"].items():
            np.testing.assert_allclose(merged, given[f"scans/{name}/ct"], rtol=1e-5)


def test_elements_of_no_patch_are_nan(path, tmp_path):
    source = source_of(path, rows=np.arange(1, len(source_of(path))))  # the first patch of the first volume lacks
    merge_patches(read(source, np.arange(len(source)))["x"], source, tmp_path / "merged.h5")
    with h5py.File(tmp_path / "merged.h5") as file, h5py.File(path) as given:
        merged, volume = file["x.h5/scans/a"][...], given["scans/a/ct"][...]
    lost = np.zeros(volume.shape, bool)
    lost[:2, :3, :3] = True  # the next patches begin at 2, 3 and, at the end of the volume, 3
    np.testing.assert_array_equal(np.isnan(merged), lost)
    np.testing.assert_allclose(merged[~lost], volume[~lost], rtol=1e-5)


class Sevens(pl.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def predict_step(self, batch):
        return torch.full(batch["x"].shape, 7, dtype=self.kind)


@NO_STAGES
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
def test_samples_that_could_not_be_read_count_nowhere(h5, tmp_path, kind):
    path = h5(ct={"data": np.ones((8, 8)), "chunks": (2, 8), "fletcher32": True})
    damage_chunk(path, "ct", (4, 0))
    source = HDF5Source(path, {"x": Field("ct", patch=(4, 8), stride=(1, 8))})  # rows 4, 5 are damaged
    loader = {"batch_size": 2, "on_error": "skip", "max_bad": 9}
    module = AsyncDataModule(predict=source, loader=loader)
    trainer(PredictionWriter(tmp_path / "out")).predict(Sevens(kind), module, return_predictions=False)
    with h5py.File(tmp_path / "out/predictions.h5") as file:
        merge_patches(file["prediction"], source, tmp_path / "merged.h5")
    with h5py.File(tmp_path / "merged.h5") as file:
        expected = np.full((8, 8), np.nan)
        expected[:4] = torch.tensor(7).to(kind).item()  # the only sample without a damaged row begins at 0
        np.testing.assert_array_equal(file["x.h5"][...], expected)


@pytest.mark.parametrize(
    "given",
    [
        torch.from_numpy,
        lambda values: torch.from_numpy(values).bfloat16(),
        lambda values: list(torch.from_numpy(values).int()),
        lambda values: values.astype(">i2"),
    ],
)
def test_tensors_and_lists_of_numbers_are_taken(path, tmp_path, given):
    source = source_of(path)
    merge_patches(given(np.full((len(source), *SIZE), 3.0)), source, tmp_path / "merged.h5")
    with h5py.File(tmp_path / "merged.h5") as file:
        assert all((volume[...] == 3).all() for volume in file["x.h5/scans"].values())


@pytest.mark.parametrize("axes", [(10, 3), (10,), (2, 10)], ids=["as stored", "labels", "channels"])
def test_predictions_of_points(h5, tmp_path, axes):
    path = h5(xyz=np.zeros((103, 3)), labels=np.arange(103))
    source = HDF5Source(path, {"x": Field("xyz", points=10), "y": Field("labels", points=10)})
    labels = read(source, np.arange(len(source)))["y"]
    given = {(10, 3): labels[..., None], (10,): labels, (2, 10): labels[:, None]}[axes]
    merge_patches(np.broadcast_to(given, (len(source), *axes)), source, tmp_path / "merged.h5")
    with h5py.File(tmp_path / "merged.h5") as file:
        expected = np.arange(103)[:, None] if axes == (10, 3) else np.arange(103)
        shape = {(10, 3): (103, 3), (10,): (103,), (2, 10): (2, 103)}[axes]
        np.testing.assert_array_equal(file["x.h5"][...], np.broadcast_to(expected, shape))


def test_what_does_not_fit_is_named_and_leaves_no_file(path, tmp_path):
    source, target = source_of(path), tmp_path / "merged.h5"
    values = np.zeros((len(source), *SIZE))
    for given, of, message in [
        (values[1:], source, f"predictions: {len(source) - 1} for {len(source)} samples"),
        (values[..., 1:], source, r"predictions: one has shape \(5, 6, 7\), but a patch has \(5, 6, 8\)"),
        (None, source, f"predictions: 0 for {len(source)} samples"),
        ([[[1.0], [1.0, 2.0]]] * len(source), source, "predictions: sample 0 is no array: .*inhomogeneous"),
        ([*values[1:], values[0, 0]], source, rf"predictions: sample {len(source) - 1} has shape \(6, 8\), but the"),
        (torch.zeros(values.shape, dtype=torch.cfloat), source, "predictions: sample 0 is of type complex64"),
        (values.astype(str), source, "predictions: sample 0 is of type <U32; give an array of numbers"),
        (values[:6], source_of(path, None, patches_per_volume=2), "source: .* has no patches on a grid"),
        (values, ConcatSource([source, source]), "source: .* sources put end to end; predict and merge each by itself"),
    ]:
        with pytest.raises(ConfigError, match=f"^{message}"):
            merge_patches(given, of, target)
        assert [each.name for each in tmp_path.iterdir()] == ["x.h5"]
    with pytest.raises(SourceError, match=r"nofolder/merged\.h5: cannot be written: .*; check its folder and space"):
        merge_patches(values, source, tmp_path / "nofolder/merged.h5")
    target.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"path: .*merged\.h5 exists"):
        merge_patches(values, source, target)
    assert target.read_bytes() == b"mine"
