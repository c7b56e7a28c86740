"""Datasets with values in other files: refused, or, where they are allowed, right or an error."""

import os

import h5py
import numpy as np
import pytest
from support.sources.oracle import read, read_from

from lit_async_data import AsyncLoader, ChangedError, FormatError, HDF5Source, MissingError
from lit_async_data.tools.inspect.hdf5_files import hdf5_report

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
    with pytest.raises(FormatError, match=r"or allow it with allow_external=True") as caught:
        HDF5Source("x.h5", ["data"])
    assert caught.value.dataset in ("data", "/data", "/there")


@pytest.mark.parametrize("name", ["data", "group/data", "soft", "folder/data", "soft folder/data"])
def test_a_link_into_a_pipe_is_refused_before_anybody_opens_it(here, name):
    os.mkfifo(here / "pipe.h5")
    with h5py.File("x.h5", "w") as file:
        file["data"] = h5py.ExternalLink("pipe.h5", "/data")
        file["group/data"] = h5py.ExternalLink("pipe.h5", "/data")
        file["soft"], file["folder"] = h5py.SoftLink("data"), h5py.ExternalLink("pipe.h5", "/")
        file["soft folder"] = h5py.SoftLink("/folder")
    with pytest.raises(
        FormatError, match=rf"x\.h5:/{name}: is a link into another file, .*pipe\.h5; give that file as path"
    ):
        HDF5Source("x.h5", [name])
    with pytest.raises(FormatError, match=r"x\.h5:/folder/\*: is a link into another file"):
        HDF5Source("x.h5", [name], group="folder/*")
    assert "link into another file" in str(hdf5_report(["x.h5"]))


def test_a_link_into_the_same_file_is_no_external_one(here):
    with h5py.File("x.h5", "w") as file:
        file["data"], file["again"] = VALUES, h5py.ExternalLink("x.h5", "/data")
    assert (read_from("x.h5", ["again"])["again"] == VALUES).all()


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
    with pytest.raises(MissingError, match=r"other\.h5"):
        HDF5Source("x.h5", ["data"], allow_external=True)


def test_a_missing_dataset_in_an_external_file_is_an_error(here):
    virtual(here)
    with h5py.File(here / "other.h5", "r+") as file:
        del file["there"]
    with pytest.raises(MissingError, match=r"takes values from .*other.h5:/there, which cannot be opened"):
        HDF5Source("x.h5", ["data"], allow_external=True)


def test_a_file_that_is_missing_two_links_further_is_an_error(here):
    with h5py.File(here / "c.h5", "w") as file:
        file["there"] = VALUES
    for name, other in (("b.h5", "c.h5"), ("a.h5", "b.h5")):
        layout = h5py.VirtualLayout((12, 5), "f4")
        layout[:] = h5py.VirtualSource(other, "there", (12, 5))
        with h5py.File(here / name, "w") as file:
            file.create_virtual_dataset("there", layout)
    HDF5Source("a.h5", ["there"], allow_external=True).close()
    (here / "c.h5").unlink()
    with pytest.raises(MissingError, match=r"takes values from c\.h5, which is not in"):
        HDF5Source("a.h5", ["there"], allow_external=True)


@pytest.mark.parametrize(
    ("taken", "error", "said"),
    [
        ("gone", MissingError, r"x\.h5:/gone, which cannot be opened"),
        ("/data", FormatError, r"takes values from itself"),
    ],
)
def test_a_virtual_dataset_must_not_refer_to_itself_or_to_a_missing_dataset(here, taken, error, said):
    layout = h5py.VirtualLayout((12, 5), "f4")
    layout[:] = h5py.VirtualSource(".", taken, (12, 5))
    with h5py.File(here / "x.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
    with pytest.raises(error, match=said):
        HDF5Source("x.h5", ["data"], allow_external=True)


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
