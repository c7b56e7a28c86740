"""Filters that libhdf5 decodes with plugins: whether this process has them, and what to do about those it lacks."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING

from lit_async_data.errors import FormatError

if TYPE_CHECKING:
    import h5py


def available(number: int) -> bool:
    """Whether libhdf5 has a filter in this process. Imports hdf5plugin, which registers filters, if it may help."""
    import h5py

    return bool(h5py.h5z.filter_avail(number) or (_imported() and h5py.h5z.filter_avail(number)))


def check_filters(dataset: h5py.Dataset, path: str, name: str) -> None:
    """Check that libhdf5 can decode a dataset in this process, which may have fewer filters than its parent."""
    if dataset.is_virtual:
        _imported()  # the filters are those of other datasets
    properties = dataset.id.get_create_plist()
    for number, _, _, known in map(properties.get_filter, range(properties.get_nfilters())):
        if not available(number):
            named = f"{known.decode(errors='replace').partition(';')[0] or 'without a name'} ({number})"
            raise FormatError(
                f"cannot be decoded without the HDF5 filter {named}; {_advice()}",
                place=f"{path}:/{name.strip('/')}",
                file=path,
                dataset=name,
            )


def _advice() -> str:
    instead = "set HDF5_PLUGIN_PATH to the folder of its plugin before Python starts"
    if not _imported():
        return f"pip install hdf5plugin, which is imported where it is needed; or {instead}"
    return f"hdf5plugin does not have it: {instead}"


def _imported() -> bool:
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")
        return True
    return False
