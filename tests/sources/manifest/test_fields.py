"""What a row holds and what its paths name: labels, arrays, and images with their crops, masks and views."""

import contextlib
import itertools
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from PIL import Image
from support.files.pictures import exif
from support.sources.manifests import COLUMNS, IDS, given, labels, of_paths
from support.sources.oracle import read

import lit_async_data as lad
from lit_async_data import AsyncLoader, LoaderOptions, ManifestSource
from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, FormatError, ManifestError, MissingError
from lit_async_data.sources import local_files
from lit_async_data.sources.manifest import files as fetching


def test_batches_are_channels_last_in_memory(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)
    for number in range(4):
        Image.fromarray(pixels[number]).save(tmp_path / f"{number}.png")
    source = of_paths(tmp_path, PATHS[:4])
    for transform in (None, lad.Normalize(scale="type")):
        with lad.AsyncLoader(source, {"batch_size": 4, "shuffle": False}, device_transform=transform) as loader:
            batch = next(iter(loader))["x"]
        assert batch.dtype == (torch.float32 if transform else torch.uint8)
        assert batch.is_contiguous(memory_format=torch.channels_last)
        values = (batch + 1) * 127.5 if transform else batch
        np.testing.assert_allclose(values.permute(0, 2, 3, 1), pixels, atol=1e-4)


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
    return np.stack(found)


def test_a_random_crop_is_another_one_in_each_epoch_and_the_same_for_a_seed(places):
    source = of_paths(places, PATHS, **CROP)
    assert source.spec["x"].shape == (3, 16, 16)
    found = crops(source, seed=3)
    assert (found[:, :, 2] == np.arange(6)[:, None, None]).all()
    assert len({crop[0].tobytes() for epoch in found for crop in epoch}) == 12
    for options in ({"workers": 0}, {"workers": 1, "shuffle": "global"}, {"workers": 3, "batch_size": 5}):
        np.testing.assert_array_equal(crops(source, seed=3, **options), found)
    assert not np.array_equal(crops(source, seed=4), found)
    np.testing.assert_array_equal(crops(pickle.loads(pickle.dumps(source)), seed=3), found)
    for drawing in (lad.SubsetSource(source, [5, 1, 3]), lad.ConcatSource([source, source])):
        one, two = crops(drawing)
        assert not np.array_equal(one, two)
        np.testing.assert_array_equal(crops(drawing, workers=3), [one, two])


def test_evaluation_takes_the_middle(places):
    source = of_paths(places, PATHS, **CROP)
    middle = read(of_paths(places, PATHS, image_size=16, resize="crop"), np.arange(6))["x"]
    np.testing.assert_array_equal(read(source, np.arange(6))["x"], middle)
    np.testing.assert_array_equal(crops(lad.SubsetSource(source, range(6)), augment=False), [middle, middle])
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
    for interpolation, most in (("nearest", 0), ("bilinear", 16)):  # within the size of one pixel of the crop
        source = lad.ManifestSource(table, fields, root=places, interpolation=interpolation, **CROP)
        with lad.AsyncLoader(source, lad.LoaderOptions(batch_size=3, shuffle=False, workers=2)) as loader:
            for batch in itertools.chain(loader, loader):
                for channel, key in enumerate("rc"):
                    assert (batch["x"][:, channel].int() - batch[key][:, 0].int()).abs().max() <= most
                    assert (batch[key].unique() % 4 == 0).all()


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
    ],
)
def test_an_array_that_lies_otherwise_is_decoded_or_refused(tmp_path, straight, other, same):
    source = stored(tmp_path, np.zeros((2, 3)), other)
    with contextlib.nullcontext() if same else pytest.raises(FormatError, match=r"row 1.*1\.npy"):
        assert np.array_equal(read(source, [0, 1])["x"][1], other)


def test_an_array_whose_file_is_longer_is_refused(tmp_path, straight):
    np.save(tmp_path / "a.npy", np.zeros(1024 - 32, "f4"))  # a page, with its head
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes() + b"\0")
    source = of_paths(tmp_path, ["a.npy", "b.npy"], check_files="none")
    with pytest.raises(CorruptError, match=r"row 1.*b\.npy"):
        read(source, [1])
    assert straight == [False]


def test_what_lies_otherwise_in_memory_is_not_filled_with_the_bytes_of_a_file(tmp_path, straight):
    source = stored(tmp_path, np.zeros((2, 3), "f4"), np.ones((2, 3), "f4"))
    with pytest.raises(FormatError, match=r"row 1.*1\.npy: holds float32"):
        source.read_into(np.array([1]), {"x": np.zeros((1, 2, 3), "i4")})
    parts = np.zeros((1, 2, 6), "f4")[:, :, ::2]
    source.read_into(np.array([1]), {"x": parts})
    assert (parts == 1).all()
    assert read(stored(tmp_path, *np.arange(3, dtype="i2")), [2, 1])["x"].tolist() == [2, 1]  # which become wider
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


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_other_classes_keep_type_and_what_is_ignored(dtype):
    field = {"name": "y", "null": "ignore", "dtype": dtype}
    source = lad.ManifestSource(pa.table({"y": ["b", None, "a"]}), {"y": field})
    changed = source.with_classes({"y": ["z", "a", "b"]})
    ignored = np.nan if dtype == "float32" else -100
    assert np.array_equal(changed.column("y"), [2, ignored, 1], equal_nan=True)
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


def test_a_value_that_does_not_fit_is_named_by_the_id_of_its_row_if_it_is_not_dropped():
    table = pa.table({"id": ["a", "b", "c"], "v": [[np.nan], [1.0], [2.0]], "y": [1, 2, 300], "f": [1.0, 2.0, 1e300]})
    drop = {"name": "v", "null": "drop"}
    for name, dtype in (("y", "uint8"), ("f", "float32")):
        fields = {"v": drop, "y": {"name": name, "dtype": dtype}}
        with pytest.raises(ManifestError, match=rf"row 2, id 'c', column '{name}': .* does not fit into {dtype}"):
            lad.ManifestSource(table, fields, id="id")
    table = pa.table({"y": [1, None, 300], "v": [[1.0, 2.0], [3.0, 4.0], [5.0, None]]})
    source = lad.ManifestSource(table, {"y": {"name": "y", "null": "drop", "dtype": "uint8"}, "v": drop})
    assert (source.column("y").tolist(), source.spec["y"].dtype) == ([1], np.uint8)


def test_a_type_of_ones_own():
    for values, dtype in (([0, 1, 2], "uint8"), ([0, 1, 2], "float32"), ([0.5, 1.5], "float32")):
        source, got = labels(values, dtype=dtype)
        assert (source.spec["y"].dtype, got.dtype, got.tolist()) == (dtype, dtype, values)
    with pytest.raises(ConfigError, match="dtype"):
        labels([0, 1], dtype="flot32")


@pytest.mark.parametrize("values", [[1, None, 3], [0.5, float("nan"), 1.5], ["a", None, "b"]])
def test_null_drop_leaves_the_sample_out_of_all_fields(values, folder):
    table = pa.table({"id": IDS[:3], "path": COLUMNS["path"][:3], "y": values})
    source = lad.ManifestSource(table, {"x": "path", "y": {"name": "y", "null": "drop"}}, id="id", root=folder)
    assert len(source) == source.parts[0].samples == 2
    assert [(where.row, where.id) for where in source.locate([0, 1])] == [(0, "000"), (2, "002")]
    got = read(source, [1, 0])
    assert got["x"][:, 0, 0].tolist() == [2, 0]
    assert source.column("id").tolist() == ["000", "002"]
    assert source.column("y").tolist() == [got["y"][1], got["y"][0]]
    with pytest.raises((ManifestError, ConfigError), match=r"(?i)row|sample"):
        labels(pa.array([None, None], pa.float64()), null="drop", kind="number")


@pytest.mark.parametrize("kind", ["text", "categories", "numbers", "CSV"])
def test_a_path_that_is_missing_is_a_bad_sample_or_dropped(kind, folder, tmp_path):
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
    dropped = lad.ManifestSource(table, {"x": {**column, "null": "drop"}}, root=folder / "a")
    assert read(dropped, np.arange(11))["x"][:, 0, 0].tolist() == [*range(5), *range(6, 12)]
    assert dropped.chunks.left_out == "1 of 12 samples are left out, and sample numbers (`index`) count the rest"


def test_paths_that_are_taken_for_classes_are_told(caplog):
    lists = [[f"p/{number}", f"q/{number}"] for number in range(5)]
    lad.ManifestSource(pa.table({"v": [*lists, ["p/0"]]}), {"v": "v"})
    assert not caplog.records
    table = pa.table({"v": lists * 2, "p": [f"img_{number}" for number in range(10)], "y": ["a", "b"] * 5})
    lad.ManifestSource(table, {"x": "p", "y": "y"})
    lad.ManifestSource(table.slice(0, 5), {"v": "v"})
    said = "each of its 10 texts is another class; for captions or ids, set kind: text; for paths of files, kind: image"
    assert [line.partition(" or kind")[0] for line in caplog.messages] == [f"column {name!r}: {said}" for name in "pv"]


MASK = {"name": "m", "mode": "P"}


@pytest.fixture
def pictures(tmp_path):
    """Images of 20×40 pixels, plain and turned, and masks."""
    pixels = np.zeros((20, 40, 3), "u1")
    pixels[:, :20] = 200
    mask = (pixels[..., 0] > 0).astype("u1") * 3
    Image.fromarray(pixels).save(tmp_path / "plain.png")
    Image.fromarray(pixels).save(tmp_path / "turned6.jpg", exif=exif(6))
    for name, each in {"mask": mask, "smaller": mask[:10, :30], "half": mask[::2, ::2], "turned": mask.T}.items():
        Image.fromarray(each.copy()).save(tmp_path / f"{name}.png")
    np.save(tmp_path / "m.npy", mask)
    return tmp_path


def source(folder, images, masks, *, m=MASK, **options):
    return ManifestSource(pa.table({"x": images, "m": masks}), {"x": "x", "m": m}, root=folder, **options)


@pytest.mark.parametrize("size", [None, 16])
def test_a_turned_image_beside_its_mask_as_stored(size, pictures):
    with pytest.raises(FormatError, match=r"mask.png: x is turned by the orientation in its file \(6\)"):
        source(pictures, ["turned6.jpg"], ["mask.png"], image_size=size)
    batch = read(source(pictures, ["turned6.jpg"], ["turned.png"], image_size=size), [0])
    assert ((batch["x"][0, 0] > 100) == (batch["m"][0, 0] == 3)).mean() > 0.95
    # Grey beside another image needs a mode if it is resized.
    if size:
        with pytest.raises(ConfigError, match=r"^fields.m.mode: missing; the first image is grey"):
            source(pictures, ["plain.png"], ["mask.png"], m="m", image_size=size)
    Image.fromarray(np.zeros((20, 40), "u1")).convert("P").save(pictures / "palette.png")
    with pytest.raises(ConfigError, match=r"^fields.m.mode: missing; .* has a palette, .*; set P for"):
        source(pictures, ["plain.png"], ["palette.png"], m="m", image_size=size)
    assert len(source(pictures, ["plain.png"], ["mask.png"], m={"name": "m", "mode": "RGB"}, image_size=size)) == 1


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_error_of_a_mask_belongs_to_its_sample(policy, pictures):
    images, masks = ["plain.png"] * 6, ["mask.png", "smaller.png", "half.png", "mask.png", "mask.png", "mask.png"]
    images[4] = "turned6.jpg"
    made, errors, seen = source(pictures, images, masks, image_size=8), [], []
    options = LoaderOptions(batch_size=1, shuffle=False, on_error=policy, max_bad=2, return_indices=True)
    with AsyncLoader(made, options) as loader:
        for _ in range(6):
            try:
                seen += next(loader)["index"].tolist()
            except AsyncDataError as error:
                errors.append((error.row, error.sample_id, error.file))
    files = [(1, 1, str(pictures / "smaller.png")), (4, 4, str(pictures / "mask.png"))]
    assert errors == (files if policy == "raise" else [])
    assert sorted(set(seen)) == [0, 2, 3, 5]
    with pytest.raises(FormatError, match=r"row 1 of the table given: .*smaller.png: x has 20×40 and m has 10×30"):
        read(made, [0, 1])
    assert made.spec.fields.keys() == {"x", "m"}


def test_an_array_beside_an_image_that_is_cut_or_turned(pictures, h5):
    h5("m.h5", data=np.zeros((3, 20, 40), "u1"))
    images = ["plain.png", "turned6.jpg", "plain.png"]
    table = pa.table({"x": images, "npy": ["m.npy"] * 3, "path": ["m.h5"] * 3, "row": [0, 1, 2]})
    for other in ("npy", "path"):
        with pytest.raises(FormatError, match=r"plain.png: x is changed by resize: random_crop, but m, "):
            ManifestSource(table, {"x": "x", "m": other}, root=pictures, image_size=8, resize="random_crop")
        made = ManifestSource(table, {"x": "x", "m": other}, root=pictures, image_size=8)
        assert len(read(made, [0, 2])["x"]) == 2
        with pytest.raises(FormatError, match=r"row 1 of .*turned6.jpg: x is turned by .* \(6\)") as caught:
            read(made, [0, 1, 2])
        assert (caught.value.sample_id, caught.value.file) == (1, str(pictures / "turned6.jpg"))


def test_two_views_of_one_image_can_be_cropped_apart(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), "u1")
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "m.png")
    table = pa.table({"x": ["a.png"] * 4, "m": ["m.png"] * 4})
    apart = {"name": "x", "draw": "b"}
    fields = {"a": "x", "same": "x", "b": apart, "m": {**MASK, "draw": "b"}, "n": MASK}
    options = {"image_size": 16, "resize": "random_crop", "scale": (0.1, 0.3)}
    with lad.AsyncLoader(lad.ManifestSource(table, fields, root=tmp_path, **options), {"batch_size": 4}) as loader:
        batch = {key: values.numpy() for key, values in next(loader).items()}
    assert np.array_equal(batch["a"], batch["same"])
    assert not any(np.array_equal(one, other) for one, other in zip(batch["a"], batch["b"], strict=True))
    assert not np.array_equal(batch["m"], batch["n"])  # each mask goes with its view
    middle = read(lad.ManifestSource(table, {"a": "x", "b": apart}, root=tmp_path), [0])
    assert np.array_equal(middle["a"], middle["b"])


@pytest.mark.parametrize("damage", ["gone", "cut", "text"])
@pytest.mark.parametrize(("suffix", "size"), [("png", None), ("png", 8), ("npy", None)])
def test_bad_files_at_the_start_do_not_stop_a_run_that_skips_them(damage, size, suffix, tmp_path):
    for number in range(20):
        pixels, path = np.full((6, 9, 3), number, "u1"), tmp_path / f"{number}.{suffix}"
        np.save(path, pixels) if suffix == "npy" else Image.fromarray(pixels).save(path)
        if number in (0, 1, 17):
            data = path.read_bytes()
            path.unlink() if damage == "gone" else path.write_bytes(data[:-9] if damage == "cut" else b"not this")
    table = pa.table({"x": [f"{number}.{suffix}" for number in range(20)]})
    options = {"root": tmp_path, **({"image_size": size} if size else {})}
    made = ManifestSource(table, {"x": "x"}, **options)
    assert made.spec["x"].shape == ((6, 9, 3) if suffix == "npy" else (3, size or 6, size or 9))
    skip = LoaderOptions(batch_size=4, shuffle=False, on_error="skip", max_bad=3, return_indices=True)
    with AsyncLoader(made, skip) as loader:
        assert sorted(np.concatenate([batch["index"] for batch in loader])) == [*range(2, 17), 18, 19]
    bad = (MissingError, CorruptError, FormatError)
    with pytest.raises(bad, match="row 0 of the table given"):
        read(made, [0])
    with pytest.raises(bad, match=r"none of the first 3 is good \(rows 0, 1, 2\)") as caught:
        ManifestSource(table.take([0, 1, 17]), {"x": "x"}, **options)
    assert [each.row for each in caught.value.errors] == [0, 1, 2]
