"""Datasets and groups of encoded images: what they hold, and what is refused when the source is built."""

import h5py
import numpy as np
import pytest
from support.files.encoded_images import IMAGES, PIXELS, ROWS, field, written
from support.sources.oracle import read, read_from, refused

from lit_async_data import ConfigError, CorruptError, Field, FormatError, HDF5Source, MissingError, SourceError


@pytest.mark.parametrize("storage", ["variable", "padded", "a dataset for each", "padded in compressed chunks"])
def test_samples_are_shuffled_one_by_one_unless_they_share_compressed_chunks(tmp_path, storage):
    source = HDF5Source(written(tmp_path / "x.h5", storage), field())
    assert source.chunks.rows == (4 if storage == "padded in compressed chunks" else 1)


REFUSED = {
    "numbers": (FormatError, ["y: holds int64 of shape (23,), not encoded images"], {"name": "y"}),
    "a group of others": (FormatError, ["mixed/b", "does not hold one image in this file"], {"name": "mixed"}),
    "flat numbers": (FormatError, ["n/values: holds int64 (4,), not the bytes of images"], {"name": "n"}),
    "falling offsets": (CorruptError, ["o/offsets, row 0", "9 to 4"], {"name": "o"}),
    "no first image": (FormatError, ["text, row 0: begins with b'abc'", "unless image_size=(height"], {"name": "text"}),
    "a layout": (ConfigError, ["layout", "leave it out"], {"layout": {"x": "NC"}}),
    "a column": (ConfigError, ["fields.x.column: does not apply to images"], {"column": 1}),
    "another decoder": (ConfigError, ["fields.x.decode", "'jpeg'"], {"decode": "jpeg"}),
    "grey of swapped colours": (ConfigError, ["fields.x.channels", "mode RGB"], {"channels": "BGR", "mode": "L"}),
    "no size to crop to": (ConfigError, ["fields.x.image_size: missing"], {"resize": "crop"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(tmp_path, case):
    kind, words, options = REFUSED[case]
    more = {"mixed/a": np.frombuffer(IMAGES[0], "u1"), "mixed/b": 1.5, "text": np.array([b"abc"] * ROWS)}
    more |= {"n/values": [1] * 4, "n/offsets": [0, 4], "o/values": np.zeros(9, "u1"), "o/offsets": [9, 4]}
    path = written(tmp_path / "x.h5", **more)
    given = {"name": "x", "decode": "image", **options}
    refused(kind, words, path, {"x": given}, layout=given.pop("layout", None))


def test_a_group_takes_no_image_from_another_file(tmp_path):
    other = written(tmp_path / "other.h5", "a dataset for each")
    links = {"linked/0": h5py.SoftLink("/x/3"), "z": h5py.ExternalLink(other, "/x")}
    path = written(tmp_path / "x.h5", "a dataset for each", **links)
    np.testing.assert_array_equal(read_from(path, {"x": Field("linked", decode="image")})["x"][0], PIXELS[3])
    with h5py.File(path, "a") as file:
        file["linked/1"] = h5py.ExternalLink(other, "/x/1")
    refusals = {"linked": "linked/1: does not hold one image in this file", "z": "other.h5; give that file as path"}
    for name, said in refusals.items():
        refused(FormatError, [said], path, {"x": Field(name, decode="image")}, allow_external=True)
        refused(FormatError, ["allow_external=True"], path, {"x": Field(name, decode="image")})


KINDS = {
    "bytes": (lambda data: np.frombuffer(data, "u1"), {}),
    "compressed": (lambda data: np.frombuffer(data, "u1"), {"compression": "gzip"}),
    "opaque": (np.void, {}),
    "variable": (lambda data: np.array((np.frombuffer(data, "u1"), 0), "O,i")["f0"], {"dtype": h5py.vlen_dtype("u1")}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_per_sample_holds_an_image_and_its_label(tmp_path, kind):
    (value, options), cut = KINDS[kind], [*IMAGES[:5], IMAGES[5][:9], *IMAGES[6:]]
    for name, images in (("x.h5", IMAGES), ("cut.h5", cut)):
        with h5py.File(tmp_path / name, "w") as file:
            for number, data in enumerate(images):
                file.create_dataset(f"birds/b{number}/photo", data=value(data), **options)
                file[f"birds/b{number}"].attrs["label"] = number

    def opened(name):
        fields = {"x": Field("photo", decode="image", channels="BGR"), "y": Field(attr="label")}
        return HDF5Source(tmp_path / name, fields, group="birds/*", sample="group", cache_dir=tmp_path / "kept")

    rows = np.random.default_rng(0).permutation(ROWS)
    for _ in range(2):
        found = read(opened("x.h5"), rows)
        assert np.array_equal(found["x"], PIXELS[rows][:, ::-1])
        assert found["y"].tolist() == rows.tolist()
    with pytest.raises(SourceError, match="birds/b5/photo") as raised:
        read(opened("cut.h5"), np.arange(ROWS))
    assert (raised.value.dataset, raised.value.row) == ("birds/b5/photo", 5)
    with h5py.File(tmp_path / "x.h5", "a") as file:
        del file["birds/b0/photo"], file["birds/b5/photo"]
        file["birds/b0/photo"], file["birds/b5/photo"] = 2.5, np.zeros((4, 4, 3), "u1")
    assert np.array_equal(read(opened("x.h5"), [1, 4, 6])["x"], PIXELS[[1, 4, 6]][:, ::-1])
    for row in (0, 5):
        with pytest.raises(FormatError, match=f"birds/b{row}/photo: does not hold one image"):
            read(opened("x.h5"), [row])


def test_options_of_images_in_groups(h5):
    path = h5(**{f"b{number}/photo": np.frombuffer(IMAGES[number], "u1") for number in range(3)})
    options, image = {"group": "b*", "sample": "group"}, {"name": "photo", "decode": "image"}
    source = HDF5Source(path, {"x": image | {"image_size": 8}}, **options)
    assert read(source, np.arange(3))["x"].shape == (3, 3, 8, 8)
    refused(MissingError, ["has no dataset 'b0/foto'"], path, {"x": image | {"name": "foto"}}, **options)
    refused(ConfigError, ["images have their channels first"], path, {"x": image}, **options, layout="HWC")
    said = "window: does not apply where a group is a sample"
    refused(ConfigError, [said], path, {"x": image | {"window": (0, 2)}}, **options)
