"""What a row holds and what its paths name: labels, images with their random crops, and arrays."""

import contextlib
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from PIL import Image
from support.sources.manifests import COLUMNS, IDS, given, labels, of_paths
from support.sources.oracle import read

import lit_async_data as lad
from lit_async_data.errors import ConfigError, CorruptError, FormatError, ManifestError
from lit_async_data.sources import local_files
from lit_async_data.sources.manifest import files as fetching


def smooth(height, width, seed=0):
    """An image in which every place and channel is another one, and that survives JPEG and resizing."""
    rows, columns = np.mgrid[0:height, 0:width]
    red, green = rows * (255 / max(height - 1, 1)), columns * (255 / max(width - 1, 1))
    blue = 128 + 100 * np.sin((rows + columns) / 9 + seed)
    return np.stack([red, green, blue], axis=-1).round().astype(np.uint8)


def test_batches_are_channels_last_in_memory(tmp_path):
    for number in range(4):
        Image.fromarray(smooth(6, 5, number)).save(tmp_path / f"{number}.png")
    source = of_paths(tmp_path, [f"{number}.png" for number in range(4)])
    for transform in (None, lad.Normalize(scale="type")):
        with lad.AsyncLoader(source, {"batch_size": 4, "shuffle": False}, device_transform=transform) as loader:
            batch = next(iter(loader))["x"]
        assert batch.shape == (4, 3, 6, 5)
        assert batch.dtype == (torch.float32 if transform else torch.uint8)
        assert batch.is_contiguous(memory_format=torch.channels_last)
        stored = (batch + 1) * 127.5 if transform else batch
        for number in range(4):
            np.testing.assert_allclose(stored[number].permute(1, 2, 0), smooth(6, 5, number), atol=1e-4)


@pytest.fixture
def places(tmp_path):
    """Six images in which a pixel says where it is, and masks that say the same in grey."""
    rows, columns = np.mgrid[0:64, 0:64]
    image = np.stack([rows * 4, columns * 4, np.zeros((64, 64))], axis=-1).astype(np.uint8)
    for number in range(6):
        image[..., 2] = number
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        Image.fromarray(image[..., 0]).save(tmp_path / f"{number}-rows.png")
        Image.fromarray(image[..., 1]).save(tmp_path / f"{number}-columns.png")
    return tmp_path


PATHS = [f"{number}.png" for number in range(6)]
CROP = {"image_size": 16, "resize": "random_crop", "scale": (0.2, 0.5)}


def crops(source, epochs=2, **options):
    found = []
    options = {"batch_size": 2, "shuffle": False, "return_indices": True, **options}
    with lad.AsyncLoader(source, options) as loader:
        for _ in range(epochs):
            seen = {}
            for batch in loader:
                seen.update(zip(batch["index"].tolist(), batch["x"].numpy().copy()))
            found.append(np.stack([seen[sample] for sample in sorted(seen)]))
    return found


def test_a_random_crop_is_another_one_in_each_epoch_and_the_same_for_a_seed(places):
    source = of_paths(places, PATHS, **CROP)
    assert source.spec["x"].shape == (3, 16, 16)
    one, two = crops(source, seed=3)
    for sample in range(6):
        assert not np.array_equal(one[sample], two[sample])
        assert (one[sample][2] == sample).all()
    assert len({one[sample][0].tobytes() for sample in range(6)}) == 6
    for options in ({"workers": 0}, {"workers": 1, "shuffle": "global"}, {"workers": 3, "batch_size": 5}):
        np.testing.assert_array_equal(crops(source, seed=3, **options), [one, two])
    assert not np.array_equal(crops(source, seed=4)[0], one)
    again = crops(pickle.loads(pickle.dumps(source)), seed=3)
    np.testing.assert_array_equal(again, [one, two])


def test_evaluation_takes_the_middle(places):
    source = of_paths(places, PATHS, **CROP)
    middle = read(of_paths(places, PATHS, image_size=16, resize="crop"), np.arange(6))["x"]
    np.testing.assert_array_equal(read(source, np.arange(6))["x"], middle)
    for epoch in crops(source, augment=False):
        np.testing.assert_array_equal(epoch, middle)
    data = lad.AsyncDataModule(train=source, val=source, test=source, predict=source, loader={"batch_size": 6})
    with contextlib.closing(data):
        for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
            np.testing.assert_array_equal(next(iter(loader))["x"], middle)
        assert not np.array_equal(np.sort(next(iter(data.train_dataloader()))["x"], axis=0), middle)


def test_a_mask_takes_the_crop_of_its_image(places):
    names = {"path": "", "rows": "-rows", "columns": "-columns"}
    table = pa.table({name: [f"{number}{end}.png" for number in range(6)] for name, end in names.items()})
    near = {"mode": "L", "interpolation": "nearest"}
    fields = {"x": "path", "r": {"name": "rows", **near}, "c": {"name": "columns", **near}}
    source = lad.ManifestSource(table, fields, root=places, interpolation="nearest", **CROP)
    assert source.spec["r"].shape == (1, 16, 16)
    with lad.AsyncLoader(source, lad.LoaderOptions(batch_size=3, shuffle=False, workers=2)) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch["x"][:, 0].equal(batch["r"][:, 0])
                assert batch["x"][:, 1].equal(batch["c"][:, 0])
    blurred = lad.ManifestSource(table, {**fields, "x": "path"}, root=places, **CROP)
    with lad.AsyncLoader(blurred, lad.LoaderOptions(batch_size=6, shuffle=False)) as loader:
        for batch in loader:
            # The same part by another interpolation: within the size of one pixel of the crop.
            assert (batch["x"][:, 0].int() - batch["r"][:, 0].int()).abs().max() <= 16
            assert (batch["r"].unique() % 4 == 0).all()


def test_crops_of_subsets_and_of_sources_in_a_row(places):
    whole = of_paths(places, PATHS, **CROP)
    for drawing in (lad.SubsetSource(whole, [5, 1, 3]), lad.ConcatSource([whole, whole])):
        one, two = crops(drawing)
        assert not np.array_equal(one, two)
        np.testing.assert_array_equal(crops(drawing, workers=3), [one, two])
        still = crops(drawing, augment=False)
        np.testing.assert_array_equal(still[0], still[1])


@pytest.fixture
def straight(monkeypatch):
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system does not say what is in memory")
    monkeypatch.setattr(local_files, "RECENT_NS", 0)  # tests are faster
    found, of = [], fetching.filled
    monkeypatch.setattr(fetching, "filled", lambda *given: found.append(of(*given)) or found[-1])
    return found


def stored(folder, *arrays):
    """The source of arrays in files, none of which was looked at but the first."""
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array)
    return of_paths(folder, [f"{number}.npy" for number in range(len(arrays))], check_files="none")


def test_arrays_that_are_alike_are_read_straight_to_their_place(tmp_path, straight):
    arrays = [np.random.default_rng(number).normal(size=(3, 5)).astype("f4") for number in range(4)]
    source = stored(tmp_path, *arrays)
    assert np.array_equal(read(source, [2, 0, 3, 1])["x"], np.stack(arrays)[[2, 0, 3, 1]])
    assert straight == [True] * 4  # the first file was looked at before


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (np.arange(6.0).reshape(2, 3).astype(">f8"), True),
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), True),
        (np.arange(6).reshape(2, 3), False),  # as many bytes, of another type
        (np.arange(6.0).reshape(3, 2), False),
        (np.arange(8.0).reshape(2, 4), False),
    ],
)
def test_an_array_that_lies_otherwise_is_decoded_or_refused(tmp_path, straight, other, same):
    source = stored(tmp_path, np.zeros((2, 3)), other)
    if same:
        assert np.array_equal(read(source, [0, 1])["x"][1], other)
    else:
        with pytest.raises(FormatError, match=r"row 1.*1\.npy"):
            read(source, [1])


def test_an_array_whose_file_is_longer_is_refused(tmp_path, straight):
    np.save(tmp_path / "a.npy", np.zeros(1024 - 32, "f4"))  # a page, with its head
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes() + b"\0")
    source = of_paths(tmp_path, ["a.npy", "b.npy"], check_files="none")
    with pytest.raises(CorruptError, match=r"row 1.*b\.npy"):
        read(source, [1])
    assert straight == [False]


def test_an_array_of_another_type_is_not_filled_with_the_bytes_of_a_file(tmp_path, straight):
    source = stored(tmp_path, np.zeros((2, 3), "f4"), np.ones((2, 3), "f4"))
    with pytest.raises(FormatError, match=r"row 1.*1\.npy: holds float32"):
        source.read_into(np.array([1]), {"x": np.zeros((1, 2, 3), "i4")})
    parts = np.zeros((1, 2, 6), "f4")[:, :, ::2]
    source.read_into(np.array([1]), {"x": parts})
    assert (parts == 1).all()
    assert not straight


def test_an_array_that_was_written_a_moment_ago_is_looked_at_before_and_after(tmp_path, straight, monkeypatch):
    source = stored(tmp_path, np.ones(3))
    monkeypatch.setattr(local_files, "RECENT_NS", 2 * 10**9)
    written = (tmp_path / "0.npy").stat().st_mtime_ns
    for age, at_once in ((10**9, False), (3 * 10**9, True)):
        monkeypatch.setattr(local_files.time, "time_ns", lambda age=age: written + age)
        assert (read(source, [0])["x"] == 1).all()
        assert straight.pop() == at_once


def test_a_link_out_of_the_root_is_refused_on_every_way(tmp_path, straight):
    (tmp_path / "root").mkdir()
    np.save(tmp_path / "secret.npy", np.zeros(3))
    np.save(tmp_path / "root/a.npy", np.ones(3))
    (tmp_path / "root/out.npy").symlink_to(tmp_path / "secret.npy")
    (tmp_path / "root/in.npy").symlink_to(tmp_path / "root/a.npy")
    source = of_paths(tmp_path / "root", ["a.npy", "in.npy", "out.npy"], check_files="none")
    assert np.array_equal(read(source, [0, 1])["x"], np.ones((2, 3)))
    with pytest.raises(ManifestError, match=r"row 2.*leaves root"):
        read(source, [2])
    free = of_paths(tmp_path / "root", ["a.npy", "out.npy"], check_files="none", allow_external=True)
    assert np.array_equal(read(free, [1])["x"], np.zeros((1, 3)))


def test_single_numbers_are_decoded_since_they_become_wider(tmp_path, straight):
    source = stored(tmp_path, *np.arange(3, dtype="i2"))
    assert read(source, [2, 1])["x"].tolist() == [2, 1]
    assert not straight


@pytest.mark.parametrize("dtype", [None, "int32", "float32"])
def test_other_classes_keep_type_and_what_is_ignored(dtype):
    field = {"name": "y", "null": "ignore", "dtype": dtype}
    source = lad.ManifestSource(pa.table({"y": ["b", None, "a"]}), {"y": field})
    changed = source.with_classes({"y": ["z", "a", "b"]})
    assert changed.column("y").tolist() == [2, -100, 1]
    assert changed.spec["y"].dtype == np.dtype(dtype or "int64")
    assert (changed.spec["y"].classes, source.spec["y"].classes) == (("z", "a", "b"), ("a", "b"))
    with pytest.raises(ManifestError, match="'b' is not one of") as caught:
        source.with_classes({"y": ["a", "c"]})
    assert caught.value.row == 0
    own = lad.ManifestSource(pa.table({"y": ["b"]}), {"y": {**field, "classes": ["b", "c"]}})
    assert own.with_classes({"y": ["c", "b"]}).spec["y"].classes == ("b", "c")


def test_a_row_that_one_field_drops_counts_for_no_other():
    table = pa.table({"id": ["a", "b", "b"], "x": [1.5, 2.5, None], "y": ["owl", "auk", "rare"], "z": [1, 2, None]})
    source = lad.ManifestSource(table, {"x": {"name": "x", "null": "drop"}, "y": "y", "z": "z"}, id="id")
    assert len(source) == 2
    assert source.spec["y"].classes == ("auk", "owl")
    assert source.with_classes({"y": ["auk", "owl"]}).spec == source.spec
    assert source.column("z").tolist() == [1, 2]


def test_a_value_that_does_not_fit_is_named_by_the_id_of_its_row_also_behind_dropped_ones():
    table = pa.table({"id": ["a", "b", "c"], "v": [[np.nan], [1.0], [2.0]], "y": [1, 2, 300], "f": [1.0, 2.0, 1e300]})
    for name, dtype in (("y", "uint8"), ("f", "float32")):
        fields = {"v": {"name": "v", "null": "drop"}, "y": {"name": name, "dtype": dtype}}
        with pytest.raises(ManifestError, match=rf"row 2, id 'c', column '{name}': .* does not fit into {dtype}"):
            lad.ManifestSource(table, fields, id="id")


def test_a_dropped_row_needs_no_value_that_fits():
    table = pa.table({"y": [1, None, 3], "v": [[1.0, 2.0], [3.0, 4.0], [5.0, None]]})
    fields = {"y": {"name": "y", "null": "drop", "dtype": "uint8"}, "v": {"name": "v", "null": "drop"}}
    source = lad.ManifestSource(table, fields)
    assert source.column("y").tolist() == [1]
    assert source.spec["y"].dtype == np.uint8
    assert source.locate([0])[0].row == 0


def test_a_type_of_ones_own():
    assert labels([0, 1, 2], dtype="float32")[1].dtype == np.float32
    assert labels([0, 1, 2], dtype="uint8")[1].tolist() == [0, 1, 2]
    assert labels([0.5, 1.5], dtype="float32")[0].spec["y"].dtype == np.float32
    with pytest.raises(ConfigError, match="dtype"):
        labels([0, 1], dtype="flot32")


@pytest.mark.parametrize("values", [[1, None, 3], [0.5, float("nan"), 1.5], ["a", None, "b"]])
def test_null_drop_leaves_the_sample_out_of_all_fields(values, folder):
    table = pa.table({"id": IDS[:3], "path": COLUMNS["path"][:3], "y": values})
    source = lad.ManifestSource(table, {"x": "path", "y": {"name": "y", "null": "drop"}}, id="id", root=folder)
    assert len(source) == 2
    assert [(where.row, where.id) for where in source.locate([0, 1])] == [(0, "000"), (2, "002")]
    got = read(source, [1, 0])
    assert got["x"][:, 0, 0].tolist() == [2, 0]
    assert source.column("id").tolist() == ["000", "002"]
    assert source.column("y").tolist() == [got["y"][1], got["y"][0]]
    assert source.parts[0].samples == 2


def test_null_drop_of_every_row_is_an_error():
    with pytest.raises((ManifestError, ConfigError), match=r"(?i)row|sample"):
        labels(pa.array([None, None], pa.float64()), null="drop", kind="number")


def test_a_path_that_is_missing_can_be_dropped(folder):
    table = given(path=[None, *COLUMNS["path"][1:]])
    source = lad.ManifestSource(table, {"x": {"name": "path", "null": "drop"}}, root=folder)
    assert read(source, np.arange(11))["x"][:, 0, 0].tolist() == list(range(1, 12))
    assert source.chunks.left_out == "1 of 12 samples are left out, and sample numbers (`index`) count the rest"


@pytest.mark.parametrize("kind", ["text", "categories", "numbers", "CSV"])
def test_a_path_that_is_missing_is_a_bad_sample(kind, folder, tmp_path):
    paths, column = pa.array([None if number == 5 else f"{number}.npy" for number in range(12)]), {"name": "path"}
    if kind == "numbers":
        paths, column = pa.array([None if number == 5 else number for number in range(12)]), column | {"suffix": ".npy"}
    table = given(path=paths.dictionary_encode() if kind == "categories" else paths)
    if kind == "CSV":
        pyarrow.csv.write_csv(table.select(["id", "path"]), tmp_path / "t.csv")
        table = tmp_path / "t.csv"
    source = lad.ManifestSource(table, {"x": column}, id="id", root=folder / "a")
    with pytest.raises(ManifestError, match=r"id '005': column 'path': no path; give one, or set null: drop$") as found:
        read(source, [5])
    assert (found.value.row, found.value.sample_id) == (5, 5)
    with lad.AsyncLoader(source, {"batch_size": 4, "on_error": "skip", "max_bad": 1}) as loader:
        assert sum(len(batch["x"]) for batch in loader) == 11
        assert loader.state_dict()["bad_samples"] == [5]
    assert [place.path is None for place in source.locate([4, 5])] == [False, True]


NOTE = "for captions or ids, set kind: text; for paths of files, kind: image or kind: npy, and suffix if they lack an "
NOTE += "ending, and check root"


def test_paths_that_are_taken_for_classes_are_told(tmp_path, caplog):
    lists = [[f"p/{number}", f"q/{number}"] for number in range(5)]
    lad.ManifestSource(pa.table({"v": [*lists, ["p/0"]]}), {"v": "v"})
    assert not caplog.records
    lad.ManifestSource(pa.table({"v": lists}), {"v": "v"})
    assert caplog.messages == ["column 'v': each of its 10 texts is another class; " + NOTE]
    caplog.clear()
    table = pa.table({"p": [f"img_{number}" for number in range(10)], "y": ["a", "b"] * 5})
    lad.ManifestSource(table, {"x": "p", "y": "y"}, root=tmp_path)
    assert caplog.messages == ["column 'p': each of its 10 texts is another class; " + NOTE]


def test_patients_that_are_no_label_stay_out_of_the_fields_and_are_looked_up():
    # Folds by patient: those of validation are none of training's, which is what is wanted.
    patients, folds = [f"p{number // 2}" for number in range(12)], [number // 4 for number in range(12)]
    table = pa.table({"patient": patients, "fold": folds, "y": [0, 1] * 6})
    fold = [["fold", "==", 2]]
    val = lad.ManifestSource(table, {"y": "y", "patient": "patient"}, filters=fold)
    with pytest.raises(ManifestError, match="'p4' is not one of the 4 classes") as caught:
        val.with_classes({"patient": ["p0", "p1", "p2", "p3"]})
    message = str(caught.value)
    assert "train with it" not in message
    assert "leave the row out" not in message
    # Each way out that it names works.
    assert '{"name": "patient", "classes": [...]}' in message
    fields = {"y": "y", "patient": {"name": "patient", "classes": sorted(set(patients))}}
    val = lad.ManifestSource(table, fields, filters=fold).with_classes({"patient": ["p0"]})
    assert val.column("patient").tolist() == [4, 4, 5, 5]
    assert "set kind: text; source.spec.names(KEY, batch[KEY])" in message
    val = lad.ManifestSource(table, {"patient": {"name": "patient", "kind": "text"}}, filters=fold)
    assert val.spec.names("patient", val.column("patient")).tolist() == ["p4", "p4", "p5", "p5"]
    source = lad.ManifestSource(table, {"y": "y"}, filters=fold)
    side = lad.SubsetSource(source, np.array([3, 1, 0]))
    with lad.AsyncLoader(side, lad.LoaderOptions(batch_size=4, shuffle="none", return_indices=True)) as loader:
        assert source.column("patient")[next(loader)["index"]].tolist() == ["p5", "p4", "p4"]
