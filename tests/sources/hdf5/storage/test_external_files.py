"""Datasets with values in other files: refused, or, where they are allowed, right or an error."""

import os
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest
from support.sources.oracle import read, read_from, refused

from lit_async_data import AsyncLoader, ChangedError, CorruptError, FormatError, HDF5Source, MissingError
from lit_async_data.reading import open_reader
from lit_async_data.tools.inspect import hdf5_report

VALUES = np.arange(12 * 5, dtype="f4").reshape(12, 5)


def linked(folder):
    with h5py.File(folder / "other.h5", "w") as file:
        file.create_dataset("there", data=VALUES, chunks=(4, 5), compression="gzip")
    with h5py.File(folder / "x.h5", "w") as file:
        file["data"] = h5py.ExternalLink("other.h5", "/there")


def virtual(folder):
    layout = h5py.VirtualLayout((12, 5), "f4")
    for part, begin in (("other.h5", 0), ("more.h5", 6)):
        with h5py.File(folder / part, "w") as file:
            file["there"] = VALUES[begin : begin + 6]
        layout[begin : begin + 6] = h5py.VirtualSource(part, "there", (6, 5))
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_virtual_dataset("data", layout)


def outside(folder):
    VALUES.tofile(folder / "other.h5")
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("data", VALUES.shape, "f4", external=[("other.h5", 0, VALUES.nbytes)])


KINDS = pytest.mark.parametrize("kind", [linked, virtual, outside])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@KINDS
def test_external_files_are_refused_and_the_error_says_how_to_allow_them(here, kind):
    kind(here)
    error = refused(FormatError, ["or allow it with allow_external=True"], "x.h5", ["data"])
    assert error.dataset in ("data", "/data", "/there")
    assert (kind is virtual) == ("made of as path, write its values to a dataset of their own" in str(error))


@pytest.mark.parametrize("name", ["data", "soft", "soft folder/data"])
def test_a_link_into_a_pipe_is_refused_before_anybody_opens_it(here, h5, name):
    os.mkfifo(here / "pipe.h5")
    far, whole = h5py.ExternalLink("pipe.h5", "/data"), h5py.ExternalLink("pipe.h5", "/")
    soft = {"soft": h5py.SoftLink("data"), "soft folder": h5py.SoftLink("/folder")}
    h5("x.h5", **{"data": far, "folder": whole, **soft})
    said = [f"x.h5:/{name}: is a link into another file, ", "pipe.h5; give that file as path"]
    refused(FormatError, said, "x.h5", [name])
    refused(FormatError, ["x.h5:/folder/*: is a link into another file"], "x.h5", [name], group="folder/*")
    assert "link into another file" in str(hdf5_report(["x.h5"]))


def test_a_link_into_the_same_file_is_no_external_one(here, h5):
    h5("x.h5", data=VALUES, again=h5py.ExternalLink("x.h5", "/data"))
    os.symlink("x.h5", "y.h5")
    for path in ("x.h5", "y.h5"):
        source = HDF5Source(path, ["again"])
        assert (source.chunks.reading, read(source, [3])["again"].tolist()) == ("copied", [VALUES[3].tolist()])


@KINDS
@pytest.mark.parametrize("memory_map", [True, False])
def test_allowed_external_files_are_read_right(here, kind, memory_map):
    kind(here)
    source = HDF5Source("x.h5", ["data"], allow_external=True, memory_map=memory_map)
    assert source.chunks.reading == "locked"
    with AsyncLoader(source, {"batch_size": 5, "shuffle": "none", "workers": 2}) as loader:
        assert np.concatenate([batch for (batch,) in loader]).tolist() == VALUES.tolist()
    assert (read(source, [11, 0, 6, 5, 5])["data"] == VALUES[[11, 0, 6, 5, 5]]).all()


@KINDS
def test_a_missing_external_file_is_an_error_when_the_source_is_built(here, kind):
    kind(here)
    (here / "other.h5").unlink()
    refused(MissingError, ["other.h5"], "x.h5", ["data"], allow_external=True)


def test_a_file_that_is_missing_two_links_further_is_an_error(here, h5):
    h5("c.h5", there=VALUES)
    for name, other in (("b.h5", "c.h5"), ("a.h5", "b.h5")):
        layout = h5py.VirtualLayout((12, 5), "f4")
        layout[:] = h5py.VirtualSource(other, "there", (12, 5))
        with h5py.File(here / name, "w") as file:
            file.create_virtual_dataset("there", layout)
    HDF5Source("a.h5", ["there"], allow_external=True).close()
    (here / "c.h5").unlink()
    refused(MissingError, ["takes values from c.h5, which is not in"], "a.h5", ["there"], allow_external=True)


@pytest.mark.parametrize(
    ("taken", "error", "said"),
    [("gone", MissingError, "x.h5:/gone, which cannot be opened"), ("/data", FormatError, "takes values from itself")],
)
def test_a_virtual_dataset_must_not_refer_to_itself_or_to_a_missing_dataset(here, taken, error, said):
    layout = h5py.VirtualLayout((12, 5), "f4")
    layout[:] = h5py.VirtualSource(".", taken, (12, 5))
    with h5py.File(here / "x.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    refused(error, [said], "x.h5", ["data"], allow_external=True)


@KINDS
def test_a_changed_external_file_is_an_error_when_it_is_read(here, kind):
    kind(here)
    source = HDF5Source("x.h5", ["data"], allow_external=True)
    with open(here / "other.h5", "ab") as file:
        file.write(b"more")
    with pytest.raises(ChangedError, match=r"other.h5: grew from"):
        read(source, [0])
    (here / "other.h5").unlink()
    with pytest.raises(MissingError, match=r"other\.h5: cannot be opened .*x.h5 takes values from it"):
        read(source, [0])


def test_files_named_by_a_pattern_are_refused(here):
    space = h5py.h5s.create_simple((2, 5), (h5py.h5s.UNLIMITED, 5))
    space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (1, 1), (1, 5))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_virtual(space, b"part%b.h5", b"there", h5py.h5s.create_simple((1, 5)))
    with h5py.File(here / "x.h5", "w", libver="latest") as file:
        h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_FLOAT, space, dcpl=properties)
    with pytest.raises(FormatError, match=r"by a pattern, part%b.h5|there are no samples"):
        HDF5Source("x.h5", ["data"], allow_external=True)


def raw(sizes, segments):
    """Raw files of these sizes, and a dataset that takes its values from segments of them."""
    for name, size in sizes.items():
        with open(name, "wb") as file:
            file.write(VALUES.tobytes()[:size])
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("data", VALUES.shape, "f4", external=segments)


@pytest.mark.parametrize(
    ("sizes", "segments", "named"),
    [
        ({"a.raw": 239}, [("a.raw", 0, 240)], (0, 240, "a.raw", 239)),
        ({"a.raw": 240}, [("a.raw", 20, h5py.h5f.UNLIMITED)], (20, 260, "a.raw", 240)),
        ({"a.raw": 100, "b.raw": 139}, [("a.raw", 0, 100), ("b.raw", 0, 200)], (0, 140, "b.raw", 139)),
    ],
)
def test_a_raw_file_that_is_too_short_is_an_error_and_the_advice_makes_it_long_enough(here, sizes, segments, named):
    raw(sizes, segments)
    begin, end, name, there = named
    said = rf"x\.h5:/data: takes bytes {begin} to {end} of {here}/{name}, which has {there}, .*truncate -s {end} {here}"
    with pytest.raises(CorruptError, match=said):
        HDF5Source("x.h5", ["data"], allow_external=True)
    with open_reader("x.h5", allow_external=True) as reader, pytest.raises(CorruptError, match=said):
        reader.read("data")
    os.truncate(name, end)
    HDF5Source("x.h5", ["data"], allow_external=True).close()


def test_a_raw_file_may_be_longer_and_what_is_not_needed_may_be_missing_at_its_end(here):
    raw({"a.raw": 240, "b.raw": 0}, [("a.raw", 0, 240), ("b.raw", 0, 100)])
    assert (read_from("x.h5", ["data"], allow_external=True)["data"] == VALUES).all()


@pytest.mark.parametrize(("kind", "variable"), [(outside, "HDF5_EXTFILE_PREFIX"), (virtual, "HDF5_VDS_PREFIX")])
def test_the_files_that_are_checked_are_those_that_libhdf5_reads(here, monkeypatch, kind, variable):
    (here / "far").mkdir()
    with monkeypatch.context() as there:
        there.chdir(here / "far")
        kind(here / "far")
        (here / "far/other.h5").write_bytes((here / "far/other.h5").read_bytes()[:-1])
    kind(here)
    monkeypatch.setenv(variable, "${ORIGIN}/far")  # libhdf5 asks once in a process
    program = "from lit_async_data import HDF5Source; HDF5Source('x.h5', ['data'], allow_external=True)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.search(rf"Error: .*x\.h5:/data: takes .* {here}/+far/other\.h5", found.stderr)


@pytest.mark.parametrize(("rows", "right"), [((4, 4), True), ((4, 3), True), ((4, 2), False), ((3, 5), False)])
def test_sources_that_grow_must_have_grown_alike(here, h5, rows, right):
    space = h5py.h5s.create_simple((8, 5), (h5py.h5s.UNLIMITED, 5))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    for number, count in enumerate(rows):  # even rows from one, odd ones from the other
        h5(f"{number}.h5", there={"data": VALUES[:count], "maxshape": (None, 5)})
        there = h5py.h5s.create_simple((count, 5), (h5py.h5s.UNLIMITED, 5))
        space.select_hyperslab((number, 0), (h5py.h5s.UNLIMITED, 1), (2, 1), (1, 5))
        there.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (1, 1), (1, 5))
        properties.set_virtual(space, f"{number}.h5".encode(), b"there", there)
    with h5py.File("x.h5", "w", libver="latest") as file:
        h5py.h5d.create(file.id, b"data", h5py.h5t.IEEE_F32LE, space, dcpl=properties)
    if right:
        found = read_from("x.h5", ["data"], allow_external=True)["data"]
        assert (found[::2] == VALUES[: rows[0]]).all()
        assert (found[1::2] == VALUES[: rows[1]]).all()
    else:
        with pytest.raises(CorruptError, match=r"takes values from .*\.h5:/there that its shape"):
            HDF5Source("x.h5", ["data"], allow_external=True)


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 5)}])
@pytest.mark.parametrize(
    ("which", "now", "right"),
    [
        (slice(1, 6), (4, 5), False),
        (slice(1, 6), (9, 5), True),
        (None, (5, 5), False),
        (None, (6, 6), False),
        (None, (9, 5), True),
    ],
    ids=str,
)
def test_a_source_of_a_virtual_dataset_must_have_its_rows_and_no_other_columns(here, h5, which, now, right, options):  # noqa: PLR0917
    whole, wanted = h5py.VirtualSource("other.h5", "there", (6, 5)), VALUES[:6][which or slice(None)]
    layout = h5py.VirtualLayout(wanted.shape, "f4")
    layout[:] = whole[which] if which else whole
    with h5py.File("x.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    h5("other.h5", there={"data": np.resize(VALUES, now), **options}, behind=np.full(500, 99, "f4"))
    if right:
        assert (read_from("x.h5", ["data"], allow_external=True)["data"] == wanted).all()
    else:
        said = ["takes values from ", f"r.h5:/there that its shape {now} does not have, ", " write the virtual dataset"]
        refused(CorruptError, said, "x.h5", ["data"], allow_external=True)
