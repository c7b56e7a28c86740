"""What users give in place of a source, and sources that do not fit together."""

import h5py
import numpy as np
import pytest
import torch
from support.sources.squares import Squares
from torch.utils.data import TensorDataset

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    ConcatSource,
    HDF5Source,
    ManifestSource,
    SubsetSource,
    reading,
    split,
)
from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize("source", [HDF5Source, ManifestSource])
@pytest.mark.parametrize("fields", ["x", None, [], {"x"}, {3: "x"}, ["x", "x"]], ids=repr)
def test_both_sources_refuse_fields_without_keys_of_their_own(source, fields, tmp_path):
    (tmp_path / "t.csv").write_text("x\n1\n")
    what = "names a .* twice; give a mapping" if fields == ["x", "x"] else "not a mapping from batch key to .* name"
    with pytest.raises(ConfigError, match=f"^fields: .*{what}") as caught:
        source(str(tmp_path / "t.csv"), fields)
    assert ("write {'x': 'x'}" in str(caught.value)) == (fields == "x")


class Specified(ArraySource):
    def __init__(self, spec):
        super().__init__({"y": np.arange(3)})
        self._spec = spec


def test_sources_that_differ_are_refused_by_name():
    plain = FieldSpec((3,), np.dtype("u1"))
    first = Specified(BatchSpec({"x": plain, "y": plain}, as_mapping=True))
    for other, message in [
        (BatchSpec({"x": plain, "y": FieldSpec((4,), np.dtype("u1"))}, as_mapping=True), r"'y' has shape \(4,\) in"),
        (BatchSpec({"x": FieldSpec((3,), np.dtype("f4")), "y": plain}, as_mapping=True), "'x' has dtype float32 in"),
        (BatchSpec({"x": plain}, as_mapping=True), "has dicts of x, but"),
        (BatchSpec({"y": plain, "z": plain}, as_mapping=True), "has dicts of y, z, but"),
        (BatchSpec({"x": plain, "y": plain}, as_mapping=False), "has tuples of x, y, but"),
    ]:
        with pytest.raises(FormatError, match=message) as caught:
            ConcatSource([first, first, Specified(other)])
        assert "sources[2] (Specified)" in str(caught.value)
        assert "sources[0] (Specified)" in str(caught.value)


@pytest.mark.parametrize(
    "use",
    [
        AsyncLoader,
        lambda source: AsyncDataModule(train=source),
        lambda source: AsyncDataModule(source=source),
        lambda source: SubsetSource(source, [0]),
        lambda source: ConcatSource([source]),
        lambda source: split(source, {"train": 1}),
    ],
)
def test_what_is_no_source_is_refused_with_what_to_do(use):
    for given, said in (
        (Squares, r"^\w+: .*Squares'> is not a source, but a class; call it: Squares\(…\)"),
        ([Squares(), Squares()], r"^\w+: .* is not a source, but several; ConcatSource\(\[…\]\) makes one of them"),
        ({"a": Squares()}, r"^\w+: .* is not a source, but several; ConcatSource"),
        *(
            (type("Own", (Squares,), {m: Squares.__len__})(), rf"^\w+: Own\.{m} is a method; write @")
            for m in ("parts", "chunks")
        ),
        (type("Own", (Squares,), {"column": property(len)})(), r"^\w+: Own\.column is a property, and is to be called"),
        ("a.h5", r"^\w+: 'a\.h5' is not a source.*; build one, .*HDF5Source\('data\.h5'\)"),
        (TensorDataset(torch.zeros(3)), r"^(train|sources?): .* is not a source.*DatasetSource\(dataset\)"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            use(given)
        assert type(caught.value) is ConfigError


@pytest.mark.parametrize("flags", [np.arange(6) % 2, (np.arange(6) % 2).astype("u1"), np.arange(6) % 2 * 255])
@pytest.mark.parametrize(
    "select",
    [
        lambda flags: HDF5Source("a.h5", {"x": "x"}, rows=flags),
        lambda flags: HDF5Source("a.h5", {"x": "x"}, rows={"a": flags}),
        lambda flags: HDF5Source("a.h5", {"x": "x"}, rows="ok"),
        lambda flags: HDF5Source("a.h5", {"x": "x"}, exclude=flags),
        lambda flags: SubsetSource(HDF5Source("a.h5", {"x": "x"}), flags),
        lambda flags: reading.read("a.h5:/x", flags),
    ],
)
def test_flags_are_not_taken_for_numbers(select, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("a.h5", "w") as file:
        file["x"], file["ok"] = np.arange(6.0), flags
    with pytest.raises(
        ConfigError, match=r"holds 0 or (1|255) for each of 6, as a mask or codes do, .*; give a mask of bools"
    ):
        select(flags)


def test_masks_and_numbers_of_few_rows_select_what_they_say(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(6.0)
    source = HDF5Source(str(tmp_path / "a.h5"), {"x": "x"}, exclude=np.arange(6) % 2 == 0)
    assert source.column("x").tolist() == [1, 3, 5]
    assert SubsetSource(source, [0, 1, 0, 1]).column("x").tolist() == [1, 3, 1, 3]
    assert SubsetSource(source, [0, 1, 2]).column("x").tolist() == [1, 3, 5]
