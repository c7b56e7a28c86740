"""`statistics` is what numpy finds in the whole of the arrays; each sample is read once, or taken from the cache."""

import contextlib

import h5py
import numpy as np
import pytest
from support.statistics import IMAGES, check

from lit_async_data import (
    ConfigError,
    Field,
    HDF5Source,
    StorageLayout,
    SubsetSource,
    split,
    statistics,
)
from lit_async_data.engine.loader import statistics as program
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize(
    ("values", "axis", "kept"),
    [
        (IMAGES, "channels", (0,)),
        (IMAGES, None, ()),
        (IMAGES, -1, (2,)),
        (IMAGES, (0, 2), (0, 2)),
        (IMAGES[:, 0], "channels", ()),
        (IMAGES[:, 0, 0, 0], "channels", ()),
    ],
)
def test_axes_are_kept_as_they_are_named(values, axis, kept):
    check(statistics(ArraySource({"x": values}), axis=axis)["x"], values, kept)
    of_one = statistics(ArraySource({"x": values, "y": values}), axis={"x": axis})  # for y as if none was named
    check(of_one["x"], values, kept)
    assert of_one["y"].mean.tolist() == statistics(ArraySource({"y": values}))["y"].mean.tolist()
    with pytest.raises(ConfigError, match="axis: 'z' is not one of x"):
        statistics(ArraySource({"x": values}), axis={"z": axis})


@pytest.mark.parametrize(("layout", "warned"), [(None, True), ({"x": "NHWC"}, False), ({"x": "NCHW"}, False)])
def test_channels_that_seem_to_be_last_are_warned_of(layout, warned, h5, caplog):
    with contextlib.closing(HDF5Source(h5(x=np.ones((2, 8, 8, 3), "u1")), {"x": "x"}, layout=layout)) as source:
        statistics(source)
    said = "x of (8, 8, 3) has 8 means, one for each place on axis 0; if axis 2 holds the channels, name it"
    assert (said in caplog.text) == warned == ("means" in caplog.text)


def test_classes_are_counted():
    several = np.array([[1, 0, 1], [0, 0, 1]], "f4")
    source = ArraySource({"y": np.array([3, 0]), "id": np.array([7, 2**40]), "z": np.array([-1, 1]), "w": several})
    found = statistics(source)
    assert [found[key].class_counts for key in ("id", "w")] == [None, None]
    assert [found[key].class_counts.tolist() for key in ("y", "z")] == [[1, 0, 0, 1], [0, 1]]


def test_filled_values_and_padding_are_left_out_and_overlapping_windows_count_twice(tmp_path):
    stored, path = np.arange(12, dtype="i2"), str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["packed"] = stored.reshape(6, 2)
        file["packed"].attrs.update(scale_factor=0.5, add_offset=1.0, _FillValue=np.int16(3))
        file["tokens/values"], file["tokens/offsets"] = np.arange(1, 7), np.array([0, 1, 3, 6])
    with contextlib.closing(HDF5Source(path, {"x": Field("packed", mask_and_scale=True)})) as source:
        check(statistics(source)["x"], np.where(stored == 3, np.nan, stored * 0.5 + 1).astype("f4"), ())
    for options in ({}, {"pad_side": "left"}, {"max_length": 4}, {"ragged": "concat"}):
        with contextlib.closing(HDF5Source(path, {"x": Field("tokens", **options)})) as source:
            found = statistics(source)
            check(found["x"], np.arange(1, 7), ())
            assert found["x_length"].mean == 2
            with pytest.raises(ConfigError, match=r"^axis: 0 cannot be kept of x: axis 0 has padding"):
                statistics(source, "x", axis=0)
    with contextlib.closing(HDF5Source(path, {"x": Field("packed", window=(0, 2))})) as source:
        found = statistics(source)["x"]
        assert (found.count, found.mean) == (5 * 4, np.mean([stored.reshape(6, 2)[at : at + 2] for at in range(5)]))


def test_one_long_sample_pads_few_others(h5, monkeypatch):
    stored, shapes, read_into = np.random.default_rng(0).random(5395), [], HDF5Source.read_into

    def noting(source, samples, out):
        shapes.extend(array.shape for key, array in out.items() if key == "x")
        read_into(source, samples, out)

    monkeypatch.setattr(HDF5Source, "read_into", noting)
    path = h5(**{"x/values": stored, "x/offsets": [*range(201), *range(5200, 5396)]})
    with contextlib.closing(HDF5Source(path, {"x": "x"})) as source:
        check(statistics(source, "x")["x"], stored, ())
    assert sum(samples * width for samples, width in shapes) < 500 * sum(samples for samples, _ in shapes)


@pytest.mark.parametrize("pad", ["last", "zero"])
@pytest.mark.parametrize(("layout", "joint"), [(None, 1), ({"x": "NC"}, 0)])
def test_padded_rows_of_windows_are_left_out(pad, layout, joint, h5):
    stored = np.arange(1.0, 13).reshape(6, 2)
    fields = {"x": Field("x", window=(0, 4), pad=pad)}
    with contextlib.closing(HDF5Source(h5(x=stored), fields, layout=layout)) as source:
        real = np.concatenate([stored[at : at + 4] for at in range(6)])
        check(statistics(source, "x", axis=joint)["x"], np.expand_dims(real, 2 - joint), (joint,))
        check(statistics(source, "x", axis=None)["x"], real, ())
        with pytest.raises(ConfigError, match=rf"^axis: {1 - joint} cannot be kept of x: axis {1 - joint} has padding"):
            statistics(source, "x", axis=1 - joint)


def test_channels_are_where_the_layout_says(h5):
    images = np.moveaxis(IMAGES, 1, -1)
    packed = {"data": images, "chunks": (7, 20, 20, 3), "compression": "gzip"}
    path = h5(x=packed, rows=images.reshape(40, 400, 3))
    with contextlib.closing(HDF5Source(path, ["x", "rows"], layout={"x": "NHWC", "rows": "NWC"})) as source:
        found = statistics(source)
        check(found[0], IMAGES, (0,))  # batches are tuples
        check(found[1], IMAGES.reshape(40, 3, 400), (0,))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (["u", "v"], (1,)),  # each variable, not each hour
        ("rows", (1,)),
        ("u", ()),  # rows of two axes have no channels
    ],
)
def test_in_a_window_channels_are_those_of_its_rows(name, kept, h5):
    path = h5(u=IMAGES[:, 0], v=9 * IMAGES[:, 1], rows=IMAGES)
    with contextlib.closing(HDF5Source(path, {"x": Field(name, window=(0, 6))})) as source:
        check(statistics(source)["x"], np.stack([source[at]["x"] for at in range(len(source))]), kept)


def test_a_side_of_a_split_knows_nothing_of_the_others_and_each_chunk_is_read_once_in_order(monkeypatch):
    values, read, read_into = np.arange(60.0), [], ArraySource.read_into
    layout = StorageLayout((ChunkRun(60, 6),), compressed=True, reading="decoded")
    sides = split(ArraySource({"x": values, "y": np.arange(60)}, chunks=layout), {"train": 0.5, "val": 0.5})
    shuffled = SubsetSource(sides["train"], np.random.default_rng(0).permutation(len(sides["train"])))
    monkeypatch.setattr(ArraySource, "read_into", lambda *given: read.append(given[1].tolist()) or read_into(*given))
    check(statistics(shuffled, "x")["x"], values[sides["train"].samples], ())
    assert read[0] == sorted(sides["train"].samples.tolist())


def test_kept_results_are_those_of_the_source_as_it_is(tmp_path, monkeypatch):
    path, kept = tmp_path / "x.h5", tmp_path / "kept"
    reads, read_all = [], program._read
    monkeypatch.setattr(program, "_read", lambda *a, **k: reads.append(1) or read_all(*a, **k))

    def written(values):
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = values, np.arange(40) % 3

    def read(*fields, **options):
        with contextlib.closing(HDF5Source(str(path), ["x", "y"])) as source:
            return statistics(source, *fields, cache_dir=kept, **options)

    written(IMAGES)
    for _ in range(2):
        found = read()
        check(found[0], IMAGES, (0,))
        assert found[1].class_counts.tolist() == [14, 13, 13]
    assert (len(reads), kept.stat().st_mode & 0o777) == (1, 0o700)
    read(1)
    read(axis=None)
    assert len(reads) == 3
    written(IMAGES + 1)  # of the same size
    check(read()[0], IMAGES + 1, (0,))


def test_sources_that_only_differ_in_values_are_told_apart(tmp_path):
    for offset in (0, 1):
        found = statistics(ArraySource({"x": np.arange(5.0) + offset}), cache_dir=tmp_path)
        assert found["x"].mean == 2 + offset
    assert len(list(tmp_path.iterdir())) == 2
    whole, some = ArraySource({"x": np.arange(50_000) // 40_000}), np.arange(40_000)
    for last in (0, 1):
        some[20_001] = 45_000 * last
        assert statistics(SubsetSource(whole, some), cache_dir=tmp_path)["x"].max == last


@pytest.mark.parametrize(
    ("names", "given", "said"),
    [
        (["x"], {"fields": []}, "^fields: empty; name at least one"),
        (["x", "waves"], {"fields": "waves"}, r"^fields: 'waves' is not one of 'x', .* of real numbers.*numpy\.unique"),
        (["waves"], {}, r"^fields: no field of the source holds real"),
        (["x"], {"axis": 3}, r"^axis: 3 cannot be kept of x: samples have shape \(3, 20, 20\), without N"),
        (["x"], {"axis": (0, 0)}, r"^axis: \(0, 0\) cannot be kept"),
    ],
)
def test_what_has_no_statistics_is_named(names, given, said, h5):
    source = HDF5Source(h5(x=IMAGES, waves=np.zeros(40, "c8")), {name: name for name in names})
    with contextlib.closing(source), pytest.raises(ConfigError, match=said):
        statistics(source, **given)
