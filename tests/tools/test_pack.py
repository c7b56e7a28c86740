"""`pack`: values, types and places survive; the result is read by the fast way; errors name what to do."""

import contextlib
import os
import re
import resource
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow.csv
import pytest
from PIL import Image
from support.failures import raising
from support.files import examples
from support.lines import built_by_report

from lit_async_data import Field, HDF5Source, ManifestSource, StorageLayout
from lit_async_data.__main__ import main
from lit_async_data.errors import ConfigError, CorruptError, SourceError
from lit_async_data.testing import ArraySource
from lit_async_data.tools import pack as packing
from lit_async_data.tools.pack import pack, packed_source, planned

rng = np.random.default_rng(0)
NOISE = rng.integers(0, 256, (50, 64, 64), "u1")
VALUES = (np.add.outer(np.arange(20), np.arange(12 * 32 * 3).reshape(12, 32, 3)) // 64 % 256).astype("u1")
SMOOTH = (np.add.outer(np.arange(50), np.arange(64 * 64).reshape(64, 64)) // 64 % 256).astype("u1")


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out.h5")


def small_steps(monkeypatch, samples=4, nbytes=4096):
    monkeypatch.setattr(packing, "PIECE_BYTES", samples * nbytes)


def same(source, other):
    assert len(source) == len(other)
    everything = np.arange(len(source))
    for key, values in packing.read(source, everything).items():
        found = packing.read(other, everything)[key]
        assert values.shape == found.shape
        assert values.tobytes() == found.astype(values.dtype).tobytes(), key


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("auto", "u1"), ("auto", "f4"), ("none", ">i2"), ("none", "f4"), ("deflate", "c8"), ("zstd", ">i2"), ("lz4", "?")],
)
def test_values_come_back_bit_by_bit_with_every_codec(h5, out, codec, dtype, monkeypatch):
    small_steps(monkeypatch)
    values = SMOOTH.astype(dtype)
    if dtype == "f4":
        values[3, 4] = np.nan
        values[5].view("u4")[:] = 0x7FC12345  # a NaN that says something
    data = {"data": values, "chunks": (10, 64, 64), "compression": "gzip"}
    source = HDF5Source(h5(data=data, labels=np.arange(50, dtype="i2")))
    chunk = 7 if codec == "zstd" else None  # the last one ends behind the last sample
    packed = pack(source, out, codec=codec, chunk=chunk)
    same(source, packed_source(out, packed.plan))
    with h5py.File(out) as file:
        assert file["data"].dtype == np.dtype(dtype).newbyteorder("=")
        assert file["labels"].dtype == np.dtype("i2")
        assert (file["data"].chunks is None) == (codec == "none")
        if codec != "none":
            assert file["data"].chunks == (chunk or 1, 64, 64)
        if codec in ("auto", "deflate"):  # which every h5py reads
            assert file["data"][...].tobytes() == values.astype(file["data"].dtype).tobytes()


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


def test_parts_that_stay_apart_keep_windows_inside(tmp_path, out):
    path = str(tmp_path / "rec.h5")
    with h5py.File(path, "w") as file:
        for number in range(12):
            values = rng.standard_normal((20 + number, 64), "f4")
            file.create_dataset(f"patient_{number}/data", data=values, chunks=(len(values), 1), compression="gzip")
            file[f"patient_{number}/site"] = 100 * number + np.arange(len(values))
    source = HDF5Source(path, ["data"], group="patient_*")
    pack(source, out, keep_parts=True, codec="deflate", columns=["site"])
    windows = {"x": Field("data", window=(0, 8))}
    same(HDF5Source(path, windows, group="patient_*"), HDF5Source(out, windows, group="parts/*"))
    with h5py.File(out) as file:
        assert file["origin/parts"].asstr()[...].tolist() == [f"{path}:/patient_{number}" for number in range(12)]
        assert file["parts/3/site"][...].tolist() == list(range(300, 323))


def test_parts_that_lie_end_to_end_are_warned_of_where_windows_cross_them(h5, out, caplog):
    files = [h5(f"{name}.h5", data=np.arange(10)) for name in "ab"]
    pack(HDF5Source(files, ["data"]), out)
    HDF5Source(out, ["data"])
    HDF5Source(files, {"x": Field("data", window=(0, 4))})
    assert not caplog.records
    HDF5Source(out, {"x": Field("data", window=(0, 4))})
    (line,) = caplog.messages
    assert line.endswith(
        "the 2 parts that /origin/parts names were packed end to end, and windows cross them; pack "
        "again with --keep-parts"
    )


def test_a_table_of_images_keeps_classes_ids_and_paths(tmp_path, out, monkeypatch):
    small_steps(monkeypatch, nbytes=3 * 16 * 16)
    lines = ["id,path,species,site"]
    for number in range(20):
        Image.fromarray(rng.integers(0, 255, (20, 16, 3), "u1")).save(tmp_path / f"{number}.png")
        lines.append(f"{number:03},{number}.png,{('owl', 'auk', 'tit')[number % 3]},s{number % 2}")
    (tmp_path / "birds.csv").write_text("\n".join(lines))
    fields = {"x": "path", "y": "species"}
    source = ManifestSource(str(tmp_path / "birds.csv"), fields, id="id", image_size=16, resize="crop")
    packed = pack(source, out, columns=["site"])
    other = packed_source(out, packed.plan)
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
    assert not list(tmp_path.glob("again*"))


@pytest.mark.parametrize("kind", ["class", "text"])
def test_a_sample_without_a_class_stays_one(out, kind):
    table = pyarrow.table({"y": ["a", None, "b"], "v": [1.0, 2.0, 3.0], "t": [["b", "c"], ["a", "b"], ["a", "a"]]})
    fields = {"y": {"name": "y", "null": "ignore", "kind": kind}, "v": "v", "t": {"name": "t", "kind": "text"}}
    source = ManifestSource(table, fields)
    packed = pack(source, out)
    other = packed_source(out, packed.plan)
    same(source, other)
    assert other.column("y").tolist() == [0, -100, 1]
    with h5py.File(out) as file:
        assert file["y/codes"][...].tolist() == [0, -1, 1]
    padded = ManifestSource(pyarrow.table({"t": [["a", "b"], ["c"]]}), {"t": fields["t"]})
    with pytest.raises(ConfigError, match=r"fields\.t: is a list or a window; leave it out"):
        pack(padded, out, force=True)


@pytest.mark.parametrize("key", ["x", "y"])
def test_a_difference_names_dataset_and_sample_and_leaves_no_file(out, key):
    values = {"x": SMOOTH.copy(), "y": np.arange(50)}
    source = ArraySource(values)

    def changes(step, done, _):
        if step == "comparing" and not done:
            values[key][17] += 1

    with pytest.raises(CorruptError, match=f"{key}, sample 17 .*differs from the input") as error:
        pack(source, out, progress=changes)
    assert (error.value.dataset, error.value.sample_id) == (key, 17)
    assert os.listdir(os.path.dirname(out)) == []


@pytest.mark.parametrize("codec", ["none", "deflate"])
@pytest.mark.parametrize("step", ["packing", "comparing"])
def test_an_interrupt_leaves_nothing_and_replaces_nothing(out, codec, step, monkeypatch):
    def interrupt(now, done, total):
        if (now, done > total // 2) == (step, True):
            raise KeyboardInterrupt

    small_steps(monkeypatch)
    Path(out).write_bytes(b"precious")
    with pytest.raises(KeyboardInterrupt):
        pack(ArraySource({"x": SMOOTH}), out, codec=codec, force=True, progress=interrupt)
    assert os.listdir(os.path.dirname(out)) == ["out.h5"]
    assert Path(out).read_bytes() == b"precious"


def test_a_file_that_appears_meanwhile_is_not_replaced(out):
    with pytest.raises(ConfigError, match="exists already, and is not touched"):
        pack(ArraySource({"x": SMOOTH}), out, progress=lambda *_: Path(out).write_bytes(b"precious"))
    assert Path(out).read_bytes() == b"precious"
    assert os.listdir(os.path.dirname(out)) == ["out.h5"]


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


@pytest.fixture
def scans(h5):
    for name, part in (("scan1.h5", slice(0, 9)), ("scan2.h5", slice(9, 20))):
        numbers = np.arange(20, dtype="u1")[part]
        path = h5(name, images=VALUES[part], labels=numbers, notes=numbers, patient=numbers)
    return path.replace("scan2", "scan*")


def test_hdf5_files_become_one_and_the_printed_line_reads_it(scans, out, capsys):
    fields = ["--fields", "x=images", "y=labels", "--layout", "x=NHWC", "--columns", "patient"]
    assert main(["pack", scans, "-o", out, "--codec", "deflate", *fields, "--chunk", "4"]) == 0
    told = capsys.readouterr()
    assert "20 samples" in told.out
    assert "every value compared" in told.out
    assert "x  uint8 (12, 32, 3); chunks of 4 samples, deflate" in told.out
    packed = built_by_report(told.out)
    assert packed.spec["x"].shape == (3, 12, 32)
    assert packed[13]["y"] == 13
    assert np.array_equal(packed[13]["x"].transpose(1, 2, 0), VALUES[13])


@pytest.mark.parametrize("fields", [[], ["--group", "demo_*", "--fields", "x=frames", "y=label"]])
def test_encoded_images_are_decoded_in_the_size_that_is_given(tmp_path, out, fields, capsys):
    examples.jpegs(path := str(tmp_path / "demos.h5"))
    with h5py.File(path, "a") as file:
        for number, name in enumerate(("text", "variable")):
            file.move(name, f"demo_{number}/frames")
            file[f"demo_{number}/label"] = np.arange(6)
        for name in file.keys() - {"demo_0", "demo_1"}:
            del file[name]
    for size, shape in ((["--image-size", "5", "6"], (3, 5, 6)), ([], (3, 10, 12))):
        assert main(["pack", path, "-o", out, "--force", *fields, *size]) == 0, capsys.readouterr().err
        with contextlib.closing(HDF5Source(out, {"x": "x"}, layout={"x": "NHWC"})) as packed:
            assert (packed.spec["x"].shape, len(packed)) == (shape, 12)


def test_datasets_that_the_suggestion_leaves_out_are_named(h5, out, capsys):
    images = np.zeros((6, 8, 8, 3), "u1")
    path = h5("x.h5", images=images, labels=np.arange(6), pose=np.zeros((6, 2)), other=np.zeros(9))
    assert main(["pack", path, "-o", out]) == 0
    assert "not packed: pose; name all with --fields KEY=NAME" in capsys.readouterr().out
    assert main(["pack", path, "-o", out, "--force", "--fields", "x=images", "pose=pose"]) == 0
    assert "not packed" not in capsys.readouterr().out


def packed_year(h5, name, scale):
    path = h5(name, t2m=np.arange(8, dtype="i2").reshape(4, 2), plain=np.ones((4, 2), "f4"))
    with h5py.File(path, "r+") as file:
        file["t2m"].attrs.update(scale_factor=np.array([scale]), add_offset=np.array([3.0]))
    return path


def test_packed_values_stay_packed_and_the_printed_line_unpacks_them(h5, out, capsys):
    path = packed_year(h5, "2001.nc", 0.5)
    assert main(["pack", path, "-o", out, "--fields", "t2m", "plain"]) == 0
    last = built_by_report(capsys.readouterr().out)[3]
    assert (last["t2m"].tolist(), last["plain"].tolist()) == ([6.0, 6.5], [1, 1])


def test_values_that_are_packed_in_several_ways_cannot_share_attributes(h5, out, capsys):
    paths = [packed_year(h5, "2001.nc", 0.5), packed_year(h5, "2002.nc", 0.25)]
    assert main(["pack", *paths, "-o", out, "--fields", "t2m"]) == 2
    told = capsys.readouterr().err
    assert re.search(r"t2m is packed in another way in \S*2002.nc than in \S*2001.nc; .*mask_and_scale=True", told)
    pack(HDF5Source(paths, {"t2m": Field("t2m", mask_and_scale=True)}), out)
    assert HDF5Source(out, ["t2m"])[7][0].tolist() == [4.5, 4.75]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["{h5}", "-o", "{h5}", "--force"], "is also the input"),
        (["{h5}", "-o", "{folder}/taken.h5"], "taken.h5: exists already, and is not touched"),
        (["{h5}", "-o", "{out}", "--codec", "none", "--chunk", "2"], "chunk: 2: chunks need a codec"),
        (["{h5}", "-o", "{out}", "--fields", "x=data", "--image-size", "8"], "image_size: no field holds encoded"),
        (["{h5}", "-o", "{folder}"], "is a folder; give the name of a file"),
        (["{h5}", "-o", "{out}", "--columns", "x"], "'x' cannot name a dataset, or names two"),
    ],
)
def test_a_wrong_argument_ends_with_2_and_names_it(h5, out, capsys, given, message):
    path = h5(data=VALUES, labels=np.arange(20))
    h5("taken.h5", data=VALUES)
    assert main(["pack", *(each.format(h5=path, out=out, folder=os.path.dirname(out)) for each in given)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(f"^error: .*{message}", error), error


def test_ctrl_c_ends_with_130_and_one_line(h5, out, capsys, monkeypatch):
    monkeypatch.setattr(packing, "_compare", raising(KeyboardInterrupt()))
    assert main(["pack", h5(data=VALUES, labels=np.arange(20)), "-o", out]) == 130
    assert capsys.readouterr().err == "interrupted\n"


SMALL = SMOOTH[:20]


def planned_for(source, codec="auto", chunk=None):
    return planned(source, codec, chunk, keep_parts=False)


def test_auto_compresses_what_was_compressed_and_becomes_smaller_and_no_small_samples():
    ramp = np.linspace(0, 1, 20 * 64 * 64, dtype="f4").reshape(20, 64, 64)
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 64), "u1")
    fields = {"smooth": SMALL, "ramp": ramp, "noise": noise, "rows": np.zeros((20, 128), "f4")}

    class Decoded(ArraySource):
        chunks = StorageLayout(reading="decoded")

    chosen = planned_for(Decoded(fields)).fields
    expected = {"smooth": (1, False), "ramp": (1, True), "noise": (0, False), "rows": (0, False)}
    assert {field.key: (field.chunk, field.shuffle) for field in chosen} == expected
    Decoded.chunks = StorageLayout(reading="copied")
    assert not any(field.chunk for field in planned_for(Decoded(fields)).fields)
    shared = planned_for(ArraySource({"x": np.zeros((300, 128), "f4")}), "deflate")
    assert shared.fields[0].chunk == 128  # 64 KiB


def test_a_codec_without_its_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(ConfigError, match=r"zstd needs a library: pip install 'lit-async-data\[codecs\]'"):
        planned_for(ArraySource({"x": SMALL}), "zstd")
