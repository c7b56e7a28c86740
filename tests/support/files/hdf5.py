"""Datasets of every storage that HDF5 knows, also those that h5py's `create_dataset` cannot make."""

import ctypes
import functools
import math
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z

ENUMS = [h5py.enum_dtype({"cat": 0, "dog": 1, "cow": 117}, base) for base in ("u1", "i2", ">i4", "i8")]
INTEGERS = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", ">u2", ">u4", ">u8", ">i2", ">i4", ">i8"]
OTHERS = ["f2", "f4", "f8", ">f2", ">f4", ">f8", "?", "c8", "c16", ">c8", ">c16"]
DTYPES = [np.dtype(dtype) for dtype in INTEGERS + OTHERS] + ENUMS
LIBVERS = [("earliest", "v110"), "earliest", "v108", "v110", ("v110", "v110"), "v112", "v114", "latest"]
EARLY, LATE, INCREMENTAL = h5d.ALLOC_TIME_EARLY, h5d.ALLOC_TIME_LATE, h5d.ALLOC_TIME_INCR
FILTERS = {
    "gzip": lambda plist: plist.set_filter(h5z.FILTER_DEFLATE, h5z.FLAG_OPTIONAL, (4,)),
    "shuffle": lambda plist: plist.set_filter(h5z.FILTER_SHUFFLE, h5z.FLAG_OPTIONAL, ()),
    "fletcher32": lambda plist: plist.set_filter(h5z.FILTER_FLETCHER32, h5z.FLAG_MANDATORY, ()),
    "lzf": lambda plist: plist.set_filter(h5z.FILTER_LZF, h5z.FLAG_OPTIONAL, ()),
    "nbit": lambda plist: plist.set_filter(h5z.FILTER_NBIT, h5z.FLAG_OPTIONAL, ()),
    "scaleoffset": lambda plist: plist.set_scaleoffset(h5z.SO_INT, 0),
}
PIPELINE = ["shuffle", "gzip", "fletcher32"]
FAST = set(PIPELINE)  # what is decoded without libhdf5
DONT_FILTER_PARTIAL_CHUNKS = 2
# Chunks whose places are found in different ways, of 20 rows.
WAYS = {
    "gzip": {"compression": "gzip"},
    "plain": {},
    "scale-offset": {"scaleoffset": 0},
    "unlimited along the second axis": {"maxshape": (20, None)},
}

# How a dataset is stored, and how it should be read.
STORAGES = {
    "contiguous": ({}, "copied"),
    "compact": ({"compact": True}, "locked"),
    "chunked": ({"chunks": "pieces"}, "decoded"),
    "rows": ({"chunks": "rows"}, "decoded"),
    "one chunk": ({"chunks": "whole", "filters": ["gzip"]}, "decoded"),
    "chunk beyond the edge": ({"chunks": "larger", "maxshape": "unlimited", "filters": ["gzip"]}, "decoded"),
    "growing": ({"chunks": "pieces", "maxshape": "growing"}, "decoded"),
    "gzip": ({"chunks": "pieces", "filters": ["gzip"]}, "decoded"),
    "gzip rows": ({"chunks": "rows", "filters": ["gzip"]}, "decoded"),
    "fletcher32": ({"chunks": "pieces", "filters": ["fletcher32"]}, "decoded"),
    "all filters": ({"chunks": "pieces", "filters": PIPELINE}, "decoded"),
    "all filters in rows": ({"chunks": "rows", "filters": PIPELINE}, "decoded"),
    "lzf": ({"chunks": "pieces", "filters": ["lzf"]}, "locked"),
}


def stored_as(storage, shape):
    """Arguments of `create` for a dataset of this shape, and how it should be read."""
    given, reading = STORAGES[storage]
    arguments = {"shape": shape, **given}
    if "chunks" in given:
        arguments["chunks"] = {
            "pieces": tuple(min(max(3, size // 4), size) for size in shape),
            "rows": (1, *shape[1:]),
            "whole": shape,
            "larger": tuple(size + 3 for size in shape),
        }[given["chunks"]]
    if "maxshape" in given:
        arguments["maxshape"] = {"unlimited": (None,) * len(shape), "growing": (None, *shape[1:])}[given["maxshape"]]
    return arguments, reading


def create(
    file,
    name,
    shape,
    dtype,
    *,
    chunks=None,
    maxshape=None,
    filters=(),
    fill=None,
    alloc=None,
    fill_time=None,
    raw_edges=False,
    undefined_fill=False,
    compact=False,
):
    """A dataset with filters in any order and with every property; of a numpy dtype or a type of HDF5."""
    plist = h5p.create(h5p.DATASET_CREATE)
    if compact:
        plist.set_layout(h5d.COMPACT)
    if chunks:
        plist.set_chunk(chunks)
    if raw_edges:
        assert libhdf5().H5Pset_chunk_opts(plist.id, DONT_FILTER_PARTIAL_CHUNKS) >= 0
    for which in filters:
        FILTERS[which](plist)
    kind = dtype if isinstance(dtype, h5t.TypeID) else h5t.py_create(np.dtype(dtype), logical=True)
    if fill is not None:
        plist.set_fill_value(np.array(fill, dtype))
    if undefined_fill:
        assert libhdf5().H5Pset_fill_value(plist.id, kind.id, None) >= 0
    if alloc is not None:
        plist.set_alloc_time(alloc)
    if fill_time is not None:
        plist.set_fill_time(fill_time)
    limits = maxshape and tuple(h5s.UNLIMITED if limit is None else limit for limit in maxshape)
    space = h5s.create_simple(shape, limits)
    return h5py.Dataset(h5d.create(file.id, name.encode(), kind, space, plist))


@functools.cache
def libhdf5():
    """The libhdf5 that h5py uses, for functions h5py lacks; None if it is no separate file."""
    loaded = re.findall(r"/\S*libhdf5[-.]\S*", Path("/proc/self/maps").read_text())
    if not loaded:
        return None
    library = ctypes.CDLL(loaded[0])
    library.H5Pset_chunk_opts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    library.H5Pset_fill_value.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.H5Dget_chunk_index_type.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int)]
    return library


needs_libhdf5 = pytest.mark.skipif(libhdf5() is None, reason="libhdf5 is a part of h5py here")


def numbered(shape, dtype="i4"):
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def stored_spans(path, name="data"):
    """Offset and size of the values of a dataset: of each chunk that was written, in grid order, or of all."""
    with h5py.File(path, "r") as file:
        dataset, chunks = file[name], {}
        if dataset.chunks is None:
            return [(dataset.id.get_offset(), dataset.nbytes)]
        dataset.id.chunk_iter(lambda chunk: chunks.update({chunk.chunk_offset: (chunk.byte_offset, chunk.size)}))
        return [chunks[corner] for corner in sorted(chunks)]
