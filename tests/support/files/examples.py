"""Files as people have them, each small: written here, inspected and read by tests."""

from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from support.files.pictures import stored

RNG = np.random.default_rng(5)
JPEG = np.frombuffer(stored(Image.new("RGB", (9, 8)), "JPEG"), "u1")


def images(path, samples=60, **storage):
    """Gzip in chunks, labels, subjects as text and as numbers, attributes."""
    with h5py.File(path, "w") as file:
        file.attrs["microscope"] = "confocal"
        data = RNG.integers(0, 9, (samples, 16, 12, 3), np.uint8)
        file.create_dataset("images", data=data, **{"chunks": (4, 16, 12, 3), "compression": "gzip", **storage})
        file["labels"] = np.arange(samples) % 5
        file["patient"] = np.array([f"p{n // 10}".encode() for n in range(samples)])
        file["age"] = RNG.random(samples)


def masks(path):
    with h5py.File(path, "w") as file:
        file["volume"] = RNG.integers(0, 99, (10, 32, 32), np.uint8)
        file["mask"] = RNG.integers(0, 2, (10, 32, 32), np.int64)


def recording(path, groups=3, labels=False):
    with h5py.File(path, "w") as file:
        for number in range(groups):
            file[f"run_{number:02}/eeg/signal"] = RNG.random((400 + number, 6)).astype("f4")
            if labels:
                file[f"run_{number:02}/eeg/label"] = np.arange(400 + number) % 4


def matlab(path):
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("X", data=RNG.integers(0, 9, (3, 20, 16, 25), np.uint8)).attrs["MATLAB_class"] = b"uint8"
        file["y"] = (np.arange(25.0) % 5 + 1).reshape(25, 1)
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file")


def netcdf(path):
    with h5py.File(path, "w") as file:
        for name, values in (("time", np.arange(9.0)), ("lat", np.arange(8.0)), ("lon", np.arange(7.0))):
            file[name] = values
            file[name].make_scale(name)
        for name in ("t2m", "tp"):
            file[name] = RNG.integers(0, 99, (9, 8, 7)).astype("i2")
            file[name].attrs["scale_factor"] = 0.5
            for axis, scale in enumerate(("time", "lat", "lon")):
                file[name].dims[axis].attach_scale(file[scale])


def anndata(path, missing=False, columns=False):
    with h5py.File(path, "w") as file:
        file.attrs["encoding-type"] = "anndata"
        matrix = file.create_group("X")
        matrix.attrs["encoding-type"] = "csc_matrix" if columns else "csr_matrix"
        matrix.attrs["shape"] = [20, 30]
        counts = np.full(30 if columns else 20, 3)
        matrix["data"] = np.ones(counts.sum(), "f4")
        matrix["indices"] = np.tile([0, 5, 9], len(counts))
        matrix["indptr"] = np.append(0, counts.cumsum())
        for name, codes in (("cell_type", np.arange(20) % 3 - missing), ("phase", np.arange(20) % 2)):
            column = file.create_group(f"obs/{name}")
            column.attrs["encoding-type"] = "categorical"
            column["codes"] = codes.astype("i1")
            column["categories"] = [f"{name} {n}" for n in range(3)]


def everything(path):
    """A dataset for each way of reading, and others that cannot be read."""
    values = RNG.integers(0, 9, (12, 8, 6))
    with h5py.File(path, "w") as file:
        file["contiguous"] = values
        file.create_dataset("chunked", data=values, chunks=(2, 8, 6))
        file.create_dataset("split", data=values, chunks=(2, 4, 3))
        file.create_dataset("gzip", data=values, chunks=(2, 8, 6), compression="gzip", shuffle=True)
        file.create_dataset("gzip_split", data=values, chunks=(1, 4, 3), compression="gzip")
        file.create_dataset("scale_offset", data=values, chunks=(2, 8, 6), scaleoffset=0)
        file.create_dataset("big_endian", data=values.astype(">f4"))
        file.create_dataset("compact", data=values.astype("f2"))
        file["ragged/values"], file["ragged/offsets"] = np.arange(30.0), np.array([0, 4, 9, 30])
        file["text"] = [b"a"] * 12
        file["single"] = 3.0
        file.create_dataset("lengths", (3,), h5py.vlen_dtype("i4"))
        file["soft"] = h5py.SoftLink("/nowhere")
        file["empty"] = np.zeros((0, 4))
        file["circle/back"] = file["/"]


def bird_table(folder, *, split=False, sizes=1):
    """A pyarrow table of photographs, which are written."""
    import pyarrow as pa

    (folder / "photos").mkdir()
    rows = []
    for number in range(30):
        size = 8 + number % sizes
        Image.fromarray(RNG.integers(0, 255, (size, 9, 3), np.uint8)).save(folder / f"photos/{number}.png")
        row = {"id": f"{number:03}", "path": f"photos/{number}.png", "species": ["owl", "auk", "jay"][number % 3]}
        rows.append(
            row | {"site": f"s{number // 10}"} | ({"split": "training" if number < 20 else "val"} if split else {})
        )
    return pa.Table.from_pylist(rows)


def class_folders(folder, sizes):
    """Photographs in a folder for each class."""
    for number in range(12):
        path = Path(folder, ["auk", "owl"][number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8 + number % sizes)).save(path)


def jpegs(path):
    """Encoded images: bytes, opaque, of variable length, padded to rows, in a group; and joined, with offsets."""
    blobs = [stored(Image.new("RGB", (12, 10), (40 * n, 0, 0)), "JPEG") for n in range(6)]
    with h5py.File(path, "w") as file:
        file["text"], file["opaque"] = np.array(blobs, "S2000"), np.array(blobs, "V2000")
        variable = file.create_dataset("variable", (6,), h5py.vlen_dtype("u1"))
        file["padded"] = np.array([np.frombuffer(each.ljust(2000, b"\0"), "u1") for each in blobs])
        for number, each in enumerate(blobs):
            variable[number] = file[f"separate/{number}"] = np.frombuffer(each, "u1")
        file["joined/values"] = np.frombuffer(b"".join(blobs), "u1")
        file["joined/offsets"] = np.cumsum([0] + [len(each) for each in blobs])


def of_pandas(path):
    with h5py.File(path, "w") as file:
        file.create_group("df").attrs["pandas_type"] = b"frame"
        file["df/axis1"], file["df/block0_values"] = np.arange(20), RNG.random((20, 2))
        file["df/block1_values"] = np.arange(20).reshape(20, 1) % 3


def grid(path, *axes):
    """A NetCDF file with a variable over these axes, and with a dimension that has no variable."""
    with h5py.File(path, "w") as file:
        file["v"] = RNG.random(tuple(4 + n for n in range(len(axes))))
        for place, axis in enumerate(axes):
            file[axis] = np.arange(4.0 + place)
            file[axis].make_scale(axis)
            file["v"].dims[place].attach_scale(file[axis])
        name = b"This is a netCDF dimension but not a netCDF variable.         9"
        file.create_dataset("level", (9,), ">f4").attrs.update(CLASS=np.bytes_("DIMENSION_SCALE"), NAME=name)


def one_each(path, name="{:03}/image", label="{:03}/label", values=None, **storage):
    """One sample in each group, or in each dataset; the label beside it, or as an attribute of it or its group."""
    with h5py.File(path, "w") as file:
        for number in range(10):
            data = np.zeros((8, 9, 3), "u1") if values is None else values
            made = file.create_dataset(name.format(number), data=data, **storage)
            if label:
                file[label.format(number)] = number
            elif label is None:
                (made if values is not None else made.parent).attrs["label"] = number


def datasets(path, values):
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            file[name] = value
