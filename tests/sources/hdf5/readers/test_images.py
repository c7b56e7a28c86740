"""Images that HDF5 files hold encoded: every storage equals plain decoding, and a row that is no image is named."""

import pickle

import h5py
import numpy as np
import pytest
from support.files.encoded_images import IMAGES, PIXELS, ROWS, SIDES, STORAGES, field, picture, written
from support.sources.oracle import read, read_from
from torch.utils.data import DataLoader

from lit_async_data import AsyncLoader, ConfigError, CorruptError, FormatError, HDF5Source, ManifestSource
from lit_async_data.sources.hdf5.readers import readers
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


def test_a_field_may_be_a_later_image(path):
    np.testing.assert_array_equal(samples_of(path, {"window": 2})["x"], PIXELS[:1:-1])


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


def test_skipped_images_are_not_decoded(tmp_path):
    images = [data if row % 5 == 0 else b"no image" for row, data in enumerate(IMAGES)]
    source = HDF5Source(written(tmp_path / "x.h5", images=images), field(window=(0, 16, 5)))
    np.testing.assert_array_equal(read(source, [0, 5])["x"], np.stack([PIXELS[0:16:5], PIXELS[5:21:5]]))
    with pytest.raises(FormatError, match="row 1: begins with b'no image'") as caught:
        read(source, [5, 1])
    assert (caught.value.row, caught.value.sample_id) == (1, 1)


def test_chunks_of_an_image_are_not_decoded_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "check_chunk_lengths", None)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for row, data in enumerate(IMAGES):
            file.create_dataset(f"x/{row}", data=np.frombuffer(data, "u1"), chunks=(100,), compression="gzip")
    np.testing.assert_array_equal(read_from(tmp_path / "x.h5", field())["x"], PIXELS)


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
    stored = HDF5Source(written(tmp_path / "x.h5"), field(**options) | {"y": "y"})
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.img").write_bytes(data)
    table = {"path": [f"{number}.img" for number in range(ROWS)], "y": list(range(ROWS))}
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


def test_images_are_packed_decoded_and_one_by_one(tmp_path):
    path = written(tmp_path / "x.h5")
    pack(HDF5Source(path, field()), tmp_path / "packed.h5")
    np.testing.assert_array_equal(read_from(tmp_path / "packed.h5", ["x"], layout="NHWC")["x"], PIXELS)
    with pytest.raises(ConfigError, match=r"fields\.x: is a list or a window; leave it out, or pack single images"):
        pack(HDF5Source(path, field(window=(0, 3))), tmp_path / "windows.h5")


@pytest.mark.parametrize("storage", ["variable", "padded", "padded in compressed chunks"])
def test_copies_and_forks_of_a_source_read_the_same(tmp_path, storage):
    source = HDF5Source(written(tmp_path / "x.h5", storage), field())
    for each in (source, pickle.loads(pickle.dumps(source))):
        np.testing.assert_array_equal(read(each, [3])["x"], PIXELS[3:4])
    forked = DataLoader(source, batch_size=ROWS, num_workers=1, multiprocessing_context="fork")
    np.testing.assert_array_equal(next(iter(forked))["x"], PIXELS)


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
    path = written(tmp_path / "x.h5", storage, [*IMAGES[:4], data, *IMAGES[5:]])
    source = HDF5Source(path, field(window=(0, 5, 2)))
    np.testing.assert_array_equal(read(source, [1, 5])["x"][1], PIXELS[5:10:2])
    with pytest.raises(kind, match=said) as caught:
        read(source, [1, 3, 2])
    error = caught.value
    assert (error.file, error.row, error.sample_id) == (path, 4, 2)
    assert (error.dataset == "x" and "row 4" in str(error)) or (error.dataset.startswith("x/4") and "x/4" in str(error))


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


def test_an_element_with_a_number_beyond_the_images_beside_it_is_named(tmp_path):
    path = written(tmp_path / "x.h5", "a dataset for each", IMAGES[:2])
    with h5py.File(path, "a") as file:
        file["w/offsets"] = [0, 20, 40]
        values = file.create_dataset("w/values", data=np.arange(40), chunks=(10,), compression="gzip")
        values.id.write_direct_chunk((30,), b"?")
    with pytest.raises(CorruptError, match=r"w/values, chunk \(30,\)") as caught:
        read(HDF5Source(path, field() | {"w": "w"}), [0, 1])
    assert (caught.value.dataset, caught.value.row, caught.value.sample_id) == ("w/values", 30, 1)
