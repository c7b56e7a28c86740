"""Numbers that stand for names: whatever numbers a file gives the names, each sample keeps its own."""

import json

import h5py
import numpy as np
import pytest
from support.files.hdf5 import numbered
from support.files.stored_fields import AT, HOLES, ROWS, STORAGE, in_every_way, numbers, set_attributes, stored
from support.sources.comparison import assert_same_samples
from support.sources.oracle import check, read_from, refused, refused_when_read

from lit_async_data import ConfigError, CorruptError, Field, FormatError, HDF5Source, SourceError, SubsetSource, split
from lit_async_data.testing import check_contract
from lit_async_data.tools.inspect import report_on
from lit_async_data.tools.terminal import as_json

TEXT = h5py.string_dtype()


def anndata(file, codes, names, name="y"):
    group = file.create_group(name)
    group.attrs["encoding-type"] = "categorical"
    group["codes"] = codes
    group.create_dataset("categories", data=names, dtype=TEXT if isinstance(names[0], str) else None)


def anndata_07(file, codes, names):
    file["y"] = codes
    file["y"].attrs["categories"] = file.create_dataset("__categories/y", data=names, dtype=TEXT).ref


def copied_07(file, codes, names):  # by a program that copies no references
    anndata_07(file, codes, names)
    del file["y"].attrs["categories"]


def anndata_06(file, codes, names):
    file["y"] = np.array([*zip(codes, codes)], [("cell", "i1"), ("n", "i4")])
    file.create_dataset("uns/cell_categories", data=names, dtype=TEXT)


def nullable_names(file, codes, names):
    anndata(file, codes, [*range(len(names))])
    del file["y/categories"]
    file.create_dataset("y/categories/values", data=names, dtype=TEXT)
    file["y/categories"].attrs["encoding-type"] = "nullable-string-array"


def pandas(file, codes, names):  # to_hdf(…, format="table")
    file["y/table"] = np.array([*zip(codes, codes)], [("index", "i8"), ("cell", "i1")])
    listed = [(number, name.encode()) for number, name in enumerate(names)]
    file["y/meta/cell/meta/table"] = np.array(listed, [("index", "i8"), ("values", "S9")])


def enumeration(file, codes, names, base="i1"):
    kind = h5py.enum_dtype({name: number for number, name in enumerate(names)}, base)
    file.create_dataset("y", data=codes, dtype=kind)
    file["y"].attrs["_FillValue"] = np.int8(-1)


def apart(file, codes, names):
    """Numbers with gaps, too many for a table."""
    numbers = {name: 5 + 100_000 * number for number, name in enumerate(names)}
    values = [-7 if code < 0 else numbers[names[code]] for code in codes]
    file.create_dataset("y", data=values, dtype=h5py.enum_dtype(numbers, "i4"))
    file["y"].attrs["missing_value"] = np.array([-7])


def flags(file, codes, names, gap=3, base="u1"):
    file["y"] = np.where(codes < 0, 255, codes * gap + 1).astype(base)
    values = (np.arange(len(names)) * gap + 1).astype(base)
    file["y"].attrs.update(flag_values=values, flag_meanings=" ".join(names), _FillValue=np.array(255, base))


def member(file, codes, names):
    kind = h5py.enum_dtype({"none": -1, **{name: number for number, name in enumerate(names)}}, "i1")
    file.create_dataset("y", (len(codes),), [("cell", kind), ("n", "i4")])
    records = file["y"][...]
    records["cell"] = codes
    file["y"][...] = records


KINDS = dict.fromkeys([anndata, anndata_07, copied_07, nullable_names, enumeration, apart, flags], "y")
KINDS |= {anndata_06: "y.cell", pandas: "y/table.cell", member: "y.cell"}
FILES = [(["B", "T"], "BTTB"), (["NK", "T"], ["NK", "NK", "T"]), (["T", "B"], "TB")]
TRUE = [text for _, texts in FILES for text in texts]


def write(path, kind, names, texts):
    """A file with a name for each row; None where there is no value."""
    with h5py.File(path, "w") as file:
        kind(file, np.array([names.index(text) if text else -1 for text in texts], "i1"), names)
        file["x"] = np.arange(len(texts))
    return str(path)


def names_of(source, key="y"):
    return source.spec.names(key, source.column(key)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_follow_their_names_in_any_files(tmp_path, kind):
    paths = [write(tmp_path / f"{n}.h5", kind, *each) for n, each in enumerate(FILES)]
    given = ["T", "unused", "NK", "B"]
    source = HDF5Source(paths, {"x": "x", "y": Field(KINDS[kind], classes=given)})
    assert (names_of(source), source.spec["y"].classes) == (TRUE, tuple(given))
    check_contract(source)
    windows = HDF5Source(paths, {"y": {"name": KINDS[kind], "classes": given, "window": (0, 2), "pad": "last"}})
    assert windows.spec.names("y", windows[3]["y"]).tolist() == ["B", "B"]
    said = ["of one source must agree; Field(…, classes=[", "'B', 'T', 'NK']) numbers"]
    refused(FormatError, said, paths[:2], {"y": KINDS[kind]})
    with pytest.raises(FormatError, match=r"1.h5:/y.*, row 0: \d+ is 'NK', not one of nk, T, B; add it to classes"):
        HDF5Source(paths, {"y": Field(KINDS[kind], classes=["nk", "T", "B"])})
    assert names_of(HDF5Source(paths[0], {"y": KINDS[kind]})) == list("BTTB")


def numbers_beside_names(path, names, numbers=(1, 0, 1)):
    with h5py.File(path, "w") as file:
        file["scans/y"] = numbers
        file["scans/y"].attrs["of_y"] = names
        file["scans/listed"] = names
        file.attrs["of_file"] = np.array(names, "S")
        file["scans"].attrs["grade"] = file.attrs["grade"] = 1
    return str(path)


@pytest.mark.parametrize("names", ["@of_y", "/@of_file", "listed", "/scans/listed", "/scans/y@of_y"])
def test_an_attribute_or_a_dataset_names_the_numbers(tmp_path, names):
    paths = [numbers_beside_names(tmp_path / f"{n}.h5", each) for n, each in enumerate((["B", "T"], ["T", "NK"]))]
    alone = HDF5Source(
        paths[0], {"y": Field("y", names=names), "g": Field(attr="grade", names="/@of_file")}, group="scans"
    )
    assert (alone.spec["y"].classes, names_of(alone), names_of(alone, "g")) == (("B", "T"), [*"TBT"], [*"TTT"])
    with pytest.raises(FormatError, match=r"1.h5:/scans/y: .* of T, NK, but .* of B, T; .* classes=\['B', 'T', 'NK'\]"):
        HDF5Source(paths, {"y": Field("y", names=names)}, group="scans")
    both = HDF5Source(paths, {"y": Field("y", names=names, classes=["NK", "B", "T"])}, group="scans")
    assert names_of(both) == ["T", "B", "T", "NK", "T", "NK"]
    check_contract(both)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("y", {"names": "@none"}, r"fields.y.names: .*x.h5: scans/y has no attribute 'none'; give classes="),
        ("y", {"names": "none"}, r"fields.y.names: .*x.h5: there is no dataset scans/none"),
        ("y", {"names": "/@grade"}, r"fields.y.names: '/@grade' of .*x.h5:/ is no list of names"),
        ("y", {"names": "@of_y", "kind": "class"}, "fields.y.names: .* needs no names; leave it out"),
        ("floats", {"names": "y@of_y"}, r"fields.y.names: .* holds float64, not classes"),
        ("own", {"names": "y@of_y"}, r"fields.y.names: .*x.h5:scans/own has names of its own"),
        ("y", {"names": "@of_y"}, "row 2: 2 is not one of its 2 classes"),
    ],
)
def test_names_that_no_list_holds_are_refused(tmp_path, name, options, match):
    path = numbers_beside_names(tmp_path / "x.h5", ["B", "T"], [0, 1, 2])
    with h5py.File(path, "a") as file:
        file["scans/floats"] = [0.0, 1.0, 1.0]
        enumeration(file, [0, 1, 1], ["B", "T"])
        file.move("y", "scans/own")
    with pytest.raises((SourceError, ConfigError), match=match):
        HDF5Source(path, {"y": {"name": name, **options}}, group="scans")[2]


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not member])
def test_a_missing_value_is_never_a_number(tmp_path, kind):
    path = write(tmp_path / "x.h5", kind, ["B", "T"], ["T", None, "B", "T"])

    def source(null="error", **options):
        return HDF5Source(path, {"x": "x", "y": Field(KINDS[kind], null=null, **options)}, rows=[1, 2, 3])

    with pytest.raises(FormatError, match=r"x.h5:/y.*, row 1: -?\d+ is a missing value; set null='ignore'") as caught:
        source()
    assert (caught.value.row, caught.value.file, caught.value.sample_id) == (1, path, 0)
    assert HDF5Source(path, {"y": KINDS[kind]}, rows=[2, 3]).column("y").size == 2
    for classes in (None, ["T", "B"]):
        ignored = source("ignore", classes=classes)
        assert names_of(ignored) == ["", "B", "T"]
        assert ignored.column("y")[0] == -100
        assert source("drop", classes=classes).column("x").tolist() == [2, 3]
    assert source("ignore", classes=["T", "B"], window=(0, 1), dtype="int16")[0]["y"].tolist() == [-100]
    assert source("drop", window=(-1, 1)).column("x").tolist() == [3]


@pytest.mark.parametrize("kind", [anndata, anndata_07, copied_07, nullable_names, anndata_06, pandas])
def test_categories_are_names_where_samples_are_grouped(tmp_path, kind):
    paths = [write(tmp_path / f"{n}.h5", kind, *each) for n, each in enumerate(FILES)]
    source = HDF5Source(paths, {"x": "x"})
    assert source.column(KINDS[kind]).tolist() == TRUE
    sides = split(source, {"train": ["B", "NK"], "val": ["T"]}, by=KINDS[kind])
    assert [TRUE[each] for each in sides["val"].samples] == ["T"] * 4
    ids = HDF5Source(paths, {"y": Field(KINDS[kind], kind="text")})
    assert (names_of(ids), ids.spec["y"].texts) == (TRUE, ("B", "NK", "T"))
    missing = write(tmp_path / "missing.h5", kind, ["B", "T"], ["T", None])
    assert HDF5Source(missing, {"x": "x"}).column(KINDS[kind]).tolist() == ["T", None]
    with pytest.raises(ConfigError, match=r"groups: y\S* has no value \(None\) for sample 1 "):
        split(HDF5Source(missing, {"x": "x"}), {"train": 0.5, "val": 0.5}, groups=KINDS[kind])


@pytest.mark.parametrize("kind", [enumeration, apart, flags])
def test_numbers_that_mean_other_things_are_not_put_together_in_a_column_either(tmp_path, kind):
    paths = [write(tmp_path / f"{n}.h5", kind, *each) for n, each in enumerate(FILES)]
    assert HDF5Source(paths[:1], {"x": "x"}).column("y").dtype.kind in "iu"
    with pytest.raises(FormatError, match=r"1.h5: has other names for the numbers of 'y' than .*0.h5; make it a field"):
        HDF5Source(paths, {"x": "x"}).column("y")


def test_meanings_are_those_of_all_files(tmp_path, h5):
    first = write(tmp_path / "0.h5", flags, ["B", "T"], "BT")
    more = write(tmp_path / "1.h5", flags, ["B", "T", "NK"], ["NK", "B"])
    other = write(tmp_path / "2.h5", flags, ["B", "T", "M"], ["M"])
    source = HDF5Source([first, more], {"y": "y"})
    assert (source.column("y").tolist(), source.spec["y"].classes) == ([1, 4, 7, 1], ())
    assert names_of(SubsetSource(source, [2, 1])) == ["NK", "T"]
    with pytest.raises(FormatError, match=r"samples of int64 \(\) of 1 B, 4 T, 7 M, but in .* of 1 B, 4 T, 7 NK"):
        HDF5Source([first, more, other], {"y": "y"})
    with pytest.raises(IndexError, match="y: \\[3\\] is not one of the numbers 1 to 7, which have names"):
        source.spec.names("y", [3])
    plain = h5("plain.h5", y=[1, 9])  # says nothing against it
    assert HDF5Source([first, plain], {"y": "y"}).column("y").tolist() == [1, 4, 1, 9]


def test_a_name_that_no_sample_has_may_be_no_class(tmp_path):
    path = write(tmp_path / "x.h5", anndata, ["B", "T", "NK"], ["B", None, "B", "T"])
    left_out = HDF5Source(path, {"y": Field("y", classes=["B"])}, rows=[0, 2])
    assert names_of(left_out) == ["B", "B"]
    field = Field("y", classes=["B"], null="ignore")
    error = refused(FormatError, ["'T', not one of B; add it to classes"], path, {"y": field})
    assert error.row == 3
    numbers = write(tmp_path / "numbers.h5", anndata, [10, 20], [20, 10])
    assert names_of(HDF5Source(numbers, {"y": Field("y/codes", classes=["20", "10"])})) == ["20", "10"]


@pytest.mark.parametrize(
    ("classes", "expected", "dtype"),
    [
        (["no", "yes"], [True, False], bool),
        (["TRUE", "FALSE"], [False, True], bool),
        (["unknown", "true", "false"], [1, 2], np.int64),
    ],
    ids=str,
)
def test_booleans_are_false_and_true_if_one_of_these_is_named(h5, classes, expected, dtype):
    source = HDF5Source(h5(y=[True, False]), {"y": Field("y", classes=classes)})
    assert (source.column("y").tolist(), source.spec["y"].dtype) == (expected, dtype)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [("nullable-integer", [5, 6, 7], [5, 7]), ("nullable-boolean", [True, False, True], [1, 1])],
)
def test_a_mask_beside_the_values_says_which_are_missing(tmp_path, kind, values, said):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["y/values"], file["y/mask"], file["x"] = values, [False, True, False], np.arange(3)
        file["y"].attrs["encoding-type"] = kind
        file["who"] = [2, 1, 0, 0]
    error = refused(FormatError, ["/y/values, row 1: ", " is a missing value; set null="], path, {"y": "y"})
    assert error.row == 1
    options = {} if kind.endswith("integer") else {"dtype": "int64"}
    ignored = HDF5Source(path, {"y": Field("y", null="ignore", **options)})
    assert ignored.column("y").tolist() == [said[0], -100, said[1]]
    floats = HDF5Source(path, {"y": Field("y", null="ignore", dtype="float32")}).column("y")
    assert np.array_equal(floats, [said[0], np.nan, said[1]], equal_nan=True)
    check_contract(HDF5Source(path, {"y": Field("y", null="ignore", dtype="float32")}))  # also by a cast on a device
    assert HDF5Source(path, {"x": "x", "y": Field("y", null="drop")}).column("x").tolist() == [0, 2]
    looked_up = HDF5Source(path, {"y": Field("y", lookup="who", null="ignore", **options)})
    assert looked_up.column("y").tolist() == [said[1], -100, said[0], said[0]]
    assert HDF5Source(path, {"x": "x"}).column("y").tolist() == [values[0], None, values[2]]
    ids = HDF5Source(path, {"y": Field("y", kind="text", null="ignore")})
    assert names_of(ids) == [str(values[0]), "", str(values[2])]
    if kind.endswith("boolean"):
        assert np.isnan(HDF5Source(path, {"y": Field("y", null="ignore", dtype="float64")}).column("y")[1])
        said = "fields.y.null: bool has no value for ignore; set null='drop', or dtype"
        refused(ConfigError, [said], path, {"y": Field("y", null="ignore")})
    with h5py.File(path, "a") as file:
        del file["y/mask"]
        file["y/mask"] = [False]
    refused(FormatError, ["y/mask: bool (1,) is no mask of its values"], path, {"y": "y"})


@pytest.mark.parametrize("masked", [0, 1])
def test_a_column_may_have_a_mask_in_one_file_and_none_in_another(tmp_path, masked):
    """AnnData writes a mask only for columns of nullable types."""
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["y/values" if number == masked else "y"] = np.arange(3)
            if number == masked:
                file["y/mask"], file["y"].attrs["encoding-type"] = [False, True, False], "nullable-integer"
    path, wanted = str(tmp_path / "*.h5"), np.array([0, 1, 2] * 2)
    wanted[3 * masked + 1] = -100
    assert HDF5Source(path, {"y": Field("y", null="ignore")}).column("y").tolist() == wanted.tolist()
    kept = HDF5Source(path, {"y": Field("y", null="drop")})
    assert kept.column("y").tolist() == wanted[wanted >= 0].tolist()
    check_contract(kept)
    refused(FormatError, [f"{masked}.h5:/y/values, row 1: ", "is a missing value; set null="], path, {"y": "y"})


def test_masked_text_is_missing_text(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("y/values", data=["b", "x", "a"], dtype=TEXT)
        file["y/mask"], file["y"].attrs["encoding-type"] = [False, True, False], "nullable-string-array"
    refused(FormatError, ["y: no text in row 1; write it, or set null="], path, {"y": "y"})
    source = HDF5Source(path, {"y": Field("y", null="ignore")})
    assert (source.column("y").tolist(), source.spec["y"].classes) == ([1, -100, 0], ("a", "b"))


@pytest.mark.parametrize("sample", ["row", "group"])
def test_enumerations_of_attributes_and_of_single_values(tmp_path, sample):
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        kind = h5py.enum_dtype({name: at for at, name in enumerate(names)}, "i1")
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.zeros(2)
            file.create_dataset("z", data=1 if sample == "group" else [1, 1], dtype=kind)
            file.attrs.create("kind", 0, dtype=kind)
    classes, repeats = ["dog", "cat"], 2 if sample == "row" else 1
    fields = {"x": "x", "y": Field(attr="kind", classes=classes), "z": Field("z", classes=classes)}
    source = HDF5Source(str(tmp_path / "*.h5"), fields, sample=sample)
    assert names_of(source) == ["cat"] * repeats + ["dog"] * repeats
    assert names_of(source, "z") == ["dog"] * repeats + ["cat"] * repeats
    with pytest.raises(FormatError, match=r"samples of int64 .* of dog, cat, but in"):
        HDF5Source(str(tmp_path / "*.h5"), {"x": "x", "y": Field(attr="kind")}, sample=sample)


def test_channels_of_categories_and_values_of_anchors(tmp_path):
    path = write(tmp_path / "x.h5", anndata, ["B", "T"], "BTTB")
    with h5py.File(path, "a") as file:
        anndata(file, np.array([1, 0, 0, 1], "i1"), ["T", "B"], name="z")
        anndata(file, np.array([1, 0], "i1"), ["T", "B"], name="each")
        file["at"], file["who"] = [3, 0], [3, 2, 1, 0]
    both = HDF5Source(path, {"y": Field(["y", "z"], classes=["T", "B"])})
    assert [both[n]["y"].tolist() for n in range(4)] == [[1, 1], [0, 0], [0, 0], [1, 1]]
    anchors = HDF5Source(path, {"x": "x", "y": Field("each", per="anchor", classes=["B", "T"])}, rows="at")
    assert names_of(anchors) == ["B", "T"]
    assert names_of(HDF5Source(path, {"y": Field("y", lookup="who", classes=["T", "B"])})) == list("BTTB")


@pytest.mark.parametrize(
    ("kind", "codes", "names"), [(anndata, "y/codes", "y/categories"), (anndata_07, "y", "__categories/y")]
)
@pytest.mark.parametrize("bad", [-2, 2])
def test_a_code_without_a_category_is_refused_where_it_is_read(tmp_path, kind, codes, names, bad):
    path = write(tmp_path / "x.h5", kind, ["B", "T"], "BTT")
    with h5py.File(path, "a") as file:
        file[codes][1] = bad
    source = HDF5Source(path, {"x": "x", "y": Field("y", classes=["T", "B"])})
    assert source[2]["y"] == 0
    with pytest.raises(FormatError, match=f"{codes}, row 1: {bad} is not one of its 2 classes"):
        source[1]
    for ask in (lambda: source.column("/y"), lambda: HDF5Source(path, {"y": Field("y", kind="text")})):
        with pytest.raises(CorruptError, match=f"/{names}: has 2 names, but there is code {bad}"):
            ask()


def test_null_needs_names(h5):
    path = h5(y=np.arange(3))
    set_attributes(path, "y", flag_values=[1, 2])  # without their meanings
    said = "fields.y.null: .*x.h5:/y holds no text, and no names of its values"
    with pytest.raises(ConfigError, match=said):
        HDF5Source(path, {"y": Field("y", null="drop")})
    set_attributes(path, "y", scale_factor=0.5)
    with pytest.raises(ConfigError, match=r"fields.y.classes: .*/y holds float\d+, not classes; .* dtype='int64' too"):
        HDF5Source(path, {"y": Field("y", classes=["a"], mask_and_scale=True)})


def named_groups(path, *categories):
    with h5py.File(path, "w") as file:
        for number, names in enumerate(categories):
            anndata(file, np.array([0, 1], np.int8), names, name=f"s{number}/y")
    return path


def test_groups_that_are_samples_must_have_the_same_names(tmp_path):
    fields, options = {"y": Field("y/codes", classes=["b", "a"])}, {"group": "s*", "sample": "group"}
    alike = HDF5Source(named_groups(tmp_path / "a.h5", ["a", "b"], ["a", "b"]), fields, **options)
    assert alike[1]["y"].tolist() == [1, 0]
    path = named_groups(tmp_path / "b.h5", ["a", "b"], ["b", "a"])
    said = "b.h5:/s1/y/codes: its numbers stand for b, a, but in the first group for a, b"
    refused(FormatError, [said], path, fields, **options)
    parts = HDF5Source(path, {"y": Field("y", classes=["b", "a"])}, group="s*")  # as the error advises
    assert [parts[number]["y"].item() for number in range(4)] == [1, 0, 0, 1]


def test_the_values_of_a_nullable_array_have_its_mask_however_they_are_named(tmp_path):
    with h5py.File(tmp_path / "n.h5", "w") as file:
        file["s0/v/values"], file["s0/v/mask"] = [1, 2], [False, True]
        file["s0/v"].attrs["encoding-type"] = "nullable-integer"
    refused(FormatError, ["is a missing value"], tmp_path / "n.h5", ["s0/v/values"])
    kept = HDF5Source(tmp_path / "n.h5", {"v": Field("s0/v/values", null="ignore")})
    assert kept.column("v").tolist() == [1, -100]
    with pytest.raises(FormatError, match=r'/s0/v/values: holds missing values; leave out sample="group"'):
        HDF5Source(tmp_path / "n.h5", ["v/values"], group="s*", sample="group")


@pytest.mark.parametrize("meanings", ["a b", [b"a", b"b"], np.array(["a b"], object)], ids=str)
def test_numbers_beside_flags_are_delivered_as_stored_unless_classes_are_given(h5, meanings):
    path = h5(m=np.array([[0, 1], [1, 255]], np.uint8))
    set_attributes(path, "m", flag_values=[0, 1], flag_meanings=meanings)
    source = HDF5Source(path, {"m": "m"})
    assert (source.spec["m"].classes, source[1]["m"].tolist()) == (("a", "b"), [1, 255])
    with pytest.raises(FormatError, match="is a missing value; set null='ignore'"):
        HDF5Source(path, {"m": Field("m", classes=["b", "a"])})
    mapped = HDF5Source(path, {"m": Field("m", classes=["b", "a"], null="ignore")})
    assert mapped[1]["m"].tolist() == [0, -100]
    set_attributes(path, "m", _FillValue=np.uint8(255))
    assert HDF5Source(path, {"m": Field("m", null="ignore")})[1]["m"].tolist() == [1, -100]
    assert len(HDF5Source(path, {"m": Field("m", null="drop")})) == 1
    set_attributes(path, "m", flag_masks=[1, 2])  # bits, of which a number has several
    assert HDF5Source(path, {"m": "m"}).spec["m"].classes == ()


@pytest.mark.parametrize(
    ("field", "error", "message"),
    [
        (Field("y", classes=["owl"]), FormatError, r"0.h5:/y, row 1: 'jay' is not one of owl; fields.y.classes names"),
        (Field("y", kind="number"), ConfigError, "fields.y.kind: .*0.h5:/y holds"),
        (Field("f", kind="class"), ConfigError, "fields.y.kind: .*/f holds float64, with .* NaN, which is not class"),
        (Field("y", column=0), ConfigError, "column and mask_and_scale do not apply to text"),
        (Field("square"), FormatError, "holds text or sequences on 2 axes"),
    ],
)
def test_what_is_no_field_of_text_is_named(field, error, message, h5):
    texts = {"y": ["owl", "jay", "owl", "emu"], "square": np.array([["a", "b"]] * 4, "S")}
    with pytest.raises(error, match=message):
        HDF5Source(h5("0.h5", x=np.arange(4), f=np.arange(4) / 2, **texts), {"y": field})


def test_whole_numbers_are_classes_if_the_user_says_so(h5):
    paths = [h5("0.h5", y=np.array([30, 10, 20], "i2")), h5("1.h5", y=np.array([7, 7, 10], "i2"))]
    source = HDF5Source(paths, {"y": Field("y", kind="class")})
    assert source.spec["y"].classes == ("7", "10", "20", "30")
    assert [int(source[n]["y"]) for n in range(6)] == [3, 1, 2, 0, 0, 1]
    given = HDF5Source(paths, {"y": Field("y", kind="class", classes=[30, 20, 10, 7])})
    assert [int(given[n]["y"]) for n in range(6)] == [0, 2, 1, 3, 3, 2]
    with pytest.raises(FormatError, match=r"1\.h5:/y, row 0: '7' is not one of 10, 20, 30; fields.y.classes names"):
        HDF5Source(paths, {"y": Field("y", kind="class", classes=[10, 20, 30])})
    assert [int(HDF5Source(paths, {"y": "y"})[n]["y"]) for n in range(3)] == [30, 10, 20]
    for shape, layout in (((3, 1), {}), ((1, 3), {"y": "CN"})):  # floats on two axes, as of MATLAB
        vector = h5(f"{shape[0]}.h5", y=np.array([3.0, 1, 2]).reshape(shape))
        source = HDF5Source(vector, {"y": Field("y", column=0, kind="class")}, layout=layout)
        assert (source.spec["y"].classes, [int(source[n]["y"]) for n in range(3)]) == (("1", "2", "3"), [2, 0, 1])


@pytest.mark.parametrize("kind", ["text", "attribute", "categories"])
def test_text_that_is_not_utf_8_is_named_with_its_row_and_never_delivered(tmp_path, kind):
    path, latin = tmp_path / "x.h5", "été".encode("latin-1")
    texts, row = np.array([b"ok", latin]), int(kind != "attribute")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(2)
        file["x"].attrs["y"] = np.bytes_(latin)
        if kind == "categories":
            anndata(file, np.array([0, 1], "i1"), texts)
        else:
            file.create_dataset("y", data=list(texts), dtype=h5py.string_dtype("ascii"))
    field = {"name": "y"} if row else {"name": "x", "attr": "y"}
    for options in ({}, {"kind": "text"}):
        said = [f"row {row}: {latin!r} is not UTF-8; write", "text.decode('latin-1')"]
        assert refused(FormatError, said, path, {"x": "x", "y": field | options}).row == row
    if kind == "text":
        with pytest.raises(FormatError, match=r"row 1: .* is not UTF-8"):
            HDF5Source(path, ["x"]).column("y")
    assert json.loads(as_json(report_on([str(path)]).as_dict(), str).encode())["files"] == [str(path)]


def test_many_texts_are_ids(h5):
    path = h5(y=np.array([f"p{number}" for number in range(2**16 + 1)], "S8"))
    refused(ConfigError, ["65537 distinct texts, which seem to be ids; write kind='text'"], path, {"y": "y"})
    source = HDF5Source(path, {"y": Field("y", kind="text")})
    assert source.spec.names("y", source[7]["y"]) == "p7"


CASTS = {"u1": ["float32", "int64"], "i8": ["uint8", "int32"], "f8": ["int64", "float32"], "f4": ["f8", ">f4"]}
CASTS |= {">i2": ["float16"], "u8": ["int64"], ">f4": ["int16"], "?": ["float32"]}


@pytest.mark.parametrize(("of", "to"), [(of, to) for of, targets in CASTS.items() for to in targets])
def test_values_are_cast(h5, of, to):
    shapes = {"alone {}": (ROWS,), "rows {}": (ROWS, 3), "tables {}": (ROWS, 2, 4)}
    names = [in_every_way(numbers(shape, of), name) for name, shape in shapes.items()]
    datasets = {key: values for each in names for key, values in each.items()}
    path = h5(**datasets)
    model = check(path, {name: Field(name, dtype=to) for name in datasets})
    assert {values.dtype for values in model.values.values()} == {np.dtype(to).newbyteorder("=")}
    for name in shapes:  # as the only field, which may have its own way of reading
        check(path, {"x": Field(name.format("contiguous"), dtype=to)})


@pytest.mark.parametrize(
    ("of", "to", "ends", "wrong"),
    [
        ("f4", "uint8", [0.0, -0.0, 255.0], [256.0, -1.0, 1.5, -np.inf]),
        ("f8", "int64", [-(2.0**63), 2.0**63 - 1024, 2.0**53], [2.0**63, np.nan]),
        (">f8", "uint64", [2.0**64 - 2048], [2.0**64]),
        ("f4", "int32", [-(2.0**31), 2.0**31 - 128], [2.0**31, np.inf]),
        ("i8", "int8", [-128, 127], [-129, 128]),
        (">i8", "uint8", [0, 255], [256, -1]),
        ("u8", "int64", [2**63 - 1], [2**63]),
        ("i4", "uint64", [2**31 - 1], [-1]),
    ],
)
def test_a_value_that_a_type_does_not_hold_is_refused_when_its_row_is_read(h5, of, to, ends, wrong):
    rows = numbers((ROWS, 3), of)
    rows[: len(ends), 1], rows[AT : AT + len(wrong), -1] = ends, wrong
    path = h5(line=rows[:, -1], gzip=stored(rows, "gzip"))
    good = np.delete(np.arange(ROWS), np.s_[AT : AT + len(wrong)])
    for name, values in {"line": rows[:, -1], "gzip": rows}.items():
        fields = {"x": Field(name, dtype=to)}
        assert_same_samples(read_from(path, fields, good)["x"], values[good].astype(to))
        for row in range(AT, AT + len(wrong)):
            assert refused_when_read(SourceError, [path, name, row], path, fields, [2, row, 7]).row in (None, row)


DELIVERED = {"i1": "f4", "u1": "f4", "i2": "f4", ">i2": "f4", "u2": "f4", "i4": "f8", ">u4": "f8", "i8": "f8"}
DELIVERED |= {"f2": "f4", "f4": "f4", ">f4": "f4", "f8": "f8"}


@pytest.mark.parametrize("of", DELIVERED)
def test_packed_values_are_unpacked(h5, of):
    path = h5(**in_every_way(HOLES.astype(of)))
    given = {"scale_factor": np.float64(0.25), "add_offset": np.array([20.5]), "_FillValue": np.array([121], of)}
    for storage in STORAGE:
        set_attributes(path, storage, **given)
    model = check(path, {storage: Field(storage, mask_and_scale=True) for storage in STORAGE})
    for values in model.values.values():
        assert values.dtype == DELIVERED[of]
        assert (np.isnan(values) == (HOLES == 121)).all()


@pytest.mark.parametrize("of", ["i1", ">i2", "i4"])
@pytest.mark.parametrize("said", ["true", np.bytes_(b"true"), "false"], ids=repr)
def test_unsigned_reinterprets_what_is_stored(h5, of, said):
    values = np.array([[0, 1, -1], [5, -2, -128], [127, -1, 5]], of)
    path = h5(plain=values, below=values, above=values)
    for name, fill in {"plain": {}, "below": {"_FillValue": -1}, "above": {"_FillValue": 5}}.items():
        set_attributes(path, name, _Unsigned=said, scale_factor=0.5, **fill)
    model = check(path, {name: Field(name, mask_and_scale=True) for name in ("plain", "below", "above")})
    below_zero = -1 if said == "false" else (256 ** np.dtype(of).itemsize - 2) / 2
    assert [values[1, 1] for values in model.values.values()] == [below_zero] * 3


def test_unpacked_values_become_whole_numbers_only_where_they_are(h5):
    path = h5(data=HOLES.astype("i2"))
    set_attributes(path, "data", scale_factor=2.0, _FillValue=np.int16(121))
    fields = {"x": Field("data", mask_and_scale=True, dtype="int64")}
    for row in (4, 11):
        refused_when_read(SourceError, [path, "data", row], path, fields, [0, row])
    assert_same_samples(read_from(path, fields, [0, 7])["x"], 2 * HOLES[[0, 7]].astype("i8"))
    set_attributes(path, "data", add_offset=0.5)
    refused(ConfigError, ["fields.x.dtype: int64 holds no fractions, but ", " add_offset 0.5"], path, fields)


@pytest.mark.parametrize("bad", [3, -1])
@pytest.mark.parametrize("classes", [None, ["a", "b", "c"]])
def test_a_label_outside_its_classes_is_refused_when_it_is_read(h5, classes, bad):
    values = (np.arange(ROWS) % 3).astype("i1")
    values[AT] = bad
    animals = h5py.enum_dtype({"cow": 2, "cat": 0, "dog": 1}, "i1")
    path = h5(labels={"data": values, "dtype": "i1" if classes else animals})
    fields = {"y": Field("labels", classes=classes)}
    refused_when_read(SourceError, [path, "labels", AT, bad], path, fields, [1, AT])
    assert read_from(path, fields, [0, 1, ROWS - 1])["y"].tolist() == [0, 1, (ROWS - 1) % 3]


@pytest.mark.parametrize(
    ("values", "field", "samples", "named"),
    [
        ([0] * 13 + [0.5] + [0] * 6, Field("y", dtype="int32", window=(0, 4)), [0, 10], (13, 10)),
        ([0] * 13 + [7] + [0] * 6, Field("age", lookup="y", window=(0, 4)), [12], (13, 12)),
        ([7, 0, 1, 1, 7], Field("y", window=(2, 4), pad="last", classes=["a", "b"]), [4], (4, 4)),
        ([0] * 8 + [7] + [0] * 3, Field("y", window=(0, 7, 3), classes=["a", "b"]), [3, 1, 0, 2], (8, 2)),
    ],
)
def test_a_bad_value_in_a_window_is_named_by_its_row_and_by_a_sample_that_reads_it(h5, values, field, samples, named):
    path = h5(age=numbered((5,)), y=np.array(values))
    error = refused_when_read(FormatError, [path, "y", named[0]], path, {"y": field}, samples)
    assert (error.row, error.sample_id) == named


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_whole_numbers_that_are_stored_as_floats_are_classes_with_an_integer_dtype(h5, dtype):
    path = h5(y=np.array([2.0, 0, 1]), table=np.array([[9.5, 1], [9.5, 0], [9.5, 2]]), half=[0.5, 1, 2], row=[2, 1, 0])
    classes = {"classes": ["a", "b", "c"], "dtype": dtype}
    fields = {"y": Field("y", **classes), "column": Field("table", column=1, **classes)}
    fields["looked"] = Field("y", lookup="row", **classes)
    got = read_from(path, fields)
    assert [got[key].tolist() for key in fields] == [[2, 0, 1], [1, 0, 2], [1, 0, 2]]
    assert HDF5Source(path, fields).spec["column"].classes == ("a", "b", "c")
    for name, few, said in (("y", ["a", "b"], "row 0: 2 is not one of its 2 classes"), ("half", ["a"], "0.5 is not")):
        with pytest.raises(FormatError, match=said):
            read_from(path, {"y": Field(name, classes=few, dtype=dtype)})


@pytest.mark.parametrize("dtype", ["i1", "i8", "f4"])
def test_numbers_below_0_beside_classes_are_missing(h5, dtype):
    path = h5(x=np.arange(6), y=np.array([0, 1, -1, 2, -100, 0], dtype), wrong=np.array([0, 1, -1, 2, -3, 7]))

    def source(null, name="y", **more):
        more = {"dtype": "int64"} if dtype == "f4" and name == "y" else {}
        return HDF5Source(path, {"x": "x", "y": Field(name, classes=["a", "b", "c"], null=null, **more)})

    assert source("ignore").column("y").tolist() == [0, 1, -100, 2, -100, 0]
    assert source("drop").column("x").tolist() == [0, 1, 3, 5]
    with pytest.raises(FormatError, match=r"y, row 2: -1.* is not one of its 3 classes; if −1 .* null='ignore'"):
        source("error").column("y")
    with pytest.raises(FormatError, match=r"wrong, row 4: -3 is not one"):
        source("ignore", "wrong").column("y")
