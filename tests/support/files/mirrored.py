"""Every way in which samples are stored in an HDF5 file, each far from the others, and sources that read it."""

import h5py
import numpy as np

from lit_async_data import Field
from support.files.encoded_images import IMAGES
from support.files.hdf5 import create
from support.files.sequences import sequences

ROWS, FAR = 23, 2**17


def written(path):
    """Bytes that no field has lie between the datasets, so that none comes with another."""
    random, shape = np.random.default_rng(3), (ROWS, 40, 30)
    numbers = random.integers(1, 100, shape).astype("i2")
    with h5py.File(path, "w", userblock_size=512, libver="earliest") as file:

        def add(name, values, **options):
            file.create_dataset(name, data=values, **options)
            file[f"far/{name}"] = random.integers(0, 256, FAR, np.uint8)

        add("contiguous", numbers)
        add("big endian", numbers.astype(">f4"))
        add("single", np.arange(ROWS))
        add("chunked", numbers, chunks=(4, 40, 30))
        add("gzip", numbers, chunks=(4, 40, 30), compression="gzip", shuffle=True)
        add("gzip rows", numbers, chunks=(1, 40, 30), compression="gzip", shuffle=True)
        add("gzip tiles", numbers, chunks=(5, 16, 30), compression="gzip", fletcher32=True)
        add("lzf", numbers, chunks=(4, 40, 30), compression="lzf")
        add("scale-offset", numbers, chunks=(4, 40, 30), scaleoffset=0)
        create(file, "never written", shape, "i4", chunks=(4, 40, 30), fill=7)[9:11] = 5
        create(file, "compact", (ROWS, 9), "i2", compact=True)[...] = numbers[:, 0, :9]
        add("table", np.rec.fromarrays([np.arange(ROWS), numbers[:, 0, :7]], dtype=[("n", "i4"), ("x", "i2", (7,))]))
        add("packed", numbers, chunks=(4, 40, 30), compression="gzip")
        file["packed"].attrs.update(scale_factor=0.5, add_offset=2.0)
        add("night", np.arange(ROWS) // 8)
        add("age", np.array([30.0, 40.0, 50.0]))
        add("text", np.array([f"kind {n % 3}" for n in range(ROWS)], object), dtype=h5py.string_dtype())
        add("cells/data", numbers.ravel()[: 6 * ROWS])
        add("cells/indices", np.tile([0, 3, 5, 6, 7, 11], ROWS))
        add("cells/indptr", np.arange(0, 6 * ROWS + 1, 6))
        file["cells"].attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (ROWS, 12)})
        add("kind/codes", (np.arange(ROWS) % 3).astype("i1"), chunks=(6,))
        add("kind/categories", np.array(["a", "b", "c"], object))
        file["kind"].attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
        for number, values in enumerate(sequences("i4", ROWS)):
            add(f"of lengths/{number:02}", values, chunks=(50,) if len(values) > 50 else None)
            add(f"group {number:02}/image", np.frombuffer(IMAGES[number], np.uint8))
            add(f"group {number:02}/x", numbers[number], chunks=(40, 30), compression="gzip")
            file[f"group {number:02}"].attrs["label"] = number % 4
        ends = np.cumsum([0, *map(len, sequences("i4", ROWS))])
        add("words/values", np.concatenate(sequences("i4", ROWS)))
        add("words/offsets", ends)
        variable = file.create_dataset("variable", (ROWS,), h5py.vlen_dtype("i4"))
        images = file.create_dataset("images", (ROWS,), h5py.vlen_dtype(np.uint8), chunks=(5,))
        for row, values in enumerate(sequences("i4", ROWS)):
            variable[row], images[row] = values, np.frombuffer(IMAGES[row], np.uint8)
        most = max(map(len, IMAGES))
        add("padded images", np.array([np.frombuffer(each.ljust(most, b"\0"), np.uint8) for each in IMAGES]))
    return str(path)


VOLUMES = ("contiguous", "chunked", "gzip tiles", "scale-offset")
LAYOUTS = {
    "contiguous": {"fields": ["contiguous", "big endian", "single"]},
    "one row": {"fields": {"x": "single", "age": Field("age", lookup="night")}},
    "across": {"fields": {"x": "contiguous", "y": "gzip tiles"}, "layout": {"x": "ANB", "y": "ANB"}},
    "last axis": {"fields": {"x": "big endian", "y": "chunked"}, "layout": {"x": "ABN", "y": "ABN"}},
    "chunked": {"fields": ["chunked", "single"]},
    "gzip": {"fields": ["gzip", "gzip rows", "gzip tiles"]},
    "by h5py": {"fields": ["lzf", "scale-offset", "compact"]},
    "never written": {"fields": ["never written"]},
    "members": {"fields": ["table.n", "table.x"]},
    "converted": {"fields": {"x": Field("packed", mask_and_scale=True), "y": Field("gzip", dtype="float32")}},
    "channels": {"fields": {"x": ["gzip", "chunked"]}},
    "windows": {
        "fields": {
            "x": Field("contiguous", window=(-2, 3), pad="last"),
            "y": Field("gzip rows", window=(0, 4, 2), pad="zero"),
            "z": Field("chunked", window=(0, 2)),
        }
    },
    "sparse": {"fields": {"x": "cells"}},
    "categories": {"fields": {"x": "kind", "y": Field("text", classes=["kind 0", "kind 1", "kind 2"])}},
    "ragged": {"fields": {"x": "words"}},
    "variable": {"fields": {"x": "variable"}},
    "images": {"fields": {"x": Field("images", decode="image")}},
    "padded images": {"fields": {"x": Field("padded images", decode="image")}},
    "groups": {"fields": {"x": "x", "y": Field(attr="label")}, "sample": "group", "group": "group *"},
    "patches": {"fields": {name: Field(name, patch=(6, 16, 12)) for name in VOLUMES}},
    "drawn patches": {"fields": {name: Field(name, patch=(6, 16, 12)) for name in VOLUMES}, "patches_per_volume": 9},
    "images of groups": {"fields": {"x": Field("image", decode="image")}, "sample": "group", "group": "group *"},
    "datasets of lengths": {"fields": {"x": "of lengths/*"}, "sample": "dataset"},
}
