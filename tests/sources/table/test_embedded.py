"""Bytes of images in a column of a table: values, missing rows, order, memory, errors."""

import io
import json
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.files import pictures
from support.sources.oracle import read

from lit_async_data import AsyncLoader, ConcatSource, ManifestSource, SubsetSource, split
from lit_async_data.errors import ChangedError, ConfigError, FormatError, ManifestError, MissingError
from lit_async_data.sources.table import embedded
from lit_async_data.sources.table.embedded import ParquetGroups
from lit_async_data.testing import check_contract

COUNT, FIELDS = 40, {"x": "image", "y": "label"}
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(number, size=(12, 10)):
    return pictures.stored(Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)))


def stored(kind, files):
    if kind == "struct":
        return pa.array([{"bytes": file, "path": f"{number}.png"} for number, file in enumerate(files)], STRUCT)
    if kind == "extension":
        return pa.ExtensionArray.from_storage(pa.opaque(STRUCT, "image", "hf"), stored("struct", files))
    return pa.array(files, kind)


def table(kind="struct", files=None):
    files = [png(number) for number in range(COUNT)] if files is None else files
    count = len(files)
    columns = {"id": [f"{n:03}" for n in range(count)], "image": stored(kind, files), "label": np.arange(count) % 3}
    return pa.table(columns)


@pytest.fixture
def paths(tmp_path):
    """The same images as files, the reference."""
    (tmp_path / "files").mkdir()
    for number in range(COUNT):
        (tmp_path / f"files/{number}.png").write_bytes(png(number))
    names = [f"files/{number}.png" for number in range(COUNT)]
    return ManifestSource(pa.table({"image": names, "label": np.arange(COUNT) % 3}), FIELDS, root=tmp_path)


def hugging_face(**features):
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


@pytest.mark.parametrize("place", ["file", "memory", "stream"])
def test_the_layouts_of_hugging_face_train_as_they_are(place, tmp_path):
    records = [{"bytes": png(number), "path": None} for number in range(6)]
    layouts = {
        "image": pa.array(records, STRUCT),
        "images": pa.array([records[:2], records[:1], [], *[records[:3]] * 3], pa.list_(STRUCT)),
        "caption": pa.array(["an owl", "an auk"] * 3),
        "captions": pa.array([["an owl", "a bird"]] * 6),
        "label": pa.array([2, 0, 2, 2, -1, 0]),
    }
    label = {"names": ["owl", "emu", "auk"], "_type": "ClassLabel"}
    features = hugging_face(label=label, image={"_type": "Image"}, caption={"dtype": "string", "_type": "Value"})
    made = pa.table(layouts).replace_schema_metadata(features)
    stream = SimpleNamespace(__arrow_c_stream__=made.__arrow_c_stream__)  # a table of any library
    given = {"memory": made, "stream": stream}.get(place) or written(tmp_path, made, rows=2)
    texts = {"caption": {"name": "caption", "kind": "text"}, "captions": {"name": "captions", "kind": "text"}}
    fields = {"image": "image", "images": "images", **texts, "label": {"name": "label", "null": "ignore"}}
    source = ManifestSource(given, fields, filters=[["label", "!=", 1]], image_size=4)
    with AsyncLoader(source, {"batch_size": 6}) as loader:
        batch = next(loader)
    assert (source.spec["label"].classes, batch["label"].tolist()) == (("owl", "emu", "auk"), [2, 0, 2, 2, -100, 0])
    assert (batch["images"].shape, batch["images_mask"].sum(1).tolist()) == ((6, 3, 3, 4, 4), [2, 1, 0, 3, 3, 3])
    assert (batch["images"][:2, 0] == batch["image"][:1]).all()
    assert source.spec.names("captions", batch["captions"]).tolist() == layouts["captions"].to_pylist()
    check_contract(source)


@pytest.mark.parametrize(("names", "numbers"), [(["owl", "auk"], [1, -100, 0]), (["7", "5"], [5, -100, 7])], ids=str)
def test_the_numbers_of_a_class_label_can_be_read_as_numbers(names, numbers):
    feature = {"names": names, "_type": "ClassLabel"}
    made = pa.table({"y": [1, -1, 0]}).replace_schema_metadata(hugging_face(y=feature))
    source = ManifestSource(made, {"y": {"name": "y", "kind": "number", "null": "ignore"}})
    assert (source.spec["y"].classes, read(source, np.arange(3))["y"].tolist()) == ((), numbers)


def test_categories_without_an_order_have_no_numbers():
    made = pa.table({"y": pa.array(["owl", "auk"]).dictionary_encode()})
    with pytest.raises(ManifestError, match="row 0, column 'y': 'owl' is not a number"):
        ManifestSource(made, {"y": {"name": "y", "kind": "number"}})


@pytest.mark.parametrize(
    "names", [3, ["a", "b"], ["a", " a", "b", "c", "d", "e"], [*range(6)], [*"abcde", None]], ids=str
)
def test_metadata_that_does_not_fit_leaves_numbers_as_they_are(names):
    feature = {"names": names, "_type": "ClassLabel"}
    made = pa.table({"label": [0, 5]}).replace_schema_metadata(hugging_face(label=feature))
    assert read(ManifestSource(made, {"y": "label"}), [0, 1])["y"].tolist() == [0, 5]


NUMBERS, LISTS = ([0, 1], None), ([[0], [0, 1]], "class")  # labels, and the kind that is asked for


@pytest.mark.parametrize(
    ("names", "feature", "labels", "said"),
    [
        (["a", "b"], lambda one: one, NUMBERS, "its ordered categories have several orders"),
        (["a", " a"], lambda one: one, NUMBERS, "has ClassLabels whose names differ"),
        (["a", "b"], lambda one: {"_type": "List", "feature": [one]}, LISTS, "has ClassLabels whose names differ"),
    ],
)
def test_files_whose_classes_have_other_numbers_are_no_table(tmp_path, names, feature, labels, said):
    values, kind = labels
    for number, each in enumerate((names, names[::-1])):
        features = hugging_face(y=feature({"names": each, "_type": "ClassLabel"}))
        pq.write_table(pa.table({"y": values}).replace_schema_metadata(features), tmp_path / f"{number}.parquet")
    with pytest.raises(ManifestError, match=f"column 'y': {said}"):
        ManifestSource(tmp_path, {"y": {"name": "y", "kind": kind}})


def written(folder, made=None, rows=7):
    pq.write_table(table() if made is None else made, folder / "t.parquet", row_group_size=rows)
    return folder / "t.parquet"


def several(folder):
    for name, begin, count, rows in [("a", 0, 15, 4), ("b", 15, 20, 6), ("c", 35, 5, 50)]:
        pq.write_table(table().slice(begin, count), folder / f"{name}.parquet", row_group_size=rows)
    return folder / "*.parquet"


def assert_equal(source, reference, samples):
    order = np.random.default_rng(1).permutation(len(source))
    got, wanted = read(source, order), read(reference, np.asarray(samples)[order])
    for key in wanted:
        np.testing.assert_array_equal(got[key], wanted[key])


@pytest.mark.parametrize("kind", ["struct", "extension", pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("place", ["file", "memory"])
def test_every_type_of_bytes_has_the_values_of_files(kind, place, paths, tmp_path):
    given = table(kind)
    source = ManifestSource(given if place == "memory" else written(tmp_path, given), FIELDS, id="id")
    assert_equal(source, paths, np.arange(COUNT))
    assert source.locate([3])[0].id == "003"


def test_several_files_filters_exclude_and_subsets(paths, tmp_path):
    pattern = several(tmp_path)
    assert_equal(ManifestSource(pattern, FIELDS), paths, np.arange(COUNT))
    kept = [n for n in range(COUNT) if n % 3 != 1]
    some = ManifestSource(pattern, FIELDS, filters=[["label", "!=", 1]], exclude=[0, 5], id="id")
    kept = [n for place, n in enumerate(kept) if place not in (0, 5)]
    assert_equal(some, paths, kept)
    both = ConcatSource([some, ManifestSource(pattern, FIELDS)])
    assert_equal(both, paths, [*kept, *range(COUNT)])
    for side in split(some, {"train": 0.5, "val": 0.5}).values():
        assert_equal(side, paths, np.asarray(kept)[side.samples])
    check_contract(some)


def test_npy_bytes(tmp_path):
    files = []
    for number in range(5):
        stream = io.BytesIO()
        np.save(stream, np.full((2, 3), number, "f4"))
        files.append(stream.getvalue())
    source = ManifestSource(written(tmp_path, table(files=files)), FIELDS)
    assert read(source, np.array([3]))["x"].tolist() == [[[3.0] * 3] * 2]


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("place", ["file", "memory"])
def test_rows_without_bytes(statistics, place, paths, tmp_path):
    made = table(files=[None if n in (4, 9) else png(n) for n in range(COUNT)])
    pq.write_table(made, tmp_path / "t.parquet", row_group_size=7, write_statistics=statistics)
    given = made if place == "memory" else tmp_path / "t.parquet"
    rest, whole = [n for n in range(COUNT) if n not in (4, 9)], ManifestSource(given, FIELDS, id="id")
    said = r"id '004': column 'image': no bytes, only the path '4.png'.*or set null: drop"
    with pytest.raises(FormatError, match=said):
        read(whole, [4])
    assert_equal(SubsetSource(whole, rest), paths, rest)
    with AsyncLoader(whole, {"batch_size": 8, "on_error": "skip", "max_bad": 2}) as loader:
        assert sum(len(batch["x"]) for batch in loader) == COUNT - 2
        assert loader.state_dict()["bad_samples"] == [4, 9]
    fields = {"x": {"name": "image", "null": "drop"}, "y": "label"}
    assert_equal(ManifestSource(given, fields), paths, rest)


def test_a_row_without_a_list_of_bytes_is_a_bad_sample():
    lists = pa.array([[png(0), png(1)], None, [png(2), png(3)]], pa.list_(pa.binary()))
    source = ManifestSource(pa.table({"x": lists}), {"x": "x"})
    assert list(source.spec) == ["x"]  # all lists are as long
    assert read(source, [2, 0])["x"].shape == (2, 2, 3, 12, 10)
    said = r"row 1 .*: column 'x'\[0\]: no bytes; write them into it, or set null: drop"
    with pytest.raises(FormatError, match=said):
        read(source, [1])


@pytest.mark.parametrize("workers", [0, 2])
def test_chunk_shuffle_reads_each_group_once(workers, tmp_path, monkeypatch):
    source = ManifestSource(several(tmp_path), FIELDS)
    assert source.chunks.rows == 6
    loads, load = [], ParquetGroups.__call__
    monkeypatch.setattr(ParquetGroups, "__call__", lambda *a, **more: loads.append(a[1]) or load(*a, **more))
    with AsyncLoader(source, {"batch_size": 8, "shuffle": "chunk", "shuffle_chunks": 2, "workers": workers}) as it:
        assert sum(len(batch["y"]) for batch in it) == COUNT
    assert len(loads) == len(set(loads)) == 8  # the first of 9 stays from the check of the first image


@pytest.mark.processes
def test_workers_threads_and_processes_deliver_the_same_random_crops(tmp_path):
    source = ManifestSource(several(tmp_path), FIELDS, image_size=8, resize="random_crop")
    found = []
    for workers in ({"workers": 0}, {"workers": 2}, {"worker_kind": "process"}):
        with AsyncLoader(source, {"batch_size": 8, "seed": 3, "shuffle": "chunk", **workers}) as loader:
            found.append(np.concatenate([batch["x"].numpy() for batch in loader]))
    np.testing.assert_array_equal(found[1:], [found[0]] * 2)


@pytest.mark.parametrize("when", ["before", "while it is read"])
def test_a_file_that_is_rewritten_is_an_error(when, tmp_path, monkeypatch):
    path = written(tmp_path)
    source, real = ManifestSource(path, FIELDS), embedded.parquet_file
    time_ns = path.stat().st_mtime_ns + 10**9
    read(source, np.array([30]))
    source.close()  # nothing is held any longer

    def replaced(file, **options):
        parquet = real(file, **options)
        os.utime(path, ns=(time_ns, time_ns))
        return parquet

    if when == "before":
        os.utime(path, ns=(time_ns, time_ns))
    else:
        monkeypatch.setattr(embedded, "parquet_file", replaced)
    with pytest.raises(ChangedError, match=r"t.parquet: changed since the source was built"):
        read(source, np.array([30]))
    path.unlink()
    with pytest.raises(MissingError, match=r"t.parquet: cannot be opened"):
        read(source, np.array([30]))


def test_a_source_of_files_pickles_without_the_bytes(tmp_path):
    source = ManifestSource(written(tmp_path), FIELDS)
    pickled = pickle.dumps(source)
    assert len(pickled) < 8_000 < os.path.getsize(tmp_path / "t.parquet")
    assert_equal(pickle.loads(pickled), source, np.arange(COUNT))


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("kind", ["struct", pa.binary()], ids=str)
def test_repeated_images_take_memory_once(kind, lists, tmp_path):
    files = [png(number, (300, 300)) for number in range(5)]  # 270 kB each: a page of the dictionary holds four
    column = stored(kind, [files[number % 3 if number < 30 else number % 5] for number in range(40)])
    column = pa.FixedSizeListArray.from_arrays(column, 2) if lists else column
    source = ManifestSource(written(tmp_path, pa.table({"image": column}), rows=40), {"x": "image"})
    groups = source._fields.embedded[0].groups
    assert groups.array(0).nbytes <= source.memory(1).decoded < 20 * len(files[0]) < column.nbytes
    whole = ManifestSource(pa.table({"image": column}), {"x": "image"})
    assert_equal(source, whole, np.arange(len(whole)))


def test_other_bytes_say_what_they_are(tmp_path):
    with pytest.raises(ManifestError, match=r"column 'image'.*a WAV recording"):
        ManifestSource(written(tmp_path, table(files=[b"RIFF\0\0\0\0WAVEfmt"] * 3)), FIELDS)


def test_bytes_are_no_labels_nor_filters(tmp_path):
    with pytest.raises(ManifestError, match=r"column 'x': holds .*, which cannot be a label"):
        ManifestSource(pa.table({"x": [[[b""]]]}), ["x"])
    path = written(tmp_path)
    with pytest.raises(ConfigError, match=r"fields\.y\.kind: .*bytes of files"):
        ManifestSource(path, {"x": "image", "y": {"name": "image", "kind": "class"}})
    with pytest.raises(ConfigError, match=r"filters: .*filter by another column"):
        ManifestSource(path, FIELDS, filters=[["image", "==", "a"]])
