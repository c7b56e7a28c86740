"""Text as numbers: classes, and ids whose text `names` gives back."""

import pickle

import h5py
import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    ConcatSource,
    Field,
    FormatError,
    HDF5Source,
    LoaderOptions,
    ManifestSource,
    MissingError,
    SubsetSource,
    split,
)
from lit_async_data.testing import check_contract

TEXTS = [["owl", "jay", "owl", "emu"], ["jay", "auk"]]
ALL = [text for texts in TEXTS for text in texts]


def write(path, texts, dtype=None, **more):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(len(texts))
        file.create_dataset("y", data=texts, dtype=dtype or h5py.string_dtype())
        for name, values in more.items():
            file[name] = values


def first_of(dm):
    with dm.val_dataloader()[0] as loader:
        return next(loader)


@pytest.fixture
def two(tmp_path):
    for number, (texts, dtype) in enumerate(zip(TEXTS, ("S5", None), strict=True)):
        events = np.array([(0, text) for text in texts], [("onset", "i8"), ("bird", dtype or h5py.string_dtype())])
        write(tmp_path / f"{number}.h5", texts, dtype, patient=10 * number + np.arange(len(texts)), events=events)
    return tmp_path / "*.h5"


def test_text_is_classes_in_order_over_all_files(two):
    fields = {
        "x": "x",
        "y": "y",
        "given": Field("y", classes=["owl", "jay", "emu", "auk"], dtype="uint8"),
        "id": Field("y", kind="text"),
        "patient": Field("patient", kind="text"),
        "member": "events.bird",
    }
    source = HDF5Source(two, fields)
    check_contract(source)
    spec = source.spec
    assert spec["y"].classes == spec["id"].texts == ("auk", "emu", "jay", "owl")
    assert (spec["id"].classes, spec["y"].texts, spec["patient"].texts[-1]) == ((), (), "11")
    assert source.column("y").tolist() == [3, 2, 3, 1, 2, 0]
    assert source.column("given").tolist() == [0, 1, 0, 2, 1, 3]
    for each in (source, pickle.loads(pickle.dumps(source)), SubsetSource(source, np.arange(6))):
        for key in ("y", "given", "id", "member"):
            assert each.spec.names(key, each.column(key)).tolist() == ALL
        assert each.spec.names("patient", each.column("patient")).tolist() == ["0", "1", "2", "3", "10", "11"]
    assert source.spec.names("y", np.array([[-100, 1]])).tolist() == [["", "emu"]]
    for key, codes, error in (("x", [0], MissingError), ("y", [4], IndexError), ("y", [0.0], IndexError)):
        with pytest.raises(error):
            source.spec.names(key, codes)
    sides = split(source, {"train": ["3", "11"], "val": ["0"]}, groups="patient")  # by what the numbers stand for
    assert [side.samples.tolist() for side in sides.values()] == [[3, 5], [0]]
    for side in split(source, {"train": 0.5, "val": 0.5}, groups="y").values():
        with AsyncLoader(side, LoaderOptions(batch_size=8, shuffle="none")) as loader:
            batch = next(loader)
        assert side.spec.names("y", batch["y"]).tolist() == [ALL[sample] for sample in side.samples]


def test_windows_of_text(two):
    source = HDF5Source(two, {"y": Field("y", window=(0, 2)), "last": Field("y", window=(-1, 1), pad="last")})
    check_contract(source)
    found = source.spec.names("y", [sample["y"] for sample in source.__getitems__([2, 3])])
    assert found.tolist() == [["owl", "emu"], ["jay", "auk"]]


def test_a_class_of_validation_only(two):
    first, second = (HDF5Source(two.parent / f"{number}.h5", {"x": "x", "y": "y"}) for number in (0, 1))
    assert (first.spec["y"].classes, second.spec["y"].classes) == (("emu", "jay", "owl"), ("auk", "jay"))
    loader = LoaderOptions(batch_size=4)
    with pytest.raises(FormatError, match=r"1.h5:/y, row 1: 'auk' is not one of emu, jay, owl; give all classes: "):
        AsyncDataModule(train=first, val=second, loader=loader)
    known = SubsetSource(second, [0])  # has no auk, but its file does
    with pytest.raises(FormatError, match="row 1: 'auk'"):
        AsyncDataModule(train=first, val=known, loader=loader)
    dm = AsyncDataModule(train=HDF5Source(two, {"x": "x", "y": "y"}), val=second, loader=loader)
    batch = first_of(dm)
    assert (batch["y"].tolist(), dm.num_classes["y"]) == ([2, 0], 4)
    with pytest.raises(FormatError, match="classes"):
        ConcatSource([first, second])


def test_texts_of_several_sources_are_numbered_alike(two):
    tables = [pa.table({"x": range(len(texts)), "y": texts}) for texts in TEXTS]
    sources = [HDF5Source(two.parent / f"{number}.h5", {"x": "x", "y": Field("y", kind="text")}) for number in (0, 1)]
    of_tables = [ManifestSource(table, {"x": "x", "y": {"name": "y", "kind": "text"}}) for table in tables]
    for each in (sources, of_tables):
        both = ConcatSource(each)
        check_contract(both)
        assert both.spec.names("y", both.column("y")).tolist() == ALL
        loader = LoaderOptions(batch_size=4)
        dm = AsyncDataModule(train=each[0], val=each[1], loader=loader)
        assert each[1].spec.names("y", first_of(dm)["y"]).tolist() == TEXTS[1]
        assert "y" not in dm.num_classes


@pytest.mark.parametrize("texts", [["0,5", "1,5"], ["0x0a", "0x10"], ["[1, 2]", "[3]"], ["a.png", "b.png"]])
def test_text_that_seems_to_be_no_names_is_refused(texts, tmp_path):
    for number, text in enumerate(texts):
        write(tmp_path / f"{number}.h5", [text, text])
    paths = [tmp_path / f"{number}.h5" for number in range(2)]
    with pytest.raises(FormatError, match=r"0.h5:/y: .* look like .*, or write kind='class' if these are") as caught:
        HDF5Source(paths, {"x": "x", "y": "y"})
    assert caught.value.dataset == "y"
    asked = HDF5Source(paths, {"x": "x", "y": Field("y", kind="class")})
    assert asked.spec["y"].classes == tuple(texts)
    assert HDF5Source(paths, {"x": "x", "y": Field("y", kind="text")}).spec["y"].texts == tuple(texts)
    assert HDF5Source(paths, {"x": "x", "y": Field("y", classes=texts)}).spec["y"].classes == tuple(texts)


def test_blanks_around_a_name_make_no_other_class(tmp_path, caplog):
    write(tmp_path / "0.h5", ["auk", "auk  ", "owl"])
    write(tmp_path / "1.h5", [" owl", "auk", "emu"])
    paths = [tmp_path / "0.h5", tmp_path / "1.h5"]
    source = HDF5Source(paths, {"x": "x", "y": "y"})
    assert source.spec["y"].classes == ("auk", "emu", "owl")
    assert source.column("y").tolist() == [0, 0, 2, 2, 0, 1]
    assert "0.h5:/y: ' owl', 'auk  ' differ from other classes only by blanks, and count as these" in caplog.text
    assert source.with_classes({"y": ("emu", "owl", "auk")}).column("y").tolist() == [2, 2, 1, 1, 2, 0]
    ids = HDF5Source(paths, {"x": "x", "y": Field("y", kind="text")})
    assert ids.spec["y"].texts == (" owl", "auk", "auk  ", "emu", "owl")


def test_empty_text(tmp_path):
    texts = ["b", "", "a", "a", ""]
    write(tmp_path / "x.h5", texts)

    def source(**options):
        return HDF5Source(tmp_path / "x.h5", {"x": "x", "y": Field("y", **options)})

    with pytest.raises(FormatError, match=r"x.h5:/y: no text in rows 1, 4; write it, or set null='ignore'") as caught:
        source()
    assert caught.value.row == 1
    assert HDF5Source(tmp_path / "x.h5", {"y": "y"}, rows=[0, 2, 3]).column("y").tolist() == [1, 0, 0]
    ignored = source(null="ignore")
    assert ignored.column("y").tolist() == [1, -100, 0, 0, -100]
    assert ignored.spec.names("y", ignored.column("y")).tolist() == texts
    assert source(null="drop").column("x").tolist() == [0, 2, 3]
    assert source(null="drop", window=(0, 2)).column("x").tolist() == [2]
    assert source(classes=["", "a", "b"]).column("y").tolist() == [2, 0, 1, 1, 0]


def test_attributes_and_groups_of_text(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number, text in enumerate(ALL):
            group = file.create_group(f"p{number}")
            group["x"], group["kind"], group["age"], group.attrs["bird"] = np.zeros(3), text, 20 + number, text
    fields = {"x": "x", "y": Field(attr="bird"), "kind": "kind", "age": Field("age", kind="text")}
    source = HDF5Source(tmp_path / "x.h5", fields, group="p*", sample="group", cache_dir=tmp_path)
    check_contract(source)
    for key, wanted in {"y": ALL, "kind": ALL, "age": [str(20 + number) for number in range(6)]}.items():
        assert source.spec.names(key, source.column(key)).tolist() == wanted
    rows = HDF5Source(tmp_path / "x.h5", {"x": "x", "y": Field(attr="bird")}, group="p*")
    check_contract(rows)
    assert rows.spec.names("y", rows.column("y")).tolist() == [text for text in ALL for _ in range(3)]
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["p4"].attrs["bird"] = ""
    with pytest.raises(FormatError, match="no text in row 4; ") as caught:
        HDF5Source(tmp_path / "x.h5", {"y": Field(attr="bird")}, group="p*", sample="group")
    assert caught.value.dataset == "p4@bird"
