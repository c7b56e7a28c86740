"""Images of a table that belong together: masks, views, and bad ones at the start."""

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.sources.oracle import read

from lit_async_data import AsyncLoader, LoaderOptions, ManifestSource
from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, FormatError, MissingError

MASK = {"name": "m", "mode": "P"}


@pytest.fixture
def pictures(tmp_path):
    """Images of 20×40 pixels, plain and turned, in each format that has orientations, and masks."""
    pixels = np.zeros((20, 40, 3), "u1")
    pixels[:, :20] = 200
    mask = (pixels[..., 0] > 0).astype("u1") * 3
    image = Image.fromarray(pixels)
    for number in (3, 6):
        exif = Image.Exif()
        exif[0x112] = number
        for suffix in ("jpg", "png", "tif", "webp"):
            image.save(tmp_path / f"turned{number}.{suffix}", exif=exif)
    image.save(tmp_path / "plain.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    Image.fromarray(mask[:10, :30]).save(tmp_path / "smaller.png")
    Image.fromarray(mask[::2, ::2]).save(tmp_path / "half.png")
    Image.fromarray(np.rot90(mask, -1).copy()).save(tmp_path / "mask_turned.png")
    return tmp_path


def source(folder, images, masks, *, m=MASK, **options):
    return ManifestSource(pa.table({"x": images, "m": masks}), {"x": "x", "m": m}, root=folder, **options)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("number", [3, 6])
@pytest.mark.parametrize("size", [None, 16])
def test_a_turned_image_beside_its_mask_as_stored(suffix, number, size, pictures):
    name = f"turned{number}.{suffix}"
    with pytest.raises(FormatError, match=rf"mask.png: x is turned by the orientation in its file \({number}\)"):
        source(pictures, [name], ["mask.png"], image_size=size)
    fits = source(pictures, ["turned6." + suffix], ["mask_turned.png"], image_size=size)
    batch = read(fits, [0])
    assert ((batch["x"][0, 0] > 100) == (batch["m"][0, 0] == 3)).mean() > 0.95


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


def test_grey_beside_another_image_needs_a_mode(pictures):
    rows = pictures, ["plain.png"], ["mask.png"]
    with pytest.raises(ConfigError, match=r"^fields.m.mode: missing; the first image is grey"):
        source(*rows, m="m", image_size=8)
    assert set(np.unique(read(source(*rows, image_size=8), [0])["m"])) == {0, 3}
    source(*rows, m={"name": "m", "mode": "RGB"}, image_size=8)
    source(*rows, m="m")  # nothing is resized
    alone = pa.table({"m": ["mask.png"], "mask": ["mask.png"]})
    ManifestSource(alone, {"x": "m"}, root=pictures, image_size=8)
    with pytest.raises(ConfigError, match=r"^fields.x.mode: missing; x \(mask\) is named as a mask"):
        ManifestSource(alone, {"x": "mask"}, root=pictures, image_size=8, check_files="none")


def test_an_array_beside_an_image_that_is_cut_or_turned(pictures, h5):
    np.save(pictures / "m.npy", np.asarray(Image.open(pictures / "mask.png")))
    h5("m.h5", data=np.zeros((3, 20, 40), "u1"))
    images = ["plain.png", "turned6.jpg", "plain.png"]
    table = pa.table({"x": images, "npy": ["m.npy"] * 3, "path": ["m.h5"] * 3, "row": [0, 1, 2]})
    for other in ("npy", "path"):
        said = r"plain.png: x is changed by resize: random_crop, but m, .*; none of the"
        with pytest.raises(FormatError, match=said):
            ManifestSource(table, {"x": "x", "m": other}, root=pictures, image_size=8, resize="random_crop")
        made = ManifestSource(table, {"x": "x", "m": other}, root=pictures, image_size=8)
        assert len(read(made, [0, 2])["x"]) == 2
        said = r"row 1 of the table given: .*turned6.jpg: x is turned by .* \(6\)"
        with pytest.raises(FormatError, match=said) as caught:
            read(made, [0, 1, 2])
        assert (caught.value.sample_id, caught.value.file) == (1, str(pictures / "turned6.jpg"))


def test_two_views_of_one_image_can_be_cropped_apart(tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), "u1")).save(tmp_path / "a.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), "u1")).save(tmp_path / "m.png")
    table = pa.table({"x": ["a.png"] * 4, "m": ["m.png"] * 4})

    def views(second, **more):
        options = {"image_size": 16, "resize": "random_crop", "scale": (0.1, 0.3)}
        fields = {"a": "x", "b": {"name": "x", **second}, **more}
        made = ManifestSource(table, fields, root=tmp_path, **options)
        with AsyncLoader(made, LoaderOptions(batch_size=4, shuffle=False)) as loader:
            return {key: values.numpy() for key, values in next(loader).items()}

    shared, apart = views({}), views({"draw": "b"}, m={**MASK, "draw": "b"}, n=MASK)
    assert np.array_equal(shared["a"], shared["b"])
    assert np.array_equal(shared["a"], apart["a"])
    assert not any(np.array_equal(one, other) for one, other in zip(apart["a"], apart["b"], strict=True))
    assert not np.array_equal(apart["m"], apart["n"])  # each mask goes with its view
    middle = read(ManifestSource(table, {"a": "x", "b": {"name": "x", "draw": "b"}}, root=tmp_path), [0])
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
    made = ManifestSource(table, {"x": "x"}, root=tmp_path, **({"image_size": size} if size else {}))
    assert made.spec["x"].shape == ((6, 9, 3) if suffix == "npy" else (3, size or 6, size or 9))
    options = LoaderOptions(batch_size=4, shuffle=False, on_error="skip", max_bad=3, return_indices=True)
    with AsyncLoader(made, options) as loader:
        batches = [next(loader) for _ in range(5)]
    assert sorted(np.concatenate([batch["index"] for batch in batches])) == [*range(2, 17), 18, 19]
    bad = (MissingError, CorruptError, FormatError)
    with pytest.raises(bad, match="row 0 of the table given"):
        read(made, [0])
    only_bad = table.take([0, 1, 17])
    with pytest.raises(bad, match=r"none of the first 3 is good \(rows 0, 1, 2\)"):
        ManifestSource(only_bad, {"x": "x"}, root=tmp_path, **({"image_size": size} if size else {}))
