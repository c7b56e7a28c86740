"""Images that HDF5 files hold encoded, in every storage."""

import io

import h5py
import numpy as np
import simplejpeg
from PIL import Image

from lit_async_data import Field
from support.files.pictures import stored

ROWS, SIDES = 23, (20, 30)
VARIABLE = h5py.vlen_dtype(np.uint8)


def picture(number, kind="PNG", sides=SIDES):
    pixels = np.random.default_rng(number).integers(0, 255, (*sides, 3), dtype=np.uint8)
    return stored(Image.fromarray(pixels), kind)


IMAGES = [picture(number, ["PNG", "JPEG", "BMP"][number % 3]) for number in range(ROWS)]
MOST = max(map(len, IMAGES))


def plainly(data):
    if data.startswith(b"\xff\xd8"):
        return simplejpeg.decode_jpeg(data).transpose(2, 0, 1)
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)


PIXELS = np.stack([plainly(data) for data in IMAGES])


def variable(file, images, **options):
    dataset = file.create_dataset("x", (len(images),), VARIABLE, **options)
    for row, data in enumerate(images):
        dataset[row] = np.frombuffer(data, np.uint8)


def padded(file, images, **options):
    most = max(map(len, images))
    file.create_dataset("x", data=[np.frombuffer(data.ljust(most, b"\0"), "u1") for data in images], **options)


def fixed(kind, **options):
    return lambda file, images: file.create_dataset("x", data=np.array(images, f"{kind}{MOST}"), **options)


def typed(kind):
    """Of a type that h5py reads wrongly, or not at all: strings that end at a zero, opaque values with a tag."""

    def write(file, images):
        dataset = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((len(images),)))
        rows = np.array([np.frombuffer(data.ljust(kind.get_size(), b"\0"), "u1") for data in images])
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, rows, kind)

    return write


STRINGS_WITH_AN_END, TAGGED = h5py.h5t.C_S1.copy(), h5py.h5t.create(h5py.h5t.OPAQUE, MOST)
STRINGS_WITH_AN_END.set_size(MOST + 1)
TAGGED.set_tag(b"image/jpeg")


def separate(value, **options):
    def write(file, images):
        for number, data in enumerate(images):
            file.create_dataset(f"x/{number}", data=value(data), **options)

    return write


def in_bytes(data):
    return np.frombuffer(data, np.uint8)


def flat(**options):
    def write(file, images):
        file.create_dataset("x/values", data=np.frombuffer(b"".join(images), np.uint8), **options)
        file["x/offsets"] = np.cumsum([0, *map(len, images)])

    return write


STORAGES = {
    "one after the other": flat(),
    "one after the other in chunks": flat(chunks=(999,)),
    "one after the other in compressed chunks": flat(chunks=(999,), compression="gzip"),
    "variable": variable,
    "variable in chunks": lambda file, images: variable(file, images, chunks=(5,), maxshape=(None,)),
    "variable in compressed chunks": lambda file, images: variable(file, images, chunks=(5,), compression="gzip"),
    "padded": padded,
    "padded in compressed chunks": lambda file, images: padded(file, images, chunks=(4, 99), compression="gzip"),
    "strings": fixed("S"),
    "strings by h5py": fixed("S", chunks=(3,), compression="lzf"),
    "strings with an end": typed(STRINGS_WITH_AN_END),
    "opaque": fixed("V"),
    "opaque with a tag": typed(TAGGED),
    "a dataset for each": separate(in_bytes),
    "a value for each": separate(np.void),
    "a compressed dataset for each": separate(in_bytes, compression="gzip"),
    "variable behind a user block": variable,
    "variable by h5py": lambda file, images: variable(file, images, chunks=(5,), compression="lzf"),
    "of other addresses": variable,
}


def written(path, storage="variable", images=IMAGES, **more):
    if storage == "of other addresses":
        sizes = h5py.h5p.create(h5py.h5p.FILE_CREATE)
        sizes.set_sizes(4, 4)
        h5py.h5f.create(bytes(path), fcpl=sizes).close()
    with h5py.File(path, "a", userblock_size=512 if storage.endswith("user block") else None) as file:
        STORAGES[storage](file, images)
        file["y"] = np.arange(len(images))
        for name, values in more.items():
            file[name] = values
    return str(path)


def field(**options):
    return {"x": Field("x", decode="image", **options)}
