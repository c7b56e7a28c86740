"""Encoded images of one sample that belong together: masks, views, windows of them."""

import io

import h5py
import numpy as np
import pytest
from PIL import Image
from support.files.encoded_images import VARIABLE
from support.sources.oracle import read

from lit_async_data import AsyncLoader, Field, HDF5Source, LoaderOptions, statistics
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError

ROWS, TURNED, OTHER = 6, 4, 2
PIXELS = np.zeros((20, 40, 3), "u1")
PIXELS[:, :20] = 200
MASK = (PIXELS[..., 0] > 0).astype("u1") * 3


def png(pixels, turned=0):
    data, exif = io.BytesIO(), Image.Exif()
    if turned:
        exif[0x112] = turned
    Image.fromarray(pixels).save(data, "PNG", exif=exif)
    return np.frombuffer(data.getvalue(), "u1")


IMAGES = [png(PIXELS, 3 * (row == TURNED)) for row in range(ROWS)]
MASKS = [png(MASK[:10, :30] if row == OTHER else MASK) for row in range(ROWS)]


def in_rows(file):
    for key, images in (("x", IMAGES), ("m", MASKS)):
        dataset = file.create_dataset(key, (ROWS,), VARIABLE)
        for row, data in enumerate(images):
            dataset[row] = data


def in_groups(file):
    for row in range(ROWS):
        file[f"s{row}/x"], file[f"s{row}/m"] = IMAGES[row], MASKS[row]


def by_name(file):
    for row in range(ROWS):
        file[f"x/{row}"], file[f"m/{row}"] = IMAGES[row], MASKS[row]


def cut_from_values(file):
    for key, images in (("x", IMAGES), ("m", MASKS)):
        file[f"{key}/values"], file[f"{key}/offsets"] = np.concatenate(images), np.cumsum([0, *map(len, images)])


def fields(x="x", m="m", **options):
    options = {"decode": "image", "image_size": 8, **options}
    return {"x": Field(x, **options), "m": Field(m, mode="P", **options)}


STORAGES = {
    "rows": (in_rows, fields(), {}),
    "names": (by_name, fields(), {}),
    "values": (cut_from_values, fields(), {}),
    "groups": (in_groups, fields(), {"group": "s*", "sample": "group"}),
    "datasets": (by_name, fields("x/*", "m/*"), {"sample": "dataset"}),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_images_that_do_not_fit_are_errors_of_their_samples(storage, tmp_path):
    write, given, options = STORAGES[storage]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file)
    source, errors, seen = HDF5Source(tmp_path / "a.h5", given, **options), [], []
    with AsyncLoader(source, LoaderOptions(batch_size=1, shuffle=False, return_indices=True)) as loader:
        for _ in range(ROWS):
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
        read(source, range(ROWS))
    apart = dict(given, m=Field(given["m"].name, decode="image", image_size=8, mode="P", draw="m"))
    assert len(read(HDF5Source(tmp_path / "a.h5", apart, **options), range(ROWS))["x"]) == ROWS


def test_windows_are_compared_row_by_row(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        in_rows(file)
    windows = Field("x", decode="image", image_size=8, window=(-2, 1), pad="last")
    source = HDF5Source(tmp_path / "a.h5", {"x": windows, "m": fields()["m"]})
    assert read(source, [0, 1, 3, 5])["x"].shape == (4, 3, 3, 8, 8)  # their windows have other rows, and no mask there
    with pytest.raises(FormatError, match=r"a.h5:/m, row 4: x is turned") as caught:
        read(source, [3, TURNED])
    assert (caught.value.row, caught.value.sample_id) == (TURNED, TURNED)


def test_grey_beside_another_image_needs_a_mode(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        in_rows(file)
    grey = Field("m", decode="image", image_size=8)
    with pytest.raises(ConfigError, match=r"^fields.m.mode: missing; the first image is grey"):
        HDF5Source(tmp_path / "a.h5", {"x": fields()["x"], "m": grey})
    HDF5Source(tmp_path / "a.h5", {"m": grey})
    rgb = HDF5Source(tmp_path / "a.h5", {"x": fields()["x"], "m": Field("m", decode="image", image_size=8, mode="RGB")})
    assert rgb.spec["m"].shape == (3, 8, 8)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_plain_array_beside_an_image_that_is_cut_or_turned(storage, tmp_path):
    write, given, options = STORAGES[storage]
    alone = {"groups": ("a", {}), "datasets": ("a/*", {})}
    array, window = alone.get(storage, ("a", {"window": (-1, 1), "pad": "last"}))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file)
        for row in range(ROWS):
            file[f"s{row}/a" if storage == "groups" else f"a/{row}" if storage == "datasets" else f"b/{row}"] = MASK
        if window:
            file["a"] = np.stack([MASK] * ROWS)
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
