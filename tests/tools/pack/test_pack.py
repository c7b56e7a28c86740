"""`pack`: values, types, attributes and places survive; the result is read by the fast way; errors name what to do."""

from __future__ import annotations

import io
import os
import resource
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow.csv
import pytest

from lit_async_data import Field, HDF5Source, StorageLayout, SubsetSource
from lit_async_data.errors import ConfigError, FormatError, SourceError
from lit_async_data.testing import ArraySource
from lit_async_data.tools.pack import compare, plan, writing
from lit_async_data.tools.pack.packing import pack

# With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
pyarrow.csv.read_csv(io.BytesIO(b"a\n1\n"))
rng = np.random.default_rng(0)
NOISE = rng.integers(0, 256, (50, 64, 64), "u1")
SMOOTH = (np.add.outer(np.arange(50), np.arange(64 * 64).reshape(64, 64)) // 64 % 256).astype("u1")


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out.h5")


def small_steps(monkeypatch, samples=4, nbytes=4096):
    """Lets a piece be a few samples."""
    monkeypatch.setattr(plan, "PIECE_BYTES", samples * nbytes)


def same(source, other):
    assert len(source) == len(other)
    everything = range(len(source))
    for one, two in zip(source.__getitems__(everything), other.__getitems__(everything)):
        for key in source.spec:
            first, second = (
                batch[key] if isinstance(batch, dict) else batch[list(source.spec).index(key)] for batch in (one, two)
            )
            assert first.shape == second.shape
            assert first.tobytes() == second.tobytes(), key


@pytest.mark.parametrize("codec", ["auto", "none", "deflate", "zstd", "lz4"])
@pytest.mark.parametrize("dtype", ["u1", ">i2", "f4", "?", "c8"])
def test_values_come_back_bit_by_bit_with_every_codec(h5, out, codec, dtype, monkeypatch):
    small_steps(monkeypatch)
    values = SMOOTH.astype(dtype)
    if dtype == "f4":
        values[3, 4] = np.nan
        values[5].view("u4")[:] = 0x7FC12345  # a NaN that says something
    data = {"data": values, "chunks": (10, 64, 64), "compression": "gzip"}
    path = h5(data=data, labels=np.arange(50, dtype="i2"))
    source = HDF5Source(path)
    packed = pack(source, out, codec=codec)
    other = compare.packed_source(out, packed.plan)
    same(source, other)
    with h5py.File(out) as file:
        assert file["data"].dtype == np.dtype(dtype).newbyteorder("=")
        assert file["labels"].dtype == np.dtype("i2")
        assert (file["data"].chunks is None) == (codec == "none")
        if codec != "none":
            assert file["data"].chunks == (1, 64, 64)
        if codec in ("auto", "deflate"):  # which every h5py reads
            assert file["data"][...].tobytes() == values.astype(file["data"].dtype).tobytes()


def test_axes_come_in_the_order_of_batches_with_the_layout_to_read_them_by(h5, out):
    source = HDF5Source(h5(data=rng.integers(0, 9, (16, 12, 3, 10), "u1")), {"x": "data"}, layout="HWCN")
    packed = pack(source, out)
    assert packed.plan.fields[0].layout == "NHWC"
    same(source, compare.packed_source(out, packed.plan))


def test_attributes_are_kept_but_not_links_to_other_datasets(h5, out):
    path = h5(data=SMOOTH, labels=np.arange(50))
    with h5py.File(path, "r+") as file:
        file["data"].attrs.update({"units": "counts", "gain": np.float32(0.5), "window": [1, 2]})
        file["data"].attrs["of"] = file["labels"].ref
        file["labels"].make_scale("number")
    pack(HDF5Source(path), out)
    with h5py.File(out) as file:
        attributes = dict(file["data"].attrs)
        assert attributes.pop("units") == "counts"
        assert attributes.pop("gain").dtype == np.float32
        assert attributes.pop("window").tolist() == [1, 2]
        assert not attributes
        assert not dict(file["labels"].attrs)


def test_several_files_become_one_and_each_sample_remembers_its_row(h5, out, monkeypatch):
    small_steps(monkeypatch)
    files = [h5(f"scan{n}.h5", data=SMOOTH[:n], site=np.arange(n), labels=np.full(n, n, "u1")) for n in (7, 1, 12)]
    source = HDF5Source(files)
    pack(source, out, columns=["site"])
    packed = HDF5Source(out)
    same(source, packed)
    assert packed.column("site").tolist() == [*range(7), 0, *range(12)]
    assert packed.column("origin/part").tolist() == [0] * 7 + [1] + [2] * 12
    assert packed.column("origin/row").tolist() == [*range(7), 0, *range(12)]
    with h5py.File(out) as file:
        assert file["origin/parts"].asstr()[...].tolist() == files


def test_rows_of_a_subset_are_those_of_the_file(h5, out):
    source = HDF5Source(h5(data=SMOOTH), ["data"], rows=[3, 8, 9])
    pack(SubsetSource(source, [2, 0]), out)
    assert HDF5Source(out, ["data"]).column("origin/row").tolist() == [9, 3]


def test_parts_that_stay_apart_keep_windows_inside(tmp_path, out):
    path = str(tmp_path / "rec.h5")
    with h5py.File(path, "w") as file:
        for number in range(12):
            values = rng.standard_normal((20 + number, 64), "f4")
            file.create_dataset(f"patient_{number}/data", data=values, chunks=(len(values), 1), compression="gzip")
    pack(HDF5Source(path, ["data"], group="patient_*"), out, keep_parts=True, codec="deflate")
    windows = {"x": Field("data", window=(0, 8))}
    same(HDF5Source(path, windows, group="patient_*"), HDF5Source(out, windows, group="parts/*"))
    with h5py.File(out) as file:
        assert file["origin/parts"].asstr()[...].tolist() == [f"{path}:/patient_{number}" for number in range(12)]


def test_class_names_survive(h5, out):
    kind = h5py.enum_dtype({"auk": 0, "owl": 1}, "u1")
    path = h5(data=SMOOTH[:4])
    with h5py.File(path, "r+") as file:
        file.create_dataset("labels", data=np.array([1, 0, 1, 1], "u1"), dtype=kind)
    source = HDF5Source(path)
    pack(source, out)
    packed = HDF5Source(out)
    assert packed.spec == source.spec
    same(source, packed)


def test_a_table_of_images_keeps_classes_ids_and_paths(tmp_path, out, monkeypatch):
    from PIL import Image

    from lit_async_data import ManifestSource

    small_steps(monkeypatch, nbytes=3 * 16 * 16)
    lines = ["id,path,species,site"]
    for number in range(20):
        Image.fromarray(rng.integers(0, 255, (20, 16, 3), "u1")).save(tmp_path / f"{number}.png")
        lines.append(f"{number:03},{number}.png,{('owl', 'auk', 'tit')[number % 3]},s{number % 2}")
    (tmp_path / "birds.csv").write_text("\n".join(lines))
    source = ManifestSource(
        str(tmp_path / "birds.csv"), {"x": "path", "y": "species"}, id="id", image_size=16, resize="crop"
    )
    packed = pack(source, out, columns=["site"])
    other = compare.packed_source(out, packed.plan)
    same(source, other)
    assert other.spec["y"].classes == ("auk", "owl", "tit")
    assert other.column("origin/id").tolist() == [f"{number:03}" for number in range(20)]
    assert other.column("origin/path").tolist() == [str(tmp_path / f"{number}.png") for number in range(20)]
    assert other.column("site").tolist() == [f"s{number % 2}" for number in range(20)]
    with h5py.File(out) as file:
        assert file["y/codes"].dtype == np.uint8
    (tmp_path / "7.png").write_bytes((tmp_path / "7.png").read_bytes()[:100])
    with pytest.raises(SourceError, match=r"of .*birds.csv, id '007'.*7.png"):
        pack(source, str(tmp_path / "again.h5"))


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_auto_compresses_only_what_becomes_smaller_and_never_small_samples(out):
    noise = rng.integers(0, 256, (20, 64, 64), "u1")
    rows = np.zeros((20, 128), "f4")
    fields = {"smooth": SMOOTH[:20], "noise": noise, "rows": rows, "y": np.arange(20)}

    class Decoded(ArraySource):
        chunks = StorageLayout(reading="decoded")

    chosen = pack(Decoded(fields), out).plan
    assert {field.key: field.chunk for field in chosen.fields} == {"smooth": 1, "noise": 0, "rows": 0, "y": 0}


def test_auto_compresses_nothing_that_was_not(h5, out):
    assert pack(HDF5Source(h5(data=SMOOTH, labels=np.arange(50))), out).plan.codec == "none"


def test_small_samples_share_chunks_of_64_kib(out):
    source = ArraySource({"x": rng.standard_normal((1000, 128)).astype("f4"), "y": np.arange(1000)})
    packed = pack(source, out, codec="deflate")
    assert [field.chunk for field in packed.plan.fields] == [128, 0]
    same(source, compare.packed_source(out, packed.plan))


def test_a_chunk_of_the_users_own_choice_may_end_behind_the_last_sample(out, monkeypatch):
    small_steps(monkeypatch)
    source = ArraySource({"x": SMOOTH})
    packed = pack(source, out, codec="zstd", chunk=7)
    with h5py.File(out) as file:
        assert file["x"].chunks == (7, 64, 64)
    same(source, compare.packed_source(out, packed.plan))


def test_shuffle_is_used_where_it_helps(out):
    ramp = np.linspace(0, 1, 50 * 64 * 64, dtype="f4").reshape(50, 64, 64)
    assert pack(ArraySource({"x": ramp}), out, codec="deflate").plan.fields[0].shuffle
    assert HDF5Source(out, ["x"])[7][0].tobytes() == ramp[7].tobytes()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "gzip"}, "codec: 'gzip' is not one of auto, none"),
        ({"codec": "none", "chunk": 2}, "chunk: 2 but without a codec"),
        ({"columns": ["x"]}, "names two"),
        ({"columns": ["origin/path"]}, "cannot name a dataset"),
    ],
)
def test_a_wrong_argument_is_named_and_leaves_nothing(out, options, message):
    with pytest.raises(ConfigError, match=message):
        pack(ArraySource({"x": SMOOTH}), out, **options)
    assert os.listdir(os.path.dirname(out)) == []


def test_a_codec_without_its_library_says_how_to_install_it(out, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(ConfigError, match=r"zstd needs a library: pip install 'lit-async-data\[codecs\]'"):
        pack(ArraySource({"x": SMOOTH}), out, codec="zstd")


def test_a_file_is_replaced_only_by_force(out):
    source = ArraySource({"x": SMOOTH})
    Path(out).write_bytes(b"precious")
    with pytest.raises(ConfigError, match="exists already"):
        pack(source, out)
    assert Path(out).read_bytes() == b"precious"
    pack(source, out, force=True)
    assert os.listdir(os.path.dirname(out)) == ["out.h5"]
    assert len(HDF5Source(out, ["x"])) == 50


def test_the_input_is_never_the_output(h5):
    path = h5(data=SMOOTH, labels=np.arange(50))
    with pytest.raises(ConfigError, match="is also the input"):
        pack(HDF5Source(path), path, force=True)


def test_a_sample_without_a_class_is_named(out):
    from lit_async_data import ManifestSource

    table = pyarrow.table({"y": ["a", None, "b"], "v": [1.0, 2.0, 3.0]})
    source = ManifestSource(table, {"y": {"name": "y", "null": "ignore"}, "v": "v"})
    with pytest.raises(FormatError, match="y, sample 1: -100 is none of its 2 classes"):
        pack(source, out)


@pytest.mark.parametrize("key", ["x", "y"])
def test_a_difference_names_dataset_and_sample_and_leaves_no_file(out, key, monkeypatch):
    source = ArraySource({"x": SMOOTH, "y": np.arange(50)})
    original = writing._stored

    def wrong(values, field, piece):
        stored = original(values, field, piece)
        if field.key == key:
            stored = stored.copy()
            stored[17 - piece.row] += 1
        return stored

    monkeypatch.setattr(writing, "_stored", wrong)
    with pytest.raises(compare.DifferenceError, match=f"{key}, sample 17 .*differs from the input") as error:
        pack(source, out)
    assert (error.value.dataset, error.value.sample_id) == (key, 17)
    assert os.listdir(os.path.dirname(out)) == []


class Failing(ArraySource):
    """Has one sample that cannot be read."""

    def read_into(self, indices, out):
        if 40 in indices:
            raise SourceError("x.h5: cannot be read")
        super().read_into(indices, out)


def interrupt(step, at):
    def told(now, done, total):
        if now == step and done >= at * total:
            raise KeyboardInterrupt

    return told


@pytest.mark.parametrize("codec", ["none", "deflate"])
@pytest.mark.parametrize(
    ("source", "progress"),
    [
        (ArraySource, interrupt("packing", 0.5)),
        (ArraySource, interrupt("comparing", 0.5)),
        (Failing, lambda *_: None),
    ],
)
def test_what_fails_or_is_interrupted_leaves_nothing_and_replaces_nothing(out, codec, source, progress, monkeypatch):
    small_steps(monkeypatch)
    Path(out).write_bytes(b"precious")
    with pytest.raises((KeyboardInterrupt, SourceError)):
        pack(source({"x": SMOOTH}), out, codec=codec, force=True, progress=progress)
    assert os.listdir(os.path.dirname(out)) == ["out.h5"]
    assert Path(out).read_bytes() == b"precious"


@pytest.mark.parametrize("codec", ["none", "deflate"])
def test_a_write_that_fails_leaves_nothing_and_says_what_to_do(out, codec):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SourceError, match=r"out.h5: cannot be written: .*check that you may write there"):
            pack(ArraySource({"x": NOISE}), out, codec=codec)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(os.path.dirname(out)) == []
    pack(ArraySource({"x": NOISE}), out, codec=codec)
