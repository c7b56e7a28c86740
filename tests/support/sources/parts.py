"""What `HDF5Source` finds in a file before it reads any sample."""

from lit_async_data.sources.contract.checks import fields_by_key
from lit_async_data.sources.hdf5.index.index import IndexCache
from lit_async_data.sources.hdf5.parts.part import PartRequest, inspect_file
from lit_async_data.sources.hdf5.schema.field import Field, chosen_layouts


def parts_of(path, fields, *, layout=None, group=None, cache_dir=None, allow_external=False):
    """The parts of one file, for arguments of `HDF5Source`."""
    chosen, _ = fields_by_key(fields, Field.of, lambda each: each.attr or each.dataset, "dataset")
    layouts = chosen_layouts(layout, list(chosen))
    request = PartRequest(chosen, layouts, group, "row", rows=None, stride=1, allow_external=allow_external)
    _, parts = inspect_file(str(path), request, IndexCache(cache_dir))
    return parts
