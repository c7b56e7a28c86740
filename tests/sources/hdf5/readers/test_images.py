"""Images that HDF5 files hold encoded: every storage equals plain decoding, and a row that is no image is named."""

import contextlib
import io
import pickle
import sys

import h5py
import numpy as np
import pytest
import simplejpeg
from PIL import Image
from support.files.pictures import stored
from support.sources.oracle import read, refused, refused_when_read
from torch.utils.data import DataLoader

from lit_async_data import AsyncLoader, Field, HDF5Source, ManifestSource
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.sources.hdf5.storage.global_heap import GlobalHeap
from lit_async_data.sources.images import formats
from lit_async_data.tools.pack.packing import pack

ROWS, SIDES = 23, (20, 30)
VARIABLE = h5py.vlen_dtype(np.uint8)


def picture(number, kind="PNG", sides=SIDES):
    pixels = np.random.default_rng(number).integers(0, 255, (*sides, 3), dtype=np.uint8)
    return stored(Image.fromarray(pixels), kind)


IMAGES = [picture(number, ["PNG", "JPEG", "BMP"][number % 3]) for number in range(ROWS)]
MOST = max(map(len, IMAGES))


def plainly(data):
    if data.startswith(b"\xff\xd8"):
        return simplejpeg.decode_jpeg(data).transpose(2, 0, 1)
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)


PIXELS = np.stack([plainly(data) for data in IMAGES])


def variable(file, images, **options):
    dataset = file.create_dataset("x", (len(images),), VARIABLE, **options)
    for row, data in enumerate(images):
        dataset[row] = np.frombuffer(data, np.uint8)


def padded(file, images, **options):
    most = max(map(len, images))
    file.create_dataset("x", data=[np.frombuffer(data.ljust(most, b"\0"), "u1") for data in images], **options)


def fixed(kind, **options):
    return lambda file, images: file.create_dataset("x", data=np.array(images, f"{kind}{MOST}"), **options)


def typed(kind):
    """Of a type that h5py reads wrongly, or not at all: strings that end at a zero, opaque values with a tag."""

    def write(file, images):
        dataset = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((len(images),)))
        rows = np.array([np.frombuffer(data.ljust(kind.get_size(), b"\0"), "u1") for data in images])
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, rows, kind)

    return write


def strings_with_an_end():
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(MOST + 1)
    return typed(kind)


def opaque_with_a_tag():
    kind = h5py.h5t.create(h5py.h5t.OPAQUE, MOST)
    kind.set_tag(b"image/jpeg")
    return typed(kind)


def separate(value, **options):
    def write(file, images):
        for number, data in enumerate(images):
            file.create_dataset(f"x/{number}", data=value(data), **options)

    return write


def in_bytes(data):
    return np.frombuffer(data, np.uint8)


def flat(**options):
    def write(file, images):
        file.create_dataset("x/values", data=np.frombuffer(b"".join(images), np.uint8), **options)
        file["x/offsets"] = np.cumsum([0, *map(len, images)])

    return write


STORAGES = {
    "one after the other": flat(),
    "one after the other in chunks": flat(chunks=(999,)),
    "one after the other in compressed chunks": flat(chunks=(999,), compression="gzip"),
    "variable": variable,
    "variable in chunks": lambda file, images: variable(file, images, chunks=(5,), maxshape=(None,)),
    "variable in compressed chunks": lambda file, images: variable(file, images, chunks=(5,), compression="gzip"),
    "padded": padded,
    "padded in compressed chunks": lambda file, images: padded(file, images, chunks=(4, 99), compression="gzip"),
    "strings": fixed("S"),
    "strings in compressed chunks": fixed("S", chunks=(3,), compression="gzip", shuffle=True),
    "strings by h5py": fixed("S", chunks=(3,), compression="lzf"),
    "strings with an end": strings_with_an_end(),
    "opaque": fixed("V"),
    "opaque with a tag": opaque_with_a_tag(),
    "a dataset for each": separate(in_bytes),
    "a value for each": separate(np.void),
    "a compressed dataset for each": separate(in_bytes, compression="gzip"),
    "variable behind a user block": variable,
    "a dataset for each behind a user block": separate(in_bytes),
    "variable by h5py": lambda file, images: variable(file, images, chunks=(5,), compression="lzf"),
    "of other addresses": variable,
}


@pytest.fixture(autouse=True)
def no_extra_codecs(monkeypatch):
    """lzf stands for filters that h5py must decode."""
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    monkeypatch.setattr(formats, "_imagecodecs", lambda: None)  # keeps what it finds for the whole process


@pytest.fixture(scope="module", params=STORAGES)
def path(request, tmp_path_factory):
    return written(tmp_path_factory.mktemp("stored") / "x.h5", request.param)


def written(path, storage="variable", images=IMAGES, **more):
    if storage == "of other addresses":
        sizes = h5py.h5p.create(h5py.h5p.FILE_CREATE)
        sizes.set_sizes(4, 4)
        h5py.h5f.create(bytes(path), fcpl=sizes).close()
    with h5py.File(path, "a", userblock_size=512 if storage.endswith("user block") else None) as file:
        STORAGES[storage](file, images)
        file["lengths"] = list(map(len, images))
        file["y"] = np.arange(len(images))
        for name, values in more.items():
            file[name] = values
    return str(path)


def field(**options):
    return {"x": Field("x", decode="image", **options)}


def samples_of(path, options, **of_source):
    with contextlib.closing(HDF5Source(path, field(**options), **of_source)) as source:
        assert source.chunks.reading == "decoded"
        last_first = np.arange(len(source))[::-1]
        return read(source, last_first) | {"spec": source.spec["x"].shape, "rows": source.chunks.rows}


@pytest.mark.parametrize(("memory_map", "lengths"), [(True, None), (False, "lengths")])
def test_every_storage_equals_plain_decoding(path, memory_map, lengths):
    found = samples_of(path, {"lengths": lengths}, memory_map=memory_map)
    assert found["spec"] == (3, *SIDES)
    np.testing.assert_array_equal(found["x"], PIXELS[::-1])


def test_a_field_may_be_a_later_image(path):
    np.testing.assert_array_equal(samples_of(path, {"window": 2})["x"], PIXELS[:1:-1])


@pytest.mark.parametrize(("window", "pad"), [((0, 3), None), ((0, 3), "last"), ((-8, 5, 4), "zero")])
def test_windows_hold_every_step_th_image(path, window, pad):
    steps = np.arange(*window)
    wanted = np.arange(ROWS)[:, None] + steps
    real = (wanted >= 0) & (wanted < ROWS)
    expected = PIXELS[wanted.clip(0, ROWS - 1)]
    found = samples_of(path, {"window": window, "pad": pad})
    assert found["spec"] == (len(steps), 3, *SIDES)
    if pad is None:
        expected = expected[real.all(axis=1)]
    else:
        np.testing.assert_array_equal(found["x_mask"], real[::-1])
    if pad == "zero":
        expected[~real] = 0
    np.testing.assert_array_equal(found["x"], expected[::-1])


@pytest.mark.parametrize("storage", ["variable", "padded", "a dataset for each", "padded in compressed chunks"])
def test_samples_are_shuffled_one_by_one_unless_they_share_compressed_chunks(tmp_path, storage):
    rows = samples_of(written(tmp_path / "x.h5", storage), {})["rows"]
    assert rows == (4 if storage == "padded in compressed chunks" else 1)


def test_skipped_images_are_not_decoded(tmp_path):
    images = [data if row % 5 == 0 else b"no image" for row, data in enumerate(IMAGES)]
    source = HDF5Source(written(tmp_path / "x.h5", images=images), field(window=(0, 16, 5)))
    np.testing.assert_array_equal(read(source, [0, 5])["x"], np.stack([PIXELS[0:16:5], PIXELS[5:21:5]]))
    with pytest.raises(FormatError, match="row 1: begins with b'no image'") as caught:
        read(source, [5, 1])
    assert (caught.value.row, caught.value.sample_id) == (1, 1)
    source.close()


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("RGBA", 4)])
def test_red_and_blue_change_places(tmp_path, mode, channels):
    path = written(tmp_path / "x.h5")
    with contextlib.closing(HDF5Source(path, field(mode=mode, channels="BGR"))) as source:
        found = read(source, [0, 1])["x"]
        assert found.shape[1] == channels
        np.testing.assert_array_equal(found[:, :3], PIXELS[:2, ::-1])


@pytest.fixture
def table(tmp_path):
    """The same images as files of a table."""
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.img").write_bytes(data)
    return {"path": [str(tmp_path / f"{number}.img") for number in range(ROWS)], "y": list(range(ROWS))}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "kind", "resize"), [(0, "auto", "pad"), (2, "thread", "random_crop"), (2, "process", "random_crop")]
)
def test_batches_are_those_of_a_table_of_the_same_images(tmp_path, table, workers, kind, resize):
    pyarrow = pytest.importorskip("pyarrow")
    options = {"image_size": (8, 16), "resize": resize}
    stored = HDF5Source(written(tmp_path / "x.h5"), field(**options) | {"y": "y"})
    columns = {"x": {"name": "path", "kind": "image"}, "y": "y"}
    files = ManifestSource(pyarrow.table(table), columns, root=str(tmp_path), **options)
    loading = {"batch_size": 5, "shuffle": "global", "seed": 7, "workers": workers, "worker_kind": kind}
    with AsyncLoader(stored, loading) as mine, AsyncLoader(files, loading | {"workers": 0}) as theirs:
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
    source.close()


def test_images_are_packed_decoded_and_one_by_one(tmp_path):
    path = written(tmp_path / "x.h5")
    with contextlib.closing(HDF5Source(path, field())) as source:
        pack(source, tmp_path / "packed.h5")
    with contextlib.closing(HDF5Source(tmp_path / "packed.h5", ["x"], layout="NHWC")) as packed:
        np.testing.assert_array_equal(read(packed, np.arange(ROWS))["x"], PIXELS)
    windows = HDF5Source(path, field(window=(0, 3)))
    with pytest.raises(ConfigError, match=r"fields\.x\.window: pack single images"):
        pack(windows, tmp_path / "windows.h5")


@pytest.mark.parametrize("storage", ["variable", "padded", "padded in compressed chunks"])
def test_copies_and_forks_of_a_source_read_the_same(tmp_path, storage):
    with contextlib.closing(HDF5Source(written(tmp_path / "x.h5", storage), field())) as source:
        before = read(source, [3])["x"]
        with contextlib.closing(pickle.loads(pickle.dumps(source))) as copied:
            np.testing.assert_array_equal(read(copied, [3])["x"], before)
        forked = DataLoader(source, batch_size=ROWS, num_workers=1, multiprocessing_context="fork")
        np.testing.assert_array_equal(next(iter(forked))["x"], PIXELS)


@pytest.mark.parametrize("storage", ["variable", "of other addresses", "variable behind a user block"])
def test_the_global_heap_equals_h5py(tmp_path, storage):
    """Many values of one collection, collections of one value, and the holes of values that were written again."""
    rng, path = np.random.default_rng(0), written(tmp_path / "x.h5", storage, images=[b"?"] * 300)
    with h5py.File(path, "a") as file:
        for size in (40, 300, 9000):
            for row in rng.integers(300, size=200):
                file["x"][row] = rng.integers(0, 255, rng.integers(size), dtype=np.uint8)
        values, offset = file["x"][...], file["x"].id.get_offset()
        address_bytes, length_bytes = file.id.get_create_plist().get_sizes()
    data = np.fromfile(path, np.uint8)
    references = data[offset : offset + 300 * (8 + address_bytes)].reshape(300, -1)
    heap = GlobalHeap(length_bytes, 512 if storage.endswith("user block") else 0, len(data))
    for reference, value in zip(heap.references(references).tolist(), values, strict=True):
        np.testing.assert_array_equal(heap.value(reference, lambda at, n: data[at : at + n], ""), value)


def replaced(row, data):
    return [data if number == row else each for number, each in enumerate(IMAGES)]


TRUNCATED = picture(1, "JPEG")[:-200]
BAD = {
    "no image": ("padded", b"hello", FormatError, "begins with b'hello'"),
    "truncated, with zeros behind it": ("padded", TRUNCATED, CorruptError, "the JPEG cannot be decoded"),
    "truncated": ("variable", TRUNCATED, CorruptError, "the JPEG cannot be decoded"),
    "truncated in a group": ("a dataset for each", IMAGES[0][:-9], CorruptError, "x/4: the PNG cannot be decoded"),
    "empty": ("variable", b"", CorruptError, "empty"),
    "empty between others": ("one after the other", b"", CorruptError, "empty"),
    "no image in chunks": ("one after the other in chunks", b"hello", FormatError, "begins with b'hello'"),
    "zeros": ("strings", b"", CorruptError, "empty"),
    "of another size": ("variable", picture(1, sides=(9, 8)), FormatError, "9×8 pixels.*give image_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_is_no_image_is_named(tmp_path, case):
    storage, data, kind, said = BAD[case]
    path = written(tmp_path / "x.h5", storage, replaced(4, data))
    with contextlib.closing(HDF5Source(path, field(window=(0, 5, 2)))) as source:
        np.testing.assert_array_equal(read(source, [1, 5])["x"][1], PIXELS[5:10:2])
        with pytest.raises(kind, match=said) as caught:
            read(source, [1, 3, 2])
        error = caught.value
        assert (error.file, error.dataset, error.row, error.sample_id) == (path, "x", 4, 2)
        assert "row 4" in str(error) or "x/4" in str(error)


@pytest.mark.parametrize(
    "storage", ["padded", "variable", "a dataset for each", "one after the other", "one after the other in chunks"]
)
def test_a_bad_image_is_left_out_as_the_loader_says_also_the_first(tmp_path, storage):
    path = written(tmp_path / "x.h5", storage, [b"hello", b"hello", *IMAGES[2:]])
    options = {"batch_size": 23, "shuffle": False, "on_error": "skip", "max_bad": 1, "return_indices": True}
    with AsyncLoader(HDF5Source(path, field(), exclude=[0]), options) as loader:
        batch = next(iter(loader))
    assert batch["index"].tolist() == list(range(1, ROWS - 1))
    np.testing.assert_array_equal(batch["x"], PIXELS[2:])


@pytest.mark.parametrize("length", [-1, MOST + 1])
def test_a_length_beyond_its_row_is_named(tmp_path, length):
    path = written(
        tmp_path / "x.h5", "padded", n=[length if row == 7 else len(data) for row, data in enumerate(IMAGES)]
    )
    error = refused_when_read(CorruptError, ["row 7", str(length), MOST], path, field(lengths="n"), [7])
    assert error.row == 7


@pytest.mark.parametrize("storage", ["one after the other", "one after the other in compressed chunks"])
def test_a_window_with_a_wrong_offset_is_named_by_the_row(tmp_path, storage):
    path = written(tmp_path / "x.h5", storage)
    with h5py.File(path, "a") as file:
        file["x/offsets"][8] = 0
    with contextlib.closing(HDF5Source(path, field(window=(0, 4, 2)))) as source:
        good = [row for row in range(len(source)) if row not in (5, 6, 7, 8)]
        np.testing.assert_array_equal(read(source, good)["x"], PIXELS[np.array(good)[:, None] + [0, 2]])
        for sample, row in [(5, 7), (6, 8), (7, 7), (8, 8)]:
            with pytest.raises(CorruptError, match=rf"x/offsets, row {row}: \d+ to \d+ of \d+ elements") as caught:
                read(source, [0, sample])
            assert (caught.value.row, caught.value.dataset, caught.value.sample_id) == (row, "x", sample)


DAMAGES = {
    "to nowhere": (lambda data, at, _: data[at + 4 : at + 12].fill(0x7F), "outside of the file"),
    "to another place": (lambda data, at, _: data[at + 4 : at + 5].fill(0x30), "no collection"),
    "to another object": (lambda data, at, _: data[at + 12 : at + 16].fill(9), "missing"),
    "of another length": (lambda data, at, _: data[at : at + 1].__iadd__(1), "but it has"),
    "to a damaged collection": (lambda data, _, heap: data[heap : heap + 4].fill(0), "no collection"),
    "to a collection that is too long": (lambda data, _, heap: data[heap + 8 : heap + 16].fill(0x7F), "no collection"),
    "to an object that is too long": (lambda data, _, heap: data[heap + 24 : heap + 30].fill(0x7F), "missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_reference_or_heap_is_named_by_its_row(tmp_path, damage):
    path = written(tmp_path / "x.h5", images=[picture(number, sides=(40, 50)) for number in range(4)])
    with h5py.File(path) as file:
        at = file["x"].id.get_offset() + 2 * 16
    data = np.fromfile(path, np.uint8)
    change, said = DAMAGES[damage]
    change(data, at, int.from_bytes(data[at + 4 : at + 12].tobytes(), "little"))
    data.tofile(path)
    error = refused_when_read(CorruptError, ["row 2", said], path, field(image_size=9), [2])
    assert (error.row, error.sample_id) == (2, 2)


REFUSED = {
    "numbers": (FormatError, ["y: holds int64 of shape (23,), not encoded images"], {"name": "y"}),
    "a group of others": (FormatError, ["mixed/b", "does not hold one image in this file"], {"name": "mixed"}),
    "flat numbers": (FormatError, ["n/values: holds int64 (4,), not the bytes of images"], {"name": "n"}),
    "falling offsets": (CorruptError, ["o/offsets, row 0", "9 to 4"], {"name": "o"}),
    "nothing": (MissingError, ["has no dataset 'z'"], {"name": "z"}),
    "no first image": (FormatError, ["text, row 0: begins with b'abc'", "unless image_size=(height"], {"name": "text"}),
    "lengths of another shape": (FormatError, ["fields.x.lengths", "23 images"], {"lengths": "two"}),
    "no lengths": (MissingError, ["fields.x.lengths", "'z'"], {"lengths": "z"}),
    "a layout": (ConfigError, ["layout", "leave it out"], {"layout": {"x": "NC"}}),
    "a column": (ConfigError, ["fields.x.column: does not apply to images"], {"column": 1}),
    "values with a size": (ConfigError, ["fields.x.image_size: needs decode"], {"decode": None, "image_size": 8}),
    "another decoder": (ConfigError, ["fields.x.decode", "'jpeg'"], {"decode": "jpeg"}),
    "another order": (ConfigError, ["fields.x.channels", "RGB"], {"channels": "GBR"}),
    "grey of swapped colours": (ConfigError, ["fields.x.channels", "mode RGB"], {"channels": "BGR", "mode": "L"}),
    "no size to crop to": (ConfigError, ["fields.x.image_size: missing"], {"resize": "crop"}),
    "a step of 0": (ConfigError, ["fields.x.window", "(start, stop, step)"], {"window": (0, 4, 0)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(tmp_path, case):
    kind, words, options = REFUSED[case]
    more = {"mixed/a": np.frombuffer(IMAGES[0], "u1"), "mixed/b": 1.5, "text": np.array([b"abc"] * ROWS), "two": [1, 2]}
    more |= {"n/values": [1] * 4, "n/offsets": [0, 4], "o/values": np.zeros(9, "u1"), "o/offsets": [9, 4]}
    path = written(tmp_path / "x.h5", **more)
    layout = options.pop("layout", None) if "layout" in options else None
    refused(kind, words, path, {"x": {"name": "x", "decode": "image", **options}}, layout=layout)


def test_a_group_takes_no_image_from_another_file(tmp_path):
    other = written(tmp_path / "other.h5", "a dataset for each")
    path = written(
        tmp_path / "x.h5",
        "a dataset for each",
        **{"linked/0": h5py.SoftLink("/x/3"), "z": h5py.ExternalLink(other, "/x")},
    )
    with contextlib.closing(HDF5Source(path, {"x": Field("linked", decode="image")})) as source:
        np.testing.assert_array_equal(read(source, [0])["x"][0], PIXELS[3])
    with h5py.File(path, "a") as file:
        file["linked/1"] = h5py.ExternalLink(other, "/x/1")
    for name, said in (
        ("linked", "linked/1: does not hold one image in this file"),
        ("z", "other.h5; give that file as path"),
    ):
        refused(FormatError, [said], path, {"x": Field(name, decode="image")}, allow_external=True)
        refused(FormatError, ["allow_external=True"], path, {"x": Field(name, decode="image")})


def test_files_whose_images_differ_in_size_are_told_how_to_agree(tmp_path):
    paths = [written(tmp_path / f"{side}.h5", images=[picture(0, sides=(side, 8))]) for side in (8, 9)]
    error = refused(SourceError, ["(3, 9, 8)", "(3, 8, 8)", "image_size"], paths, field())
    assert error.file == paths[1]


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (lambda data: np.frombuffer(data, "u1"), {}),
        (lambda data: np.frombuffer(data, "u1"), {"compression": "gzip"}),
        (np.void, {}),
        (lambda data: np.array((np.frombuffer(data, "u1"), 0), "O,i")["f0"], {"dtype": h5py.vlen_dtype("u1")}),
    ],
    ids=["bytes", "compressed", "opaque", "variable"],
)
def test_a_group_per_sample_holds_an_image_and_its_label(tmp_path, value, options):
    def written(path, images):
        with h5py.File(path, "w") as file:
            for number, data in enumerate(images):
                file.create_dataset(f"birds/b{number}/photo", data=value(data), **options)
                file[f"birds/b{number}"].attrs["label"] = number
        return path

    def opened(path):
        fields = {"x": Field("photo", decode="image", channels="BGR"), "y": Field(attr="label")}
        return HDF5Source(path, fields, group="birds/*", sample="group", cache_dir=tmp_path / "kept")

    path, rows = written(tmp_path / "x.h5", IMAGES), np.random.default_rng(0).permutation(ROWS)
    for _ in range(2):
        with contextlib.closing(opened(path)) as source:
            found = read(source, rows)
        assert np.array_equal(found["x"], PIXELS[rows][:, ::-1])
        assert found["y"].tolist() == rows.tolist()
    cut = opened(written(tmp_path / "cut.h5", [*IMAGES[:5], IMAGES[5][:9], *IMAGES[6:]]))
    with pytest.raises(SourceError, match="birds/b5/photo") as raised:
        read(cut, np.arange(ROWS))
    assert (raised.value.dataset, raised.value.row) == ("birds/b5/photo", 5)
    cut.close()
    with h5py.File(path, "a") as file:
        del file["birds/b0/photo"], file["birds/b5/photo"]
        file["birds/b0/photo"], file["birds/b5/photo"] = 2.5, np.zeros((4, 4, 3), "u1")
    odd = opened(path)
    assert np.array_equal(read(odd, [1, 4, 6])["x"], PIXELS[[1, 4, 6]][:, ::-1])
    for row in (0, 5):
        with pytest.raises(FormatError, match=f"birds/b{row}/photo: does not hold one image"):
            read(odd, [row])
    odd.close()


def test_options_of_images_in_groups(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number in range(3):
            file[f"b{number}/photo"] = np.frombuffer(IMAGES[number], "u1")
    options = {"group": "b*", "sample": "group"}
    with pytest.raises(MissingError, match="has no dataset 'b0/foto'"):
        HDF5Source(tmp_path / "x.h5", {"x": Field("foto", decode="image")}, **options)
    source = HDF5Source(tmp_path / "x.h5", {"x": Field("photo", decode="image", image_size=8)}, **options)
    assert read(source, np.arange(3))["x"].shape == (3, 3, 8, 8)
    for field, more, message in [
        (Field("photo", decode="image"), {"layout": "HWC"}, "images have their channels first"),
        (Field("photo", decode="image", window=(0, 2)), {}, "window: does not apply where a group is a sample"),
        (Field("photo", decode="image", lengths="n"), {}, "lengths: does not apply where a group is a sample"),
    ]:
        with pytest.raises(ConfigError, match=message):
            HDF5Source(tmp_path / "x.h5", {"x": field}, **options, **more)
