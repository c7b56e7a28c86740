"""Attributes as fields, of groups and of all rows of a part."""

import h5py
import numpy as np
import pytest

from lit_async_data import ConfigError, Field, FormatError, HDF5Source, MissingError


def test_an_attribute_is_the_value_of_all_rows_of_its_part(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["site"], file.attrs["pair"] = 5, [1, 2]
        for patient in range(3):
            file[f"p{patient}/data"] = np.arange(10 * (patient + 1))
            file[f"p{patient}"].attrs["age"] = 40.5 + patient
    fields = {"x": Field("data", window=(0, 4)), "age": Field(attr="age"), "site": Field("/", attr="site")}
    source = HDF5Source(tmp_path / "x.h5", fields, group="p*", stride=10)
    assert source.column("age").tolist() == [40.5, 41.5, 41.5, 42.5, 42.5, 42.5]
    assert (source.column("site") == 5).all()
    with pytest.raises(ConfigError, match="none is a dataset"):
        HDF5Source(tmp_path / "x.h5", [Field(attr="age")], group="p*")
    with pytest.raises(ConfigError, match="window: does not apply to an attribute"):
        Field(attr="age", window=2)
    for wrong, said in (
        (Field("/", attr="pair"), r"x.h5:/: its attribute 'pair' holds int64 \(2,\), not one number"),
        (Field(attr="weight"), "/p0: its attribute 'weight' is missing; write it"),
    ):
        with pytest.raises((FormatError, MissingError), match=said):
            HDF5Source(tmp_path / "x.h5", {"x": "data", "y": wrong}, group="p*")
