"""What a dataset holds: found by any name and link, and refused where it is damaged or can be no field."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.hdf5 import create

from lit_async_data import HDF5Source
from lit_async_data.errors import CorruptError, FormatError, MissingError


def damaged(path, name):
    """One byte of the object's header is changed, which has a checksum."""
    with h5py.File(path) as file:
        at = h5py.h5o.get_info(file[name].id).addr
    with open(path, "r+b") as file:
        file.seek(at + 10)
        byte = file.read(1)[0]
        file.seek(at + 10)
        file.write(bytes([byte ^ 255]))


@pytest.fixture
def broken(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        file["data"] = np.ones((8, 4))
        file["bad"] = np.ones(8)
        file["link"] = h5py.SoftLink("/bad")
        file["group/x"] = np.ones(8)
    damaged(path, "bad")
    damaged(path, "group")
    return path


@pytest.mark.parametrize("name", ["bad", "/bad", "link", "group", "group/x"])
def test_a_damaged_dataset_is_called_damaged_and_not_missing(broken, name):
    with pytest.raises(CorruptError, match=rf"{broken}:/{name.strip('/')}.* cannot be .*checksum") as caught:
        HDF5Source(broken, ["data", name])
    assert (caught.value.file, caught.value.dataset) == (broken, name)


def test_damage_beside_the_fields_is_named_too(broken):
    with pytest.raises(CorruptError, match=rf"rows: {broken}:/bad: .*damaged"):
        HDF5Source(broken, ["data"], rows="bad")
    source = HDF5Source(broken, ["data"])
    with pytest.raises(CorruptError, match=rf"{broken}:/bad: .*damaged"):
        source.column("bad")
    source.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "cannot be opened: .*corruption"), ({"chunks": (8,)}, "behind the {} bytes of the file; was it truncated")],
    ids=["one piece", "chunks"],
)
def test_values_behind_the_end_of_the_file_are_damage(h5, options, said):
    path = h5(data={"data": np.arange(64, dtype="i4"), **options})
    with h5py.File(path) as file:
        stored = file["data"].id
        offset = stored.get_chunk_info(3).byte_offset if options else stored.get_offset()
    content = bytearray(Path(path).read_bytes())
    # The size of contiguous values follows their address.
    at = content.index(offset.to_bytes(8, "little") + (b"" if options else (256).to_bytes(8, "little")))
    content[at : at + 8] = (len(content) - 16).to_bytes(8, "little")
    Path(path).write_bytes(content)
    with pytest.raises(CorruptError, match=f"{path}:/data.*{said.format(len(content))}"):
        HDF5Source(path, ["data"])


def test_types_that_numpy_lacks_are_named(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["data"] = np.ones(4)
        quad = h5py.h5t.IEEE_F64LE.copy()
        quad.set_size(16)
        quad.set_precision(128)
        quad.set_fields(127, 112, 15, 0, 112)
        quad.set_ebias(16383)
        create(file, "quad", (4,), quad)
        create(file, "time", (4,), h5py.h5t.UNIX_D32LE)
    for name in ("quad", "time"):
        with pytest.raises(FormatError, match=rf"{path}:/{name}: holds values of a type that numpy lacks") as caught:
            HDF5Source(path, ["data", name])
        assert (caught.value.file, caught.value.dataset) == (path, name)


@pytest.mark.parametrize(("name", "shown"), [(b"d\xe9", r"d\\xe9"), (b"d\x1b[31m", r"d\\x1b\[31m")])
def test_names_that_cannot_be_printed_can_be_listed(h5, name, shown):
    path = h5(data=np.ones(4))
    with h5py.File(path, "r+") as file:
        file.id.link(b"data", name, h5py.h5g.LINK_HARD)
    with pytest.raises(MissingError, match=rf"has no dataset 'other'; the file holds: .*{shown}"):
        HDF5Source(path, ["other"])
