"""``exclude``: which samples a list leaves out, wherever files lie now; and lists that do not fit."""

import csv
import json
import os

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.sources.oracle import read

from lit_async_data import AsyncLoader, HDF5Source, ManifestSource
from lit_async_data.errors import ConfigError, CorruptError, ResumeError
from lit_async_data.sources.local_files import COLUMNS, bad_sample


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hdf5(*paths, **options):
    for path in paths:
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with h5py.File(path, "w") as file:
                file["data"] = np.arange(20)
    return HDF5Source(list(paths), {"x": "data"}, **options)


def manifest(*, path="t.csv", **options):
    if not os.path.exists(path):
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([("x", "site"), *((number, "ab"[number // 10]) for number in range(20))])
    return ManifestSource(path, {"x": "x"}, **options)


def listed(source, samples, path="bad.csv"):
    lines = [bad_sample(source, sample, CorruptError("why,\n or not")) for sample in samples]
    with open(path, "w", newline="") as file:
        if path.endswith(".jsonl"):
            file.writelines(json.dumps(line) + "\n" for line in lines)
        else:
            csv.writer(file).writerows([COLUMNS, *(line.values() for line in lines)])
    return path


def values(source):
    return read(source, np.arange(len(source)))["x"].tolist()


@pytest.mark.parametrize("build", [lambda **options: hdf5("a.h5", **options), manifest])
@pytest.mark.parametrize("form", ["bad.csv", "bad.jsonl", "pattern", "numbers"])
def test_samples_on_a_list_are_left_out_and_a_resume_is_refused(build, form):
    whole, others = build(), build(exclude=[3, 9])
    for path, samples in {"bad.csv": [3, 17], "bad.jsonl": [3, 17], "rank0.jsonl": [3], "rank1.jsonl": [17]}.items():
        listed(whole, samples, path)
    source = build(exclude={"pattern": "rank*.jsonl", "numbers": np.array([3, 17])}.get(form, form))
    assert values(source) == [number for number in range(20) if number not in (3, 17)]
    assert source.fingerprint() != others.fingerprint()
    options = {"batch_size": 4, "shuffle": True}
    with AsyncLoader(whole, options) as loader, AsyncLoader(source, options) as resumed:
        next(loader)
        with pytest.raises(ResumeError, match=r"samples: 20 in the checkpoint, 18 now.*on_error"):
            resumed.load_state_dict(loader.state_dict())


def test_a_list_fits_a_file_that_has_moved_if_no_other_has_its_name():
    listed(hdf5("old/p1/a.h5", "old/p2/b.h5"), [1, 2, 25])
    assert len(hdf5("old/p1/a.h5", exclude="bad.csv")) == 18
    os.rename("old", "new")
    assert values(hdf5("new/p2/b.h5", exclude="bad.csv")) == [*range(5), *range(6, 20)]
    os.rename("new/p2/b.h5", "new/p2/a.h5")
    with pytest.raises(ConfigError, match=r"exclude: \S*old/p1/a.h5 does not exist, and several files have its name"):
        hdf5("new/p1/a.h5", "new/p2/a.h5", exclude="bad.csv")
    with pytest.raises(ConfigError, match="names no sample"):  # p1 is still there, and no other file
        hdf5("new/p2/a.h5", exclude=listed(hdf5("new/p1/a.h5"), [1]))
    listed(hdf5("old/p1/a.h5", "old/p2/a.h5"), [1, 25])
    os.rename("old", "older")
    with pytest.raises(ConfigError, match="several files have its name"):  # neither of the listed ones, for sure
        hdf5("new/p2/a.h5", exclude="bad.csv")


def test_rows_of_a_table_count_before_filters_and_dropped_rows():
    manifest(path="s.csv"), manifest()
    listed(ManifestSource("[st].csv", ["x"]), [2, 12, 34])
    source = ManifestSource("[st].csv", ["x"], filters=[["site", "==", "b"]], exclude="bad.csv")
    assert values(source) == [10, 11, *range(13, 20), *range(10, 14), *range(15, 20)]
    assert source.column("site").tolist() == ["b"] * 18


def test_classes_and_shapes_come_from_the_samples_that_stay():
    for number, size in enumerate((3, 5, 5)):
        Image.new("L", (size, size)).save(f"{number}.png")
    table = pa.table({"path": ["0.png", "1.png", "2.png"], "label": ["odd", "cat", "dog"], "id": ["a", "b", "c"]})
    source = ManifestSource(table, {"x": "path", "y": "label"}, id="id", exclude=[0], mode="L")
    assert (source.spec["x"].shape, source.spec["y"].classes) == ((1, 5, 5), ("cat", "dog"))
    assert [place.row for place in source.locate([0, 1])] == [1, 2]
    one, other = (ManifestSource(pa.table({"x": ["1.png"] * 3}), ["x"], exclude=[row]) for row in (0, 1))
    assert one.fingerprint() != other.fingerprint()  # though files and labels are the same


def test_a_folder_in_which_files_came_or_went_needs_a_new_list():
    os.makedirs("tree/cat")
    for name in "bdfh":
        Image.new("L", (4, 4)).save(f"tree/cat/{name}.png")
    listed(ManifestSource.from_folder("tree", mode="L"), [2])
    assert len(ManifestSource.from_folder("tree", mode="L", exclude="bad.csv")) == 3
    os.unlink("tree/cat/b.png")
    with pytest.raises(ConfigError, match=r"has no \S*f.png in row 2"):
        ManifestSource.from_folder("tree", mode="L", exclude="bad.csv")


@pytest.mark.parametrize("build", [lambda **options: hdf5("a.h5", **options), manifest])
@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ("gone.csv", "gone.csv cannot be read: No such file"),
        ("other.csv", "is no list of bad samples .*KeyError: 'file'"),
        ("cut.jsonl", "after 1 lines: JSONDecodeError"),
        ("elsewhere.csv", r"names no sample of .*, but of \S*b.h5"),
        ("beyond.csv", r"has no row 20 of \S+, row 21 of \S+, row 22 of \S+, … \(4 in all\)"),
        (list(range(20)), "leaves out all samples"),
        ([1, 20, -1], "has samples 0 to 19, not 20, -1"),
        (np.zeros(21, bool), r"array\(.*\.\.\..* is neither .*, nor a mask of 20"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(build, exclude, message):
    source = build()
    with open("other.csv", "w") as file:
        file.write("a,b\n1,2\n")
    line = json.dumps(bad_sample(source, 1, CorruptError("")))
    with open("cut.jsonl", "w") as file:
        file.write(f"{line}\n{line[:20]}")
    listed(hdf5("b.h5"), [1], "elsewhere.csv")
    with open(listed(source, [1], "beyond.csv"), "a", newline="") as file:
        place = source.locate([0])[0]
        csv.writer(file).writerows([["", place.file, place.group, row, "", "", ""] for row in range(20, 24)])
    with pytest.raises(ConfigError, match=f"exclude: .*{message}"):
        build(exclude=exclude)
