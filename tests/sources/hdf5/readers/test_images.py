"""Encoded images in HDF5 files: every storage equals plain decoding, bad rows are named, and images go together."""

import h5py
import numpy as np
import pytest
from PIL import Image
from support.files.encoded_images import IMAGES, PIXELS, ROWS, SIDES, STORAGES, VARIABLE, field, picture, written
from support.files.pictures import exif, stored
from support.sources.oracle import read, read_from

from lit_async_data import (
    AsyncLoader,
    ConfigError,
    CorruptError,
    Field,
    FormatError,
    HDF5Source,
    LoaderOptions,
    ManifestSource,
    statistics,
)
from lit_async_data.errors import AsyncDataError
from lit_async_data.tools.pack import pack

pytestmark = pytest.mark.usefixtures("no_extra_codecs")


@pytest.fixture(scope="module", params=STORAGES)
def path(request, tmp_path_factory):
    return written(tmp_path_factory.mktemp("stored") / "x.h5", request.param)


def samples_of(path, options, **of_source):
    source = HDF5Source(path, field(**options), **of_source)
    assert source.chunks.reading == "decoded"
    last_first = np.arange(len(source))[::-1]
    return read(source, last_first) | {"spec": source.spec["x"].shape}


@pytest.mark.parametrize("memory_map", [True, False])
def test_every_storage_equals_plain_decoding(path, memory_map):
    found = samples_of(path, {}, memory_map=memory_map)
    assert found["spec"] == (3, *SIDES)
    np.testing.assert_array_equal(found["x"], PIXELS[::-1])


@pytest.mark.parametrize(
    ("window", "pad"),
    [((0, 3), None), ((0, 3), "last"), ((-8, 5, 4), "zero"), ([0, -5, -1, 2], "last"), ([3, 0], None)],
)
def test_windows_hold_every_step_th_image(path, window, pad):
    listed = isinstance(window, list)
    steps = np.array(window) if listed else np.arange(*window)
    wanted = np.arange(ROWS)[:, None] + steps
    real = (wanted >= 0) & (wanted < ROWS)
    expected = PIXELS[wanted.clip(0, ROWS - 1)]
    found = samples_of(path, {"offsets" if listed else "window": window, "pad": pad})
    assert found["spec"] == (len(steps), 3, *SIDES)
    if pad is None:
        expected = expected[real.all(axis=1)]
    else:
        np.testing.assert_array_equal(found["x_mask"], real[::-1])
    if pad == "zero":
        expected[~real] = 0
    np.testing.assert_array_equal(found["x"], expected[::-1])


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("RGBA", 4)])
def test_red_and_blue_change_places(tmp_path, mode, channels):
    path = written(tmp_path / "x.h5")
    found = read_from(path, field(mode=mode, channels="BGR"), [0, 1])["x"]
    assert found.shape[1] == channels
    np.testing.assert_array_equal(found[:, :3], PIXELS[:2, ::-1])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "kind", "resize"), [(0, "auto", "pad"), (2, "thread", "random_crop"), (2, "process", "random_crop")]
)
def test_batches_are_those_of_a_table_of_the_same_images(tmp_path, workers, kind, resize):
    pyarrow = pytest.importorskip("pyarrow")
    options = {"image_size": (8, 16), "resize": resize}
    in_file = HDF5Source(written(tmp_path / "x.h5"), field(**options) | {"y": "y"})
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.img").write_bytes(data)
    table = {"path": [f"{number}.img" for number in range(ROWS)], "y": list(range(ROWS))}
    columns = {"x": {"name": "path", "kind": "image"}, "y": "y"}
    files = ManifestSource(pyarrow.table(table), columns, root=str(tmp_path), **options)
    loading = {"batch_size": 5, "shuffle": "global", "seed": 7, "workers": workers, "worker_kind": kind}
    with AsyncLoader(in_file, loading) as mine, AsyncLoader(files, loading | {"workers": 0}) as theirs:
        for _ in range(2):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(one["y"], other["y"])
                np.testing.assert_array_equal(one["x"], other["x"])


def test_all_images_of_a_window_are_cropped_alike(tmp_path):
    path = written(tmp_path / "x.h5", images=[IMAGES[0]] * 9)
    source = HDF5Source(path, field(image_size=8, resize="random_crop", window=(0, 9, 4)))
    with AsyncLoader(source, {"batch_size": 1, "shuffle": False}) as loader:
        first = next(loader)["x"][0]
    assert (first == first[:1]).all()


def test_images_are_packed_decoded_and_one_by_one(tmp_path):
    path = written(tmp_path / "x.h5")
    pack(HDF5Source(path, field()), tmp_path / "packed.h5")
    np.testing.assert_array_equal(read_from(tmp_path / "packed.h5", ["x"], layout="NHWC")["x"], PIXELS)
    with pytest.raises(ConfigError, match=r"fields\.x: is a list or a window; leave it out, or pack single images"):
        pack(HDF5Source(path, field(window=(0, 3))), tmp_path / "windows.h5")


TRUNCATED = picture(1, "JPEG")[:-200]
BAD = {
    "no image": ("padded", b"hello", FormatError, "begins with b'hello'"),
    "truncated, with zeros behind it": ("padded", TRUNCATED, CorruptError, "the JPEG cannot be decoded"),
    "truncated in a group": ("a dataset for each", IMAGES[0][:-9], CorruptError, "x/4: the PNG cannot be decoded"),
    "empty between others": ("one after the other", b"", CorruptError, "empty"),
    "no image in chunks": ("one after the other in chunks", b"hello", FormatError, "begins with b'hello'"),
    "zeros": ("strings", b"", CorruptError, "empty"),
    "of another size": ("variable", picture(1, sides=(9, 8)), FormatError, "9×8 pixels.*give image_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_is_no_image_is_named(tmp_path, case):
    storage, data, kind, said = BAD[case]
    path = written(tmp_path / "x.h5", storage, [*IMAGES[:4], data, *IMAGES[5:]])
    source = HDF5Source(path, field(window=(0, 5, 2)))
    np.testing.assert_array_equal(read(source, [1, 5])["x"][1], PIXELS[5:10:2])
    with pytest.raises(kind, match=said) as caught:
        read(source, [1, 3, 2])
    error = caught.value
    assert (error.file, error.row, error.sample_id) == (path, 4, 2)
    assert (error.dataset == "x" and "row 4" in str(error)) or (error.dataset.startswith("x/4") and "x/4" in str(error))


@pytest.mark.parametrize("storage", ["padded", "variable", "a dataset for each", "one after the other in chunks"])
def test_a_bad_image_is_left_out_as_the_loader_says_also_the_first(tmp_path, storage):
    path = written(tmp_path / "x.h5", storage, [b"hello", b"hello", *IMAGES[2:]])
    options = {"batch_size": 23, "shuffle": False, "on_error": "skip", "max_bad": 1, "return_indices": True}
    with AsyncLoader(HDF5Source(path, field(), exclude=[0]), options) as loader:
        batch = next(iter(loader))
    assert batch["index"].tolist() == list(range(1, ROWS - 1))
    np.testing.assert_array_equal(batch["x"], PIXELS[2:])


# Of samples whose images belong together: a picture and its mask, of which one is turned and one has another size.
TOGETHER, TURNED, OTHER = 6, 4, 2
HALVES = np.zeros((20, 40, 3), "u1")
HALVES[:, :20] = 200
MASK = (HALVES[..., 0] > 0).astype("u1") * 3


def png(pixels, turned=1):
    return np.frombuffer(stored(Image.fromarray(pixels), exif=exif(turned)), "u1")


PICTURES = [png(HALVES, 3 if row == TURNED else 1) for row in range(TOGETHER)]
MASKS = [png(MASK[:10, :30] if row == OTHER else MASK) for row in range(TOGETHER)]


def in_rows(file):
    for key, images in (("x", PICTURES), ("m", MASKS)):
        dataset = file.create_dataset(key, (TOGETHER,), VARIABLE)
        for row, data in enumerate(images):
            dataset[row] = data


def in_groups(file):
    for row in range(TOGETHER):
        file[f"s{row}/x"], file[f"s{row}/m"] = PICTURES[row], MASKS[row]


def by_name(file):
    for row in range(TOGETHER):
        file[f"x/{row}"], file[f"m/{row}"] = PICTURES[row], MASKS[row]


def pair(x="x", m="m", **options):
    options = {"decode": "image", "image_size": 8, **options}
    return {"x": Field(x, **options), "m": Field(m, mode="P", **options)}


PAIRS = {
    "rows": (in_rows, pair(), {}),
    "names": (by_name, pair(), {}),
    "groups": (in_groups, pair(), {"group": "s*", "sample": "group"}),
    "datasets": (by_name, pair("x/*", "m/*"), {"sample": "dataset"}),
}


@pytest.mark.parametrize("storage", PAIRS)
def test_images_that_do_not_fit_are_errors_of_their_samples(storage, tmp_path):
    write, given, options = PAIRS[storage]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file)
    source, errors, seen = HDF5Source(tmp_path / "a.h5", given, **options), [], []
    with AsyncLoader(source, LoaderOptions(batch_size=1, shuffle=False, return_indices=True)) as loader:
        for _ in range(TOGETHER):
            try:
                seen += next(loader)["index"].tolist()
            except AsyncDataError as error:
                errors.append(error)
    assert seen == [0, 1, 3, 5]
    assert [error.sample_id for error in errors] == [OTHER, TURNED]
    assert [error.row for error in errors] == [OTHER, TURNED]
    assert "x has 20×40 and m has 10×30 pixels (height × width), so mask and image differ" in str(errors[0])
    assert "x is turned by the orientation in its file (3), but m, whose shape is that of the stored" in str(errors[1])
    assert "/m" in str(errors[1]).partition(": x is")[0]
    with pytest.raises(FormatError, match="x has 20×40"):
        statistics(source)
    with pytest.raises(FormatError, match="x has 20×40"):
        read(source, range(TOGETHER))
    apart = dict(given, m=Field(given["m"].name, decode="image", image_size=8, mode="P", draw="m"))
    assert len(read(HDF5Source(tmp_path / "a.h5", apart, **options), range(TOGETHER))["x"]) == TOGETHER


def test_windows_are_compared_row_by_row(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        in_rows(file)
    windows = Field("x", decode="image", image_size=8, window=(-2, 1), pad="last")
    source = HDF5Source(tmp_path / "a.h5", {"x": windows, "m": pair()["m"]})
    assert read(source, [0, 1, 3, 5])["x"].shape == (4, 3, 3, 8, 8)  # their windows have other rows, and no mask there
    with pytest.raises(FormatError, match=r"a.h5:/m, row 4: x is turned") as caught:
        read(source, [3, TURNED])
    assert (caught.value.row, caught.value.sample_id) == (TURNED, TURNED)


@pytest.mark.parametrize("storage", PAIRS)
def test_a_plain_array_beside_an_image_that_is_cut_or_turned(storage, tmp_path):
    write, given, options = PAIRS[storage]
    alone = {"groups": ("a", {}), "datasets": ("a/*", {})}
    array, window = alone.get(storage, ("a", {"window": (-1, 1), "pad": "last"}))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file)
        for row in range(TOGETHER):
            file[f"s{row}/a" if storage == "groups" else f"a/{row}" if storage == "datasets" else f"b/{row}"] = MASK
        if window:
            file["a"] = np.stack([MASK] * TOGETHER)
    fields = {"x": given["x"], "a": Field(array, **window)}
    with pytest.raises(FormatError, match=r"x is turned by the orientation in its file \(3\), but a") as caught:
        read(HDF5Source(tmp_path / "a.h5", fields, **options), [0, TURNED])
    assert caught.value.sample_id == TURNED
    cut = Field(given["x"].name, decode="image", image_size=8, resize="random_crop")
    with pytest.raises(FormatError, match="x is changed by resize: random_crop, but a, an array of its height"):
        HDF5Source(tmp_path / "a.h5", fields | {"x": cut}, **options)


def test_two_views_can_be_cropped_apart(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), "u1")
        file["x"] = np.stack([png(noise)] * 4)

    def views(**option):
        crop = {"decode": "image", "image_size": 16, "resize": "random_crop"}
        given = {"a": Field("x", **crop), "b": Field("x", **crop, **option)}
        with AsyncLoader(HDF5Source(tmp_path / "a.h5", given), LoaderOptions(batch_size=4, shuffle=False)) as loader:
            return {key: values.numpy() for key, values in next(loader).items()}

    shared, apart = views(), views(draw="b")
    assert np.array_equal(shared["a"], shared["b"])
    assert np.array_equal(shared["a"], apart["a"])
    assert not any(np.array_equal(one, other) for one, other in zip(apart["a"], apart["b"], strict=True))
