"""Groups as samples, and attributes as fields."""

import csv
import functools
import pickle
import re

import h5py
import numpy as np
import pytest
from support.files.damage import damage_chunk
from support.sources.oracle import refused

from lit_async_data import AsyncLoader, Field, HDF5Source, SubsetSource, merge_patches, split
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError
from lit_async_data.sources.hdf5.index import index as index_cache
from lit_async_data.sources.hdf5.parts import groups
from lit_async_data.sources.local_files import COLUMNS, bad_sample
from lit_async_data.tools.pack import pack, packed_source

COUNT, SHAPE = 12, (8, 6, 3)
FIELDS = {
    "x": "image",
    "n": "number",
    "y": Field(attr="label"),
    "kind": Field(attr="kind", classes=["cat", "dog"]),
    "weight": Field("image", attr="weight", dtype="float32"),
}


def write(path, dtype="u1", above="", **properties):
    """Groups in natural order, s0 to s11, beside a dataset."""
    values = np.random.default_rng(0).integers(0, 200, (COUNT, *SHAPE)).astype(dtype)
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        file[f"{above}about"] = np.arange(3)
        for number, image in enumerate(values):
            group = file.create_group(f"{above}s{number}")
            group.create_dataset("image", data=image, **properties).attrs["weight"] = number / 4
            group["number"] = np.int16(number)
            group.attrs["label"], group.attrs["kind"] = number % 7, ["cat", "dog"][number % 2]
    return values


def opened(path, fields=FIELDS, **options):
    return HDF5Source(path, fields, **{"group": "*", "sample": "group", **options})


@pytest.mark.parametrize(
    ("properties", "reading"),
    [
        ({"above": "scans/2024/"}, "copied"),
        ({"dtype": ">f4"}, "copied"),
        ({"chunks": SHAPE}, "copied"),
        ({"chunks": (5, 4, 3)}, "decoded"),
        ({"compression": "gzip", "chunks": SHAPE}, "decoded"),
        ({"compression": "lzf", "shuffle": True, "chunks": (3, 6, 2), "dtype": ">i4"}, "decoded"),
        ({"scaleoffset": 0, "dtype": "i4"}, "locked"),
    ],
)
def test_each_group_is_a_sample(properties, reading, tmp_path, monkeypatch):
    values = write(tmp_path / "x.h5", **properties)
    above = properties.get("above", "")
    monkeypatch.setattr(index_cache, "changed_recently", lambda *_: False)
    order = np.random.default_rng(0).permutation(COUNT)
    for again in range(2):
        if again and reading != "locked":
            monkeypatch.setattr(groups, "_listed", None)  # the list is kept
        source = opened(tmp_path / "x.h5", group=f"{above}*", layout={"x": "HWC"}, cache_dir=tmp_path / "kept")
        assert (len(source), source.chunks.reading, source.chunks.rows) == (COUNT, reading, 1)
        assert source.spec["x"].shape == (3, 8, 6)
        assert source.locate([10])[0][1:] == (f"/{above}s10", 10)
        for each in (source, pickle.loads(pickle.dumps(source))):
            samples = each.__getitems__(order)
            np.testing.assert_array_equal([sample["x"] for sample in samples], values[order].transpose(0, 3, 1, 2))
            found = np.array([[sample[key] for key in ("n", "y", "kind", "weight")] for sample in samples])
            np.testing.assert_array_equal(found, np.stack([order, order % 7, order % 2, order / 4], 1))
    assert source.spec["kind"].classes == ("cat", "dog")


def another(**given):
    def edit(file):
        del file["s5/image"]
        file.create_dataset("s5/image", **given)

    return edit


def of_attribute(value):
    return lambda file: file["s5"].attrs.update(label=value)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (another(data=np.zeros((8, 7, 3), "u1")), ("s5/image", r"holds uint8 \(8, 7, 3\), but s0/image holds")),
        (another(data=np.zeros(SHAPE, "u2")), ("s5/image", "holds uint16")),
        (of_attribute(0.5), ("s5@label", r"its 'label' is float64 \(\), but int64 \(\) in the first sample")),
        (of_attribute("x"), ("s5@label", r"its 'label' is \|S1 \(\), but int64 \(\) in the first sample")),
    ],
)
def test_a_group_of_another_type_is_told_and_named_when_read(edit, said, tmp_path, caplog, monkeypatch):
    values, (dataset, message) = write(tmp_path / "x.h5"), said
    with h5py.File(tmp_path / "x.h5", "a") as file:
        edit(file)
    monkeypatch.setattr(index_cache, "changed_recently", lambda *_: False)
    for _ in range(2):
        source = opened(tmp_path / "x.h5", {"x": "image", "y": Field(attr="label")}, cache_dir=tmp_path / "kept")
        monkeypatch.setattr(groups, "_listed", None)  # the list is kept
        with pytest.raises(FormatError, match=rf"x\.h5:/{dataset}: {message}") as raised:
            source.__getitems__([1, 5])
        assert (raised.value.dataset, raised.value.sample_id) == (dataset, 5)
        samples = source.__getitems__(np.delete(np.arange(COUNT), 5))
        np.testing.assert_array_equal([sample["x"] for sample in samples], np.delete(values, 5, axis=0))
    assert caplog.text.count(f"1 of 12 samples cannot be read: {tmp_path}/x.h5:/{dataset}: ") == 2


@pytest.mark.parametrize(
    "where",
    [("{}/{}", {"sample": "group", "group": "s*"}), ("{1}", {"sample": "group"}), ("{1}/{0}", {"sample": "dataset"})],
)
@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize("properties", [{}, {"chunks": True, "compression": "gzip"}])
def test_a_file_that_lacks_a_field_has_lost_samples(where, longer, properties, tmp_path, caplog):
    place, options = where
    for name, lacks in [("a", "x"), ("b", "y"), ("c", "")]:
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for sample in ("s1", "s2"):
                values = {"n": ord(name), "y": name, "x": np.full((3 + longer * (name == "c"), 2), ord(name))}
                for key in values.keys() - {lacks} - {*file}:
                    of = properties if key == "x" else {}
                    file.create_dataset(place.format(sample, key), data=values[key], **of)
    names = {key: place.format("*", key).removeprefix("*/") for key in "nyxz"}
    fields = {"n": names["n"], "y": Field(names["y"], classes=["a", "c"]), "x": names["x"]}
    source = HDF5Source(tmp_path / "*.h5", fields, **options)
    each = len(source) // 3
    said = [(str(each), of, place.format("s1", key)) for of, key in [("a", "x"), ("b", "y")]]
    assert re.findall(r"(\d) of \d samples cannot be read: \S+/(.)\.h5:/(\S+): is missing", caplog.text) == said
    for sample in range(2 * each):
        with pytest.raises(MissingError, match="is missing; write it") as raised:
            source.__getitems__([sample, len(source) - 1])
        assert (raised.value.file, raised.value.sample_id) == (str(tmp_path / f"{'ab'[sample // each]}.h5"), sample)
    for of in (source, HDF5Source(tmp_path / "*.h5", fields, exclude=[*range(2 * each)], **options)):
        for sample in of.__getitems__(range(len(of) - each, len(of))):
            assert (sample["n"], sample["y"], sample["x"].tolist()) == (ord("c"), 1, [[ord("c")] * 2] * (3 + longer))
    with pytest.raises(MissingError, match=r"a\.h5: has no dataset '\S*z"):
        HDF5Source(tmp_path / "*.h5", {**fields, "z": names["z"]}, **options)


LACKING, LEFT = (0, 5, 6, 7), [1, 2, 3, 4, 8, 9, 10, 11]


def write_lacking(path, **properties):
    """Groups as of `write`, of which three have no image, and one no label; the images."""
    values = write(path, **properties)
    with h5py.File(path, "a") as file:
        for number in LACKING[:3]:
            del file[f"s{number}/image"]
        del file["s7"].attrs["kind"]
    return values


@pytest.mark.parametrize("properties", [{}, {"chunks": (5, 4, 3), "compression": "gzip"}, {"scaleoffset": 0}])
def test_groups_that_lack_a_field_are_told_once_and_named_when_read(properties, tmp_path, caplog, monkeypatch):
    values = write_lacking(tmp_path / "x.h5", **properties)
    monkeypatch.setattr(index_cache, "changed_recently", lambda *_: False)
    for again in range(2):
        if again and "scaleoffset" not in properties:
            monkeypatch.setattr(groups, "_listed", None)  # the list is kept
        caplog.clear()
        source = opened(tmp_path / "x.h5", cache_dir=tmp_path / "kept")
        assert re.findall("(.) of 12 samples cannot be read", caplog.text) == ["3", "1", "3"]  # x, kind, weight
        for number in LACKING:
            with pytest.raises(MissingError, match=f"s{number}.* is missing; write it") as raised:
                source.__getitems__([1, number])
            dataset = f"s{number}@kind" if number == 7 else f"s{number}/image"
            assert (raised.value.dataset, raised.value.sample_id) == (dataset, number)
        with pytest.raises(MissingError, match=r"^\S*x\.h5:/s7@kind: is missing"):
            split(source, {"train": 0.5, "val": 0.5}, groups="kind")
        for number, sample in zip(LEFT, source.__getitems__(LEFT), strict=True):
            np.testing.assert_array_equal(sample["x"], values[number])
            assert (sample["n"], sample["y"], sample["kind"]) == (number, number % 7, number % 2)
    monkeypatch.undo()
    caplog.clear()
    source = opened(tmp_path / "x.h5", exclude=LACKING)
    assert "cannot be read" not in caplog.text
    np.testing.assert_array_equal([sample["x"] for sample in source.__getitems__(range(8))], values[LEFT])
    monkeypatch.setattr(groups, "MISSES", 0)
    for fields, text in [({"x": "image"}, "has no dataset 's0/image'"), ({"x": Field(attr="a")}, "s0: its attr")]:
        with pytest.raises(MissingError, match=text):
            opened(tmp_path / "x.h5", {"n": "number", **fields})


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "on_error"), [("thread", "substitute"), ("process", "skip")])
def test_a_loader_reads_around_groups_that_lack_a_field(kind, on_error, tmp_path):
    values = write_lacking(tmp_path / "x.h5", compression="gzip", chunks=SHAPE)
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "workers": 1, "worker_kind": kind}
    options |= {"on_error": on_error, "max_bad": 1.0}
    with AsyncLoader(opened(tmp_path / "x.h5"), options) as loader:
        numbers, states = [], []
        for batch in loader:
            np.testing.assert_array_equal(batch["x"], values[batch["n"]])
            numbers.append(batch["n"].tolist())
            states.append(loader.state_dict())
    kept = np.concatenate(numbers)
    assert (len(kept), {*kept.tolist()}) == (8 if on_error == "skip" else COUNT, {*LEFT})
    with AsyncLoader(opened(tmp_path / "x.h5"), options) as loader:
        loader.load_state_dict(states[0])
        assert [batch["n"].tolist() for batch in loader] == numbers[1:]


def test_groups_that_are_stored_in_different_ways_are_read_by_h5py(tmp_path, caplog):
    values = write(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "a") as file:
        another(data=values[5], compression="gzip")(file)
    source = opened(tmp_path / "x.h5", {"x": "image"})
    assert source.chunks.reading == "locked"
    assert "store it in different ways" in caplog.text
    np.testing.assert_array_equal([sample["x"] for sample in source.__getitems__(range(COUNT))], values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": {"x": Field("image", window=(0, 2))}}, r"fields\.x\.window: does not apply"),
        ({"sample": "file"}, "sample: 'file' is not one of row, group, dataset"),
        ({"rows": "image"}, "sample: 'group' goes neither"),
        ({"layout": {"x": "NHWC"}}, "'NHWC' for .*/image must be .* without N, since no axis counts"),
    ],
)
def test_options_of_rows_do_not_apply(options, message, tmp_path):
    write(tmp_path / "x.h5")
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "x.h5", **({"fields": FIELDS} | options))


def test_bad_groups_are_left_out_by_a_list_and_the_rest_is_divided_and_packed(tmp_path):
    for name in ("x.h5", "y.h5"):
        write(tmp_path / name)
    with open(tmp_path / "bad.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(bad_sample(opened(tmp_path / "x.h5"), 10, ValueError()))
    source = opened(tmp_path / "*.h5", exclude=tmp_path / "bad.csv")
    left = [*range(10), 11, *range(COUNT)]
    names = [f"{'xy'[place > 10]}.h5:/s{number}" for place, number in enumerate(left)]
    sides = split(source, {"a": 0.5, "b": 0.5}, groups="group")
    assert sorted(np.concatenate([side.samples for side in sides.values()]).tolist()) == list(range(2 * COUNT - 1))
    packed = packed_source(str(tmp_path / "z"), pack(source, str(tmp_path / "z"), columns=["group"]).plan)
    for each in (source, packed):
        assert (each.column("n").tolist(), each.column("group").tolist()) == (left, names)
    assert (packed.column("origin/row").tolist(), packed.column("origin/part").tolist()) == (left, [0] * 11 + [1] * 12)


def test_what_lies_in_another_file_is_refused(tmp_path):
    for name in ("x.h5", "other.h5"):
        write(tmp_path / name)
    with h5py.File(tmp_path / "x.h5", "a") as file:
        file["s12"] = h5py.ExternalLink("other.h5", "/s3")
        file["far"] = h5py.ExternalLink("other.h5", "/")
        file["own/s1/image"] = h5py.ExternalLink("other.h5", "/s1/image")
    for group, name in [("*", "far"), ("s*", "s12"), ("far/*", r"far/\*"), ("own/*", "own/s1/image")]:
        with pytest.raises(FormatError, match=f"{name}: is a link into another file"):
            opened(tmp_path / "x.h5", {"x": "image"} if group == "own/*" else {"y": Field(attr="label")}, group=group)


LENGTHS = [0, 7, 120, 3, 0, 1, 6000, 40]


def write_lengths(folder, *properties, dtype="i4"):
    """A file for each of the properties; groups s0 to s7 of different lengths in each."""
    rng, values = np.random.default_rng(0), []
    for number, given in enumerate(properties):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            for place, length in enumerate(LENGTHS):
                values.append(rng.integers(0, 100, (length, 3)).astype(dtype))
                file.create_dataset(f"s{place}/x", data=values[-1], **(given if length else {}))
                file[f"s{place}/y"] = 10 * number + place
    return values


@pytest.mark.parametrize(
    ("properties", "reading", "dtype"),
    [
        (({}, {"compression": "gzip", "shuffle": True}), "decoded", "i4"),
        (({"chunks": (7, 2), "maxshape": (None, 3), "compression": "gzip"}, {"chunks": True}), "decoded", ">f4"),
        (({"scaleoffset": 0},), "locked", "i4"),
    ],
)
def test_groups_of_different_lengths_are_padded_or_put_together(properties, reading, dtype, tmp_path, monkeypatch):
    values = write_lengths(tmp_path, *properties, dtype=dtype)
    monkeypatch.setattr(index_cache, "changed_recently", lambda *_: False)
    order = np.random.default_rng(1).permutation(len(values))
    for left, again in [(False, False), (True, True)]:
        if again and reading != "locked":
            monkeypatch.setattr(groups, "_listed", None)  # lengths and places are kept
        field = Field("x", dtype="float64", fill=-1, pad_side="left") if left else "x"
        source = opened(tmp_path / "*.h5", {"x": field, "y": "y"}, cache_dir=tmp_path / "kept")
        assert (source.spec["x"].shape, source.chunks.reading) == ((6000, 3), reading)
        for each in (source, pickle.loads(pickle.dumps(source))):
            for number, sample in zip(order, each.__getitems__(order), strict=True):
                length = len(values[number])
                rows = np.roll(sample["x"], length if left else 0, axis=0)  # first the sample
                np.testing.assert_array_equal(rows[:length], values[number])
                assert (rows[length:] == (-1 if left else 0)).all()
                assert sample["x_length"] == length
    with pytest.raises(FormatError, match=r"0\.h5:/s2/x: .*120 values, more than max_length 100") as raised:
        opened(tmp_path / "*.h5", {"x": Field("x", max_length=100), "y": "y"}, cache_dir=tmp_path / "kept")
    assert raised.value.dataset == "s2/x"


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_groups_by_length_without_padding_around_a_damaged_one(kind, tmp_path):
    values = write_lengths(tmp_path, {}, {"compression": "gzip"})
    with h5py.File(tmp_path / "1.h5", "a") as file:
        del file["s7/x"]
    damage_chunk(tmp_path / "1.h5", "s2/x", (0, 0))
    source = opened(tmp_path / "*.h5", {"x": Field("x", ragged="concat"), "y": "y"})
    with pytest.raises(CorruptError, match=r"1\.h5:/s2/x: chunk \(0, 0\)") as raised:
        source.__getitems__([10])
    assert (raised.value.dataset, raised.value.sample_id) == ("s2/x", 10)
    assert source.column("x_length").tolist() == [*LENGTHS, *LENGTHS[:7], 0]
    options = {"batch_size": 4, "batch_by": "x", "workers": 1, "worker_kind": kind, "on_error": "skip", "max_bad": 2}
    seen = []
    with AsyncLoader(source, options) as loader:
        for batch in loader:
            seen += batch["y"].tolist()
            for y, x in zip(batch["y"].tolist(), batch["x"].split(batch["x_length"].tolist()), strict=True):
                np.testing.assert_array_equal(x, values[y // 10 * 8 + y % 10])
    assert sorted(seen) == [y for y in [*range(8), *range(10, 18)] if y not in (12, 17)]


def test_a_group_may_hold_4_gib(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["s0/x"] = np.arange(3, dtype=np.uint8)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # so that the file is sparse
        space = h5py.h5s.create_simple((2**32 + 1,))
        h5py.h5d.create(file.create_group("s1").id, b"x", h5py.h5t.STD_U8LE, space, properties)
    source = opened(tmp_path / "x.h5", {"x": Field("x", ragged="concat")})
    assert (source.chunks.reading, source.column("x_length").tolist()) == ("locked", [3, 2**32 + 1])
    with AsyncLoader(SubsetSource(source, np.zeros(1, np.int64)), {"batch_size": 1, "workers": 0}) as loader:
        assert next(loader)["x"].tolist() == [0, 1, 2]


def test_files_that_are_samples_may_differ_in_length(h5, tmp_path):
    for number, length in enumerate((3, 5, 0)):
        h5(f"{number}.h5", x=np.full((length, 2), length))
    source = opened(tmp_path / "*.h5", {"x": "x"}, group=None)
    assert source.column("x_length").tolist() == [3, 5, 0]
    assert [int(each["x"].sum()) for each in source.__getitems__(range(3))] == [18, 50, 0]
    with pytest.raises(ConfigError, match="x: samples of variable length need an axis, no layout"):
        opened(tmp_path / "*.h5", {"x": "x"}, group=None, layout={"x": "TC"})


ONE_EACH = {"x": Field("scans/*.npy", ragged="concat"), "y": Field(attr="kind"), "age": "age", "n": "deep/*/n"}
ONE_EACH |= {"site": Field("/", attr="site"), "s": Field("scans", attr="scanner")}


def write_datasets(path):
    """A dataset for each sample, in natural order c0 to c11, and what has the same name elsewhere."""
    with h5py.File(path, "w") as file:
        file.attrs["site"], file.create_group("scans").attrs["scanner"] = 3, [1, 2]
        for number in reversed(range(COUNT)):
            dataset = file.create_dataset(f"scans/c{number}.npy", data=np.full((number, 2), number))
            dataset.attrs["kind"] = ["cat", "dog"][number % 2]
            file[f"targets/c{number}"], file[f"deep/c{number}/n"] = number / 4, number
        file["scans/about"] = np.arange(3)


of_datasets = functools.partial(HDF5Source, sample="dataset")


def test_each_dataset_is_a_sample_with_what_has_its_name_in_other_groups(tmp_path, monkeypatch):
    for name in ("a.h5", "b.h5"):
        write_datasets(tmp_path / name)
    rows = [f"c{number},{number * 10}" for number in range(COUNT)]
    (tmp_path / "t.csv").write_text("\n".join(["scan,age", *(f"/scans/{row}".replace(",", ".npy,") for row in rows)]))
    (tmp_path / "bad.csv").write_text(",".join(COLUMNS) + f"\ns,{tmp_path / 'b.h5'},/scans/c10.npy,0,,,c\n")
    options = {"table": tmp_path / "t.csv", "on": {"scan": "group"}, "cache_dir": tmp_path / "kept"}
    monkeypatch.setattr(index_cache, "changed_recently", lambda *_: False)
    numbers = np.delete(np.r_[:COUNT, :COUNT], COUNT + 10)
    for _ in range(2):
        source = of_datasets(tmp_path / "*.h5", ONE_EACH, exclude=tmp_path / "bad.csv", **options)
        samples = source.__getitems__(range(len(source)))
        assert [sample["x"][: sample["x_length"]].tolist() for sample in samples] == [[[n, n]] * n for n in numbers]
        for key, values in {"n": numbers, "age": numbers * 10, "y": numbers % 2, "site": numbers * 0 + 3}.items():
            np.testing.assert_array_equal(source.column(key), values)
        assert samples[5]["s"].tolist() == [1, 2]
        monkeypatch.setattr(groups, "_listed", None)  # the list is kept
    assert source.locate([COUNT + 10])[0] == (str(tmp_path / "b.h5"), "/scans/c11.npy", 11)
    assert set(source.column("group").tolist()[::COUNT]) == {"a.h5:/scans/c0.npy", "b.h5:/scans/c0.npy"}
    assert sum(map(len, split(source, {"a": 0.5, "b": 0.5}, groups="group").values())) == len(numbers)


@pytest.mark.parametrize(
    ("fields", "error", "message", "dataset"),
    [
        ({"x": "scans/*/*"}, ConfigError, r"fields\.x: 'scans/\*/\*' needs one \*", None),
        ({"x": "none/*"}, MissingError, "has no group 'none'", "none"),
        ({"x": "scans/d*"}, MissingError, r"'scans/d\*' matches no dataset", None),
        ({"x": "targets/*", "y": "scans/*"}, MissingError, "has no dataset 'scans/c0'", "scans/c0"),
        ({"x": "deep/*"}, FormatError, "deep/c0: is a group, not a dataset", "deep/c0"),
        ({"x": "scans/*"}, FormatError, r"c0.npy: holds int64 \(0, 2\), but scans/about", "scans/c0.npy"),
        ({"x": Field("targets/*", decode="image")}, FormatError, "targets/c0: does not hold one image", "targets/c0"),
        ({"x": "null/*"}, FormatError, "null/1: holds int64 None, but null/0", "null/1"),
    ],
)
def test_a_dataset_that_is_no_sample_is_named(fields, error, message, dataset, tmp_path):
    write_datasets(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "a") as file:
        for number, null in enumerate([[1, 2], *[h5py.Empty("i8")] * 2]):  # the first is odd
            file[f"null/{number}"] = null
    with pytest.raises(error, match=message) as raised:
        of_datasets(tmp_path / "x.h5", fields)
    assert raised.value.dataset == dataset
    with pytest.raises(ConfigError, match="group: does not go with sample='dataset'"):
        of_datasets(tmp_path / "x.h5", fields, group="scans")
    refused(MissingError, ["sample='dataset'"], tmp_path / "x.h5", ["targets/*"])


PATCH = {"patch": (6, 7, 8)}


def mask_of(volume):
    mask = (volume > 90).astype("u1")
    mask[5, 6, 4] = 2
    return mask


def write_volumes(folder, count=2):
    """Files with ct/s1, ct/s2, ct/s10, a mask of each, a second sequence and a cloud of points."""
    found = []
    for number in range(count):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.attrs["site"], file.create_group("ct").attrs["scanner"] = number, [1, 2]
            for scan in (1, 2, 10):
                volume = np.random.default_rng(10 * number + scan).integers(0, 99, (10 + scan, 12, 9)).astype("i2")
                found.append((f"{number}.h5", f"s{scan}", volume))
                file.create_dataset(f"ct/s{scan}", data=volume, chunks=(4, 5, 6), compression="gzip")
                file[f"ct/s{scan}"].attrs["spacing"] = [1.0, 1.0, scan]
                file[f"mask/s{scan}"], file[f"mr/s{scan}"] = mask_of(volume), volume[::-1]
                cloud = np.arange(3 * (500 + scan)).reshape(-1, 3)
                file.create_dataset(f"cloud/s{scan}", data=cloud, chunks=(64, 3), compression="gzip")
    return str(folder / "*.h5"), found


def test_datasets_of_a_group_are_volumes(tmp_path):
    path, volumes = write_volumes(tmp_path)
    fields = {"x": Field("/ct/*", **PATCH), "y": Field("mask/*", **PATCH), "both": Field(["ct/*", "mr/*"], **PATCH)}
    fields |= {"spacing": Field(attr="spacing"), "site": Field("/", attr="site")}
    fields["scanner"] = Field("ct", attr="scanner")
    options = {"sample": "dataset", "patches_per_volume": 20, "foreground": {"y": {2: 0.5}}}
    source = pickle.loads(pickle.dumps(HDF5Source(path, fields, **options)))
    assert [part.name for part in source.parts] == [f"{file}:/ct/{name}" for file, name, _ in volumes]
    assert [run.rows for run in source.chunks.runs] == [20] * 6
    middles = []
    with AsyncLoader(source, {"batch_size": 7, "shuffle": True, "return_indices": True}) as loader:
        for batch in loader:
            keys = ("x", "y", "both", "x_origin", "spacing", "site", "scanner", "index")
            for x, y, both, origin, spacing, site, scanner, sample in zip(*(batch[key].numpy() for key in keys)):
                file, name, volume = volumes[sample // 20]
                box = tuple(slice(first, first + n) for first, n in zip(origin, PATCH["patch"]))
                np.testing.assert_array_equal(x, volume[box])
                np.testing.assert_array_equal(y, mask_of(volume)[box])
                np.testing.assert_array_equal(both, [volume[box], volume[::-1][box]])
                assert (f"{site}.h5", f"s{spacing[2]:.0f}", [*scanner]) == (file, name, [1, 2])
                middles.append(y[3, 3, 4] == 2)
    assert 0.35 < np.mean(middles) < 0.65
    assert source.locate([59])[0][1:] == ("/ct/s10", 19)
    side = split(source, {"a": 0.5, "b": 0.5}, groups="group")["a"]
    assert len({place[:2] for place in side.locate(side.ids(np.arange(len(side))))}) == 3


def test_predicted_datasets_are_merged_under_their_names(tmp_path):
    path, volumes = write_volumes(tmp_path)
    grid = HDF5Source(path, {"x": Field("ct/*", **PATCH, stride=(3, 5, 1))}, sample="dataset")
    merge_patches(np.stack([grid[sample]["x"] for sample in range(len(grid))]), grid, tmp_path / "merged.h5")
    with h5py.File(tmp_path / "merged.h5") as file:
        for name, scan, volume in volumes:
            np.testing.assert_array_equal(file[f"{name}/ct/{scan}"], volume)


def test_datasets_of_a_group_are_clouds_whose_chunks_count_once(tmp_path):
    path, volumes = write_volumes(tmp_path, 1)
    cloud = HDF5Source(path, {"x": Field("cloud/*", points=100)}, sample="dataset", patches_per_volume=1)
    with AsyncLoader(cloud, {"batch_size": 4, "shuffle": True}) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch["x"][..., 0] // 3, batch["x_points"])
    for number, (_, name, _) in enumerate(volumes):
        with h5py.File(tmp_path / "0.h5") as file, h5py.File(tmp_path / f"apart_{number}.h5", "w") as apart:
            file.copy(f"cloud/{name}", apart, "cloud")
    apart = HDF5Source(str(tmp_path / "apart_*.h5"), {"x": Field("cloud", points=100)}, patches_per_volume=1)
    assert [cloud.memory(chunks) for chunks in (1, 2, 3)] == [apart.memory(chunks) for chunks in (1, 2, 3)]


CT, POINTS = Field("ct/*", **PATCH), Field("cloud/*", points=9)


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({"x": Field("ct/s1", **PATCH)}, {}, ConfigError, r"fields.x: 'ct/s1' needs one \*"),
        ({"x": Field(["ct/*", "mr"], **PATCH)}, {}, ConfigError, r"fields.x: 'mr' needs one \*"),
        ({"y": Field("ct", attr="scanner"), "x": CT}, {}, ConfigError, r"fields.y: 'ct' needs one"),
        ({"x": Field("ct/z*", **PATCH)}, {}, MissingError, r"0.h5: 'ct/z\*' matches no dataset; check the name"),
        ({"x": CT, "y": Field("pet/*", **PATCH)}, {}, MissingError, "has no dataset 'pet/s1'"),
        ({"x": Field("*", **PATCH)}, {}, FormatError, "0.h5:/cloud: is a group"),
        ({"x": CT}, {"sample": "group"}, ConfigError, "^sample: is for rows, .* patches of volumes"),
        ({"x": POINTS}, {"stride": 2}, ConfigError, "^stride: is for rows, .* are points of clouds"),
        ({"x": CT, "a": Field(attr="age")}, {}, MissingError, "ct/s1: its attribute 'age' is missing"),
    ],
)
def test_a_fault_of_datasets_as_volumes_is_named(tmp_path, fields, options, error, message):
    path, _ = write_volumes(tmp_path, 1)
    with pytest.raises(error, match=message):
        HDF5Source(path, fields, **{"sample": "dataset"} | options)
