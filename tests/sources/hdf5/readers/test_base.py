"""Rows that h5py reads, or that lie scattered in the file; and labels that no tensor holds."""

import h5py
import numpy as np
import pytest
from support.files.hdf5 import LATE, create, needs_libhdf5, stored_as
from support.sources.oracle import check, read, refused_when_read

from lit_async_data import FormatError, HDF5Source, SourceError


@pytest.mark.usefixtures("no_extra_codecs")
@pytest.mark.parametrize("kind", ["contiguous", "rows", "gzip", "lzf"])
@pytest.mark.parametrize("dtype", ["u8", ">u8"])
def test_a_label_beyond_int64_is_an_error_wherever_it_lies(path, kind, dtype):
    arguments, _ = stored_as(kind, (7,))
    with h5py.File(path, "w") as file:
        create(file, "labels", dtype=dtype, **arguments)[...] = [1, 2, 2**63 - 1, 2**63, 2**64 - 1, 6, 7]
    source = HDF5Source(path, {"x": "labels"})
    assert read(source, [2, 6, 0, 2])["x"].tolist() == [2**63 - 1, 7, 1, 2**63 - 1]
    for bad in (3, 4):
        for samples in ([bad], [0, bad], [bad, 6, 0], [5, bad, bad]):
            with pytest.raises(FormatError, match=f"labels.*{2**63 if bad == 3 else 2**64 - 1}"):
                read(source, samples)


@pytest.mark.parametrize(("memory_map", "reading"), [(True, "copied"), (False, "locked")])
def test_scattered_samples_are_copied_from_a_map_or_read_by_h5py(h5, memory_map, reading):
    path = h5(data=np.arange(300, dtype=">i4").reshape(6, 50))
    check(path, {"x": "data"}, layout="CN", memory_map=memory_map, reading=reading)


@needs_libhdf5
def test_a_dataset_with_no_values_at_all_is_an_error_as_in_h5py(path):
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        create(file, "data", (9, 3), "i4", undefined_fill=True, alloc=LATE)
    refused_when_read(SourceError, ["data"], path, {"x": "data"}, [1])
