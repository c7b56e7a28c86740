"""What users give in place of a source, and sources that do not fit together."""

import re

import numpy as np
import pytest
import torch
from support.sources.squares import Squares
from torch.utils.data import TensorDataset

import lit_async_data as lad
from lit_async_data import reading
from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize("source", [lad.HDF5Source, lad.ManifestSource])
@pytest.mark.parametrize("fields", ["x", None, 7, [], {}, {"x"}, {3: "x"}, ["x", "x"]], ids=repr)
def test_both_sources_refuse_fields_without_keys_of_their_own(source, fields, tmp_path):
    (tmp_path / "t.csv").write_text("x\n1\n")
    what = "names a .* twice; give a mapping" if fields == ["x", "x"] else "is not a mapping from batch key to .* name"
    with pytest.raises(ConfigError, match=f"^fields: {re.escape(repr(fields))} .*{what}") as caught:
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
            lad.ConcatSource([first, first, Specified(other)])
        assert "sources[2] (Specified)" in str(caught.value)
        assert "sources[0] (Specified)" in str(caught.value)


@pytest.mark.parametrize(
    "use",
    [
        lad.AsyncLoader,
        lambda source: lad.AsyncDataModule(train=source),
        lambda source: lad.AsyncDataModule(source=source),
        lambda source: lad.SubsetSource(source, [0]),
        lambda source: lad.ConcatSource([source]),
        lambda source: lad.split(source, {"train": 1}),
    ],
)
def test_what_is_no_source_is_refused_with_what_to_do(use):
    for given, said in (
        (Squares, r"^\w+: .*Squares'> is not a source, but a class; call it: Squares\(…\)"),
        ([Squares(), Squares()], r"^\w+: .* is not a source, but several; ConcatSource\(\[…\]\) makes one of them"),
        ({"a": Squares()}, r"^\w+: .* is not a source, but several; ConcatSource"),
        (type("Own", (Squares,), {"parts": Squares.__len__})(), r"^\w+: Own\.parts is a method; write @"),
        (type("Own", (Squares,), {"chunks": Squares.__len__})(), r"^\w+: Own\.chunks is a method; write @"),
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
        lambda flags: lad.HDF5Source("a.h5", {"x": "x"}, rows=flags),
        lambda flags: lad.HDF5Source("a.h5", {"x": "x"}, rows={"a": flags}),
        lambda flags: lad.HDF5Source("a.h5", {"x": "x"}, rows="ok"),
        lambda flags: lad.HDF5Source("a.h5", {"x": "x"}, exclude=flags),
        lambda flags: lad.SubsetSource(lad.HDF5Source("a.h5", {"x": "x"}), flags),
        lambda flags: reading.read("a.h5:/x", flags),
    ],
)
def test_flags_are_not_taken_for_numbers(select, flags, h5, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    h5("a.h5", x=np.arange(6.0), ok=flags)
    said = r"holds 0 or (1|255) for each of 6, as a mask or codes do, .*; give a mask of bools"
    with pytest.raises(ConfigError, match=said):
        select(flags)


def test_masks_and_numbers_of_few_rows_select_what_they_say(h5):
    source = lad.HDF5Source(h5(x=np.arange(6.0)), {"x": "x"}, exclude=np.arange(6) % 2 == 0)
    assert source.column("x").tolist() == [1, 3, 5]
    assert lad.SubsetSource(source, [0, 1, 0, 1]).column("x").tolist() == [1, 3, 1, 3]
    assert lad.SubsetSource(source, [0, 1, 2]).column("x").tolist() == [1, 3, 5]
