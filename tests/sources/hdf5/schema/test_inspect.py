"""What a dataset holds: found by any name and link, and refused where it is damaged or can be no field."""

import dataclasses
import struct
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5t
from support.files.damage import ODD, VALUES, check_refused, patch, read_all
from support.files.hdf5 import create, numbered
from support.sources.oracle import check, read, refused

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


@pytest.mark.parametrize("name", ["bad", "/bad", "link", "group", "group/x"])
def test_a_damaged_dataset_is_called_damaged_and_not_missing(broken, name):
    said = [f"{broken}:/{name.strip('/')}", " cannot be ", "checksum"]
    error = refused(CorruptError, said, broken, ["data", name])
    assert (error.file, error.dataset) == (broken, name)


def test_damage_beside_the_fields_is_named_too(broken):
    refused(CorruptError, [f"rows: {broken}:/bad: ", "damaged"], broken, ["data"], rows="bad")
    source = HDF5Source(broken, ["data"])
    with pytest.raises(CorruptError, match=rf"{broken}:/bad: .*damaged"):
        source.column("bad")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ["cannot be opened: ", "corruption"]),
        ({"chunks": (8,)}, ["behind the {} bytes of the file; was it truncated"]),
    ],
    ids=["one piece", "chunks"],
)
def test_values_behind_the_end_of_the_file_are_damage(h5, options, said):
    path = h5(data={"data": np.arange(64, dtype="i4"), **options})
    with h5py.File(path) as file:
        stored = file["data"].id
        offset = stored.get_chunk_info(3).byte_offset if options else stored.get_offset()
    content = Path(path).read_bytes()
    # The size of contiguous values follows their address.
    at = content.index(offset.to_bytes(8, "little") + (b"" if options else (256).to_bytes(8, "little")))
    patch(path, at, "<Q", len(content) - 16)
    refused(CorruptError, [f"{path}:/data", *(each.format(len(content)) for each in said)], path, ["data"])


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
        said = f"{path}:/{name}: holds values of a type that numpy lacks"
        error = refused(FormatError, [said], path, ["data", name])
        assert (error.file, error.dataset) == (path, name)


@pytest.mark.parametrize(("name", "shown"), [(b"d\xe9", r"d\xe9"), (b"d\x1b[31m", r"d\x1b[31m")])
def test_names_that_cannot_be_printed_can_be_listed(h5, name, shown):
    path = h5(data=np.ones(4))
    with h5py.File(path, "r+") as file:
        file.id.link(b"data", name, h5py.h5g.LINK_HARD)
    refused(MissingError, ["has no dataset 'other'; the file holds: ", shown], path, ["other"])


@pytest.mark.parametrize("version", [1, 2, 5])
def test_a_netcdf_3_file_is_refused_with_the_command_that_converts_it(tmp_path, version):
    path = tmp_path / "t2m.nc"
    path.write_bytes(b"CDF" + bytes([version]) + bytes(2000))
    refused(FormatError, [str(path), "nccopy"], str(path), ["t2m"])


def odd_types():
    twelve = h5t.STD_U16BE.copy()
    twelve.set_precision(12)
    twelve.set_offset(3)
    signed = h5t.STD_I32LE.copy()
    signed.set_precision(20)
    reversed_order = h5t.STD_I16LE.copy()
    reversed_order.set_order(h5t.ORDER_BE)
    short = h5t.IEEE_F32LE.copy()  # bfloat16 in the upper bits of 32
    short.set_fields(31, 23, 8, 0, 23)
    short.set_precision(32)
    return {
        "12 bits": (twelve, 2**12, "u2"),
        "20 signed bits": (signed, 2**19, "i4"),
        "turned round": (reversed_order, 2**15, "i2"),
        "bits": (h5t.STD_B8LE, 2**8, "u1"),
        "a float like f4": (short, 2**20, "f4"),
    }


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
        file["deep/relative"] = h5py.SoftLink("down/data")
        file["soft to soft"] = h5py.SoftLink("soft group/data")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file["dangling too"] = h5py.SoftLink("dangling")
        file["round"] = h5py.SoftLink("/round")
        file["hard group"] = file["deep"]
        file["deep/again"] = file["deep"]
    names = ["hard", "soft", "soft group/data", "deep/relative", "soft to soft", "hard group/down/data"]
    for name in [*names, "deep/again/again/down/data", "./deep/./down/data", "deep//down/data"]:
        check(path, {"x": name}, reading="copied")
    for name, target in (("dangling", "/nowhere"), ("dangling too", "dangling")):
        refused(MissingError, [f"{path}:/{name}: is a broken link to {target}"], path, {"x": name})
    refused(AsyncDataError, [path], path, {"x": "round"})


ODD_DATASETS = {
    "no values": lambda file: create(file, "x", (4, 0), "i4"),
    "no values inside": lambda file: create(file, "x", (4, 0, 3), "i4"),
    "no values at the end": lambda file: create(file, "x", (4, 3, 0), "i4"),
    "no values in chunks": lambda file: create(file, "x", (4, 0, 3), "i4", chunks=(2, 1, 1), maxshape=(None,) * 3),
    "wide floats": lambda file: create(file, "x", (5, 2), "g"),
    "wide complex numbers": lambda file: create(file, "x", (5, 2), "G"),
    "a table of arrays": lambda file: file.create_dataset("x", (5,), np.dtype(("f4", (3,)))),
    "a link to its own file": lambda file: file.update({"data": [1, 2], "x": h5py.ExternalLink("x.h5", "/data")}),
}


@pytest.mark.parametrize("kind", ODD_DATASETS)
def test_odd_datasets_are_right_or_refused(new, path, kind):
    with new() as file:
        ODD_DATASETS[kind](file)
    try:
        HDF5Source(path, {"x": "x"}).close()
    except FormatError as error:
        assert path in str(error)  # noqa: PT017
    else:
        check(path, {"x": "x"})


@pytest.mark.parametrize("user_block", [0, 512])
@pytest.mark.parametrize("dtype", ["<i4", ODD])
def test_values_in_one_piece_at_address_0_are_damage(tmp_path, user_block, dtype):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", userblock_size=user_block) as file:
        dataset = create(file, "data", (50, 6), dtype)
        dataset[...] = VALUES
        file.flush()
        offset = dataset.id.get_offset()
    assert (read_all(path) == VALUES).all()
    patch(path, path.read_bytes().index(struct.pack("<QQ", offset - user_block, 1200)), "<Q", 0)
    said = ": its values begin at byte 512, in the head" if user_block else ": cannot be read: .*get_offset"
    check_refused(path, said)


def test_members_with_unusual_bits_are_refused(tmp_path):
    """h5py converts such numbers; records are copied as bytes."""
    kind = h5t.create(h5t.COMPOUND, 4)
    kind.insert(b"plain", 0, h5t.STD_U16LE)
    kind.insert(b"bits", 2, odd_types()["12 bits"][0])
    with h5py.File(tmp_path / "x.h5", "w") as file:
        create(file, "x", (5,), kind)
    check(str(tmp_path / "x.h5"), {"x": "x.plain"})
    refused(FormatError, ["x.bits", "unusual bits", "store it as >u2"], str(tmp_path / "x.h5"), {"x": "x.bits"})


@pytest.mark.parametrize("short", [False, True])
def test_a_short_chunk_of_a_dataset_that_is_read_whole_is_damage(tmp_path, short):
    """Rows are chosen when the source is built, by h5py: it would take memory that was never written."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(20)
        kept = file.create_dataset("kept", data=np.arange(10), chunks=(5,), compression="gzip")
        content = np.arange(5, 10).tobytes()
        kept.id.write_direct_chunk((5,), zlib.compress(content[:8] if short else content))
    if short:
        with pytest.raises(CorruptError, match=r"^rows: .*x.h5:/kept, chunk \(5,\): 8 bytes instead of 40"):
            HDF5Source(path, ["data"], rows="kept")
    else:
        assert len(HDF5Source(path, ["data"], rows="kept")) == 10


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
    values, lengths = np.array([0.1, 2.5, -3], np.longdouble), [2, 1]
    path = h5(v=values, n=lengths, **{"s0/a": values[:2], "s1/a": values[2:], "s0/b": values, "s1/b": values})
    with h5py.File(path, "a") as file:
        file.create_dataset("vlen", (2,), h5py.vlen_dtype(np.longdouble))
        file["vlen"][0], file["vlen"][1] = values[:2], values[2:]
        for each in ("s0", "s1"):
            file[each].attrs["y"] = file[each]["c"] = values[0]
    wanted, cast = [[0.1, 2.5], [-3, 0]], {"dtype": "float64"}
    rows = HDF5Source(path, {"x": Field("v", lengths="n", **cast), "z": Field("vlen", **cast)})
    for key in "xz":
        assert read(rows, [0, 1])[key].tolist() == wanted
    assert HDF5Source(path, {"x": Field("v", patch=(3,), **cast)})[0]["x"].tolist() == [0.1, 2.5, -3]
    named = {"x": Field("a", **cast), "z": Field("b", **cast), "y": Field(attr="y", **cast), "one": Field("c", **cast)}
    groups = read(HDF5Source(path, named, group="s*", sample="group"), [0, 1])
    assert groups["x"].tolist() == wanted
    assert groups["z"].tolist() == [[0.1, 2.5, -3]] * 2
    assert groups["y"].tolist() == groups["one"].tolist() == [0.1, 0.1]
    for key, each in named.items():
        plain = dataclasses.replace(each, dtype=None)
        said = "a single value" if key == "one" else "float128"
        refused(FormatError, [f"{path}:/s0", f"holds {said}"], path, {key: plain}, group="s*", sample="group")


@pytest.mark.parametrize("group", ["train", "/train", "train/", "/train/"])
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
