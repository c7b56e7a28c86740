"""What a dataset holds: found by any name and link, and refused where it is damaged or can be no field."""

import struct
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5t
from support.files.damage import patch
from support.files.hdf5 import create, numbered
from support.sources.oracle import check, read, read_from, refused

from lit_async_data import AsyncDataError, CorruptError, Field, FormatError, HDF5Source, MissingError


def damaged(path, name):
    """One byte of the object's header is changed, which has a checksum."""
    with h5py.File(path) as file:
        at = h5py.h5o.get_info(file[name].id).addr + 10
    patch(path, at, "B", Path(path).read_bytes()[at] ^ 255)


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


@pytest.mark.parametrize("name", ["bad", "link", "group/x"])
def test_a_damaged_dataset_is_called_damaged_and_not_missing(broken, name):
    said = [f"{broken}:/{name.strip('/')}", " cannot be ", "checksum"]
    error = refused(CorruptError, said, broken, ["data", name])
    assert (error.file, error.dataset) == (broken, name)
    refused(CorruptError, [f"rows: {broken}:/bad: ", "damaged"], broken, ["data"], rows="bad")


def test_values_behind_the_end_of_the_file_are_damage(h5):
    path = h5(data=np.arange(64, dtype="i4"))
    with h5py.File(path) as file:
        offset = file["data"].id.get_offset()
    content = Path(path).read_bytes()
    patch(path, content.index(struct.pack("<QQ", offset, 256)), "<Q", len(content) - 16)
    refused(CorruptError, [f"{path}:/data", "cannot be opened: ", "corruption"], path, ["data"])


def test_types_that_numpy_lacks_are_named(new, path):
    with new() as file:
        create(file, "time", (4,), h5py.h5t.UNIX_D32LE)
    error = refused(FormatError, [f"{path}:/time: holds values of a type that numpy lacks"], path, ["time"])
    assert (error.file, error.dataset) == (path, "time")


@pytest.mark.parametrize(("name", "shown"), [(b"d\xe9", r"d\xe9"), (b"d\x1b[31m", r"d\x1b[31m")])
def test_names_that_cannot_be_printed_can_be_listed(h5, name, shown):
    path = h5(data=np.ones(4))
    with h5py.File(path, "r+") as file:
        file.id.link(b"data", name, h5py.h5g.LINK_HARD)
    refused(MissingError, ["has no dataset 'other'; the file holds: ", shown], path, ["other"])


@pytest.mark.parametrize("version", [1, 5])
def test_a_netcdf_3_file_is_refused_with_the_command_that_converts_it(tmp_path, version):
    path = tmp_path / "t2m.nc"
    path.write_bytes(b"CDF" + bytes([version]) + bytes(2000))
    refused(FormatError, [str(path), "nccopy"], str(path), ["t2m"])


def odd_types():
    twelve = h5t.STD_U16BE.copy()
    twelve.set_precision(12)
    twelve.set_offset(3)
    reversed_order = h5t.STD_I16LE.copy()
    reversed_order.set_order(h5t.ORDER_BE)
    return {"12 bits": (twelve, 2**12, "u2"), "turned round": (reversed_order, 2**15, "i2")}


@pytest.mark.parametrize("name", odd_types())
@pytest.mark.parametrize("storage", [{}, *({"chunks": (4, 2), "filters": each} for each in ([], ["gzip"], ["nbit"]))])
def test_numbers_with_unusual_bits_are_read_as_h5py_does(new, path, name, storage):
    kind, limit, dtype = odd_types()[name]
    values = (numbered((10, 3)) * 977 % limit).astype(dtype)
    with new() as file:
        dataset = create(file, "data", values.shape, kind, **storage)
        try:
            dataset[...] = values
        except (TypeError, OSError) as error:
            pytest.skip(f"h5py itself cannot write it: {error}")
    check(path, {"x": "data"})


NAMES = ["data", "a/b/c", "größe/Zähler", "with space/and more", "日本/図", "*[?]", "N.C", " ", "a\nb", "é" * 60]


@pytest.mark.parametrize("track_order", [False, True])
def test_names_of_any_letters_are_found(new, path, track_order):
    with new(track_order=track_order) as file:
        for number, name in enumerate(NAMES):
            file.create_dataset(name, data=numbered((9, 3)) + number, chunks=(4, 2), track_order=track_order)
            file[name].attrs.update({f"note {number}": np.arange(number) for number in range(20)})
    for name in NAMES:
        for each in (name, "/" + name):
            check(path, {"x": each}, reading="decoded")


def test_links_inside_the_file_lead_to_the_dataset(new, path):
    with new() as file:
        file["deep/down/data"] = numbered((9, 3))
        file["hard"] = file["deep/down/data"]
        file["soft"] = h5py.SoftLink("/deep/down/data")
        file["soft group"] = h5py.SoftLink("deep/down")
        file["soft to soft"] = h5py.SoftLink("soft group/data")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file["round"] = h5py.SoftLink("/round")
        file["hard group"] = file["deep"]
        file["deep/again"] = file["deep"]
    names = ["hard", "soft", "soft group/data", "soft to soft", "hard group/down/data"]
    for name in [*names, "deep/again/again/down/data", "./deep/./down/data", "deep//down/data"]:
        check(path, {"x": name}, reading="copied")
    refused(MissingError, [f"{path}:/dangling: is a broken link to /nowhere"], path, {"x": "dangling"})
    refused(AsyncDataError, [path], path, {"x": "round"})


def test_members_with_unusual_bits_are_refused(tmp_path):
    """h5py converts such numbers; records are copied as bytes."""
    kind = h5t.create(h5t.COMPOUND, 4)
    kind.insert(b"plain", 0, h5t.STD_U16LE)
    kind.insert(b"bits", 2, odd_types()["12 bits"][0])
    with h5py.File(tmp_path / "x.h5", "w") as file:
        create(file, "x", (5,), kind)
    check(str(tmp_path / "x.h5"), {"x": "x.plain"})
    refused(FormatError, ["x.bits", "unusual bits", "store it as >u2"], str(tmp_path / "x.h5"), {"x": "x.bits"})


def test_a_short_chunk_of_a_dataset_that_is_read_whole_is_damage(h5):
    """Rows are chosen when the source is built, by h5py: it would take memory that was never written."""
    path = h5(data=np.arange(20), kept={"data": np.arange(10), "chunks": (5,), "compression": "gzip"})
    assert len(HDF5Source(path, ["data"], rows="kept")) == 10
    with h5py.File(path, "a") as file:
        file["kept"].id.write_direct_chunk((5,), zlib.compress(np.arange(5, 6).tobytes()))
    with pytest.raises(CorruptError, match=r"^rows: .*x.h5:/kept, chunk \(5,\): 8 bytes instead of 40"):
        HDF5Source(path, ["data"], rows="kept")


@pytest.mark.parametrize("size", [(0, 0), (0, 7), (5, 0)])
def test_an_empty_array_of_matlab_has_no_values_but_its_size(tmp_path, size):
    """MATLAB writes the size of an array in place of the values that it lacks."""
    for number, values in ((1, np.array(size, "u8")), (2, np.ones((7, 5)))):
        with h5py.File(tmp_path / f"{number}.mat", "w") as file:
            file["n"], file["x"] = np.arange(3.0), values
            file["x"].attrs["MATLAB_empty"] = np.uint8(number == 1)
    one, both = str(tmp_path / "1.mat"), str(tmp_path / "*.mat")
    fields, layout = {"x": "x"}, {"x": "NC" if size != (0, 7) else "CN"}
    refused(FormatError, [f"{one}:/x: has shape {size[::-1]}, so it holds no samples"], one, fields, layout=layout)
    assert len(HDF5Source(both, fields, layout=layout)) == (7 if layout["x"] == "NC" else 5)
    for field, rows in ((Field("n"), "x"), (Field("n", lookup="x"), None), (Field("n", ends="x"), None)):
        refused(FormatError, [f"{one}:/x: "], one, {"y": field}, rows=rows)


@pytest.mark.parametrize(("kind", "to"), [(np.longdouble, "float64"), (np.clongdouble, "complex128")])
@pytest.mark.parametrize("options", [{}, {"chunks": (2,), "compression": "gzip"}])
def test_long_doubles_are_cast_if_the_user_says_to_what(h5, kind, to, options):
    values = np.array([0.1, 2.5, -3, 1], kind)
    path = h5(x={"data": values, **options}, large=np.array([1, np.finfo(np.longdouble).max], kind))
    refused(FormatError, [f"{path}:/x: holds ", f"store it as another type, or give dtype='{to}'"], path, {"x": "x"})
    source = HDF5Source(path, {"x": Field("x", dtype=to), "w": Field("x", dtype=to, window=(0, 2), pad="last")})
    assert read(source, range(4))["x"].tolist() == values.astype(to).tolist()
    assert read(source, [3])["w"].tolist() == [[1, 1]]
    with pytest.raises(FormatError, match=f"large, row 1: .* is beyond the range of {to}"):
        HDF5Source(path, {"x": Field("large", dtype=to)})[1]


def test_long_doubles_of_any_form_are_cast(h5):
    values, cast = np.array([0.1, 2.5, -3], np.longdouble), {"dtype": "float64"}
    path = h5(v=values, n=[2, 1], **{"s0/a": values[:2], "s1/a": values[2:], "s0/b": values, "s1/b": values})
    with h5py.File(path, "a") as file:
        file["s0"].attrs["y"] = file["s1"].attrs["y"] = values[0]
    wanted = [[0.1, 2.5], [-3, 0]]
    assert read_from(path, {"x": Field("v", lengths="n", **cast)})["x"].tolist() == wanted
    named = {"x": Field("a", **cast), "z": Field("b", **cast), "y": Field(attr="y", **cast)}
    groups = read_from(path, named, group="s*", sample="group")
    assert (groups["x"].tolist(), groups["y"].tolist()) == (wanted, [0.1] * 2)
    assert groups["z"].tolist() == [[0.1, 2.5, -3]] * 2


@pytest.mark.parametrize("group", ["train", "/train/"])
def test_a_group_stands_before_the_names_of_fields_and_of_indices(h5, group):
    inside = {"x": numbered((3, 2)), "deep/y": np.arange(3), "who": [1, 0, 1], "age": [5, 6]}
    outside = {"x": numbered((9,)), "y": np.arange(50, 53), "who": [0, 0], "age": [7, 8]}
    path = h5(**outside, **{f"train/{name}": values for name, values in inside.items()})
    lookups = {"here": ("age", "who"), "root": ("/age", "who"), "far": ("/age", "/train/who")}
    fields = {key: Field(name, lookup=index) for key, (name, index) in lookups.items()}
    model = check(path, {"x": "x", "y": "deep/y", "other": "/y", **fields}, group=group)
    wanted = {"y": [0, 1, 2], "other": [50, 51, 52], "here": [6, 5, 6], "root": [8, 7, 8], "far": [8, 7, 8]}
    assert {key: model.values[key].tolist() for key in wanted} == wanted
    assert model.parts == [(path, "/train", 3)]
