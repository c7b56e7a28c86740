"""Chunks of lzf, lz4, zstd, blosc or bitshuffle: what h5py reads, or an error; and what is said without a library."""

import logging
import random
import struct
import subprocess
import sys

import h5py
import numpy as np
import pytest
from support.sources.oracle import read_from

from lit_async_data import CorruptError, HDF5Source
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline, filters_of

hdf5plugin = pytest.importorskip("hdf5plugin", reason="writes what these tests read")
imagecodecs = pytest.importorskip("imagecodecs", reason="pip install 'lit-async-data[codecs]'")

# As keywords of create_dataset.
CODECS = {
    "lzf": {"compression": "lzf"},
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4 in blocks": dict(hdf5plugin.LZ4(nbytes=1000)),
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc(cname="blosclz", shuffle=1)),
    "blosc of lz4": dict(hdf5plugin.Blosc(cname="lz4", shuffle=2)),
    "blosc of snappy": dict(hdf5plugin.Blosc(cname="snappy", shuffle=0)),
    "blosc of zlib": dict(hdf5plugin.Blosc(cname="zlib", shuffle=1)),
    "blosc of zstd": dict(hdf5plugin.Blosc(cname="zstd", shuffle=2)),
    "bitshuffle": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bitshuffle and lz4": dict(hdf5plugin.Bitshuffle(cname="lz4", nelems=256)),
    "bitshuffle and zstd": dict(hdf5plugin.Bitshuffle(cname="zstd", nelems=256)),
}
NUMBERS = {"lzf": 32000, "lz4": 32004, "zstd": 32015, "blosc": 32001, "bitshuffle": 32008}

every_codec = pytest.mark.parametrize("codec", CODECS)


def values_of(dtype, shape=(12, 1501)):
    """Smooth rows; rows of one value; and rows of noise, which do not become smaller. 1501 is no multiple of 8."""
    rng = np.random.default_rng(0)
    values = np.cumsum(rng.integers(-3, 4, shape), axis=1)
    values[::3] = rng.integers(0, 2**7, shape)[::3]
    values[1::3] = 5
    values = values.astype(dtype)
    values[::6] = np.frombuffer(rng.bytes(values[::6].nbytes), "u1").reshape(-1, shape[1], values.itemsize)[..., 0]
    return values


def written(h5, codec, *, values=None, chunks=(1, 1501), **options):
    values = values_of("i2") if values is None else values
    return h5(data={"data": values, "chunks": chunks, **CODECS[codec], **options}), values


def read(path, rows, name="data"):
    return read_from(path, {"x": name}, rows)["x"]


def readers_of(path, *names):
    return {HDF5Source(path, [name]).chunks.reading for name in names or ["data"]}


def stored_chunks(path, name="data"):
    with h5py.File(path) as file:
        corners = []
        file[name].id.chunk_iter(lambda info: corners.append(info.chunk_offset))
        return {corner: file[name].id.read_direct_chunk(corner) for corner in corners}


def put(path, corner, content, mask=0):
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk(corner, content, filter_mask=mask)


def refused_at_8(path):
    with pytest.raises(CorruptError, match=r"chunk \(8, 0\)"):
        read(path, [8])


@every_codec
def test_values_are_those_that_h5py_reads(h5, codec):
    """One row per chunk, several, and chunks beyond both edges; alone, after shuffle, before a checksum; few values."""
    stored = [
        ("u1", {"chunks": (1, 1501)}),
        ("i2", {"chunks": (4, 1501), "shuffle": True}),
        ("f4", {"chunks": (5, 400), "fletcher32": True}),
        (">f8", {"chunks": (1, 1501), "shuffle": True, "fletcher32": True}),
        (">f8", {"chunks": (5, 400)}),
    ]
    if codec == "bitshuffle":  # alone it is left to h5py where there are edges
        stored = [each for each in stored if each[1]["chunks"] != (5, 400)]
    stored += [("i4", {"chunks": (1, few)}) for few in (1, 7, 8, 9)]  # bitshuffle leaves fewer than 8 unchanged
    widths = [more["chunks"][1] if more["chunks"][1] < 10 else 1501 for _, more in stored]
    tables = [values_of(dtype)[:, :width] for (dtype, _), width in zip(stored, widths)]
    wanted = {f"{n}": {"data": table, **CODECS[codec], **stored[n][1]} for n, table in enumerate(tables)}
    path = h5(**wanted)
    assert readers_of(path, *wanted) == {"decoded"}
    for name, made in wanted.items():
        with h5py.File(path) as file:
            assert (file[name][...] == made["data"]).all()
        assert (read(path, range(12), name) == made["data"]).all()
        assert (read(path, [11, 0, 3, 3], name) == made["data"][[11, 0, 3, 3]]).all()


@every_codec
def test_a_chunk_that_skipped_some_filters_is_read_right(h5, codec):
    path, values = written(h5, codec, shuffle=True, fletcher32=True)
    put(path, (3, 0), (values[3] + 1).tobytes(), mask=0b111)
    shuffled = np.frombuffer(values[4].tobytes(), "u1").reshape(-1, 2).T.tobytes()
    put(path, (4, 0), shuffled, mask=0b110)
    assert readers_of(path) == {"decoded"}
    assert (read(path, [3, 4, 5]) == values[[3, 4, 5]] + [[1], [0], [0]]).all()


@every_codec
def test_an_unfiltered_edge_chunk_is_left_to_h5py(h5, codec):
    """With bitshuffle alone, which decodes anything of the right length, any edge chunk is."""
    path, values = written(h5, codec, values=values_of("i2", (18, 64)), chunks=(4, 64))
    put(path, (16, 0), np.resize(values[16:], (4, 64)).tobytes())
    assert readers_of(path) == {"locked"}


def test_a_block_of_bitshuffle_as_long_as_its_content_is_decompressed(h5):
    """The lz4 filter stores such a block uncompressed, bitshuffle never does; otherwise their chunks are alike."""
    noise = np.random.default_rng(0).bytes(4096)
    content = [noise[zeros:] + bytes(zeros) for zeros in range(64)]
    (packed,) = [block for block in map(imagecodecs.lz4_encode, content) if len(block) == 4096]
    path = h5(data={"data": np.zeros((2, 8192), "u1"), "chunks": (1, 8192), **hdf5plugin.Bitshuffle(nelems=4096)})
    blocks = b"".join(struct.pack(">I", len(block)) + block for block in (packed, imagecodecs.lz4_encode(bytes(4096))))
    put(path, (1, 0), struct.pack(">QI", 8192, 4096) + blocks)
    with h5py.File(path) as file:
        expected = file["data"][...]
    assert expected[1].any()
    assert readers_of(path) == {"decoded"}
    assert (read(path, [1, 0]) == expected[[1, 0]]).all()


@every_codec
def test_a_chunk_of_the_wrong_length_is_an_error(h5, codec):
    path, _ = written(h5, codec)
    for length in (1500, 1502, 100_000):
        other = h5("other.h5", data={"data": np.zeros((1, length), "i2"), "chunks": (1, length), **CODECS[codec]})
        put(path, (8, 0), stored_chunks(other)[0, 0][1])
        refused_at_8(path)


@pytest.mark.parametrize(
    ("codec", "content"),
    [
        ("lz4", struct.pack(">QI", 2**40, 2**30) + b"\0" * 50),
        ("bitshuffle and lz4", struct.pack(">QI", 2**40, 2**30) + b"\0" * 50),
        ("bitshuffle and lz4", struct.pack(">QI", 3002, 0) + b"\0" * 50),
        ("bitshuffle and zstd", struct.pack(">QII", 3002, 16, 2**32 - 1) + b"\0" * 50),
        # The last declares 2**31 bytes, which c-blosc would read.
        ("blosc", b"\2\1\1\2" + struct.pack("<III", 2**31, 2**31, 66) + b"\0" * 50),
        ("blosc", b"\2\1\1\2" + struct.pack("<III", 3002, 3002, 2**31) + b"\0" * 50),
        ("zstd", b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**40) + b"\0" * 50),
    ],
)
def test_a_chunk_with_a_false_length_is_refused_before_memory_is_allocated(h5, codec, content):
    path, _ = written(h5, codec)
    put(path, (8, 0), content)
    refused_at_8(path)


@pytest.mark.parametrize(("total", "block"), [(3001, 512), (3003, 512), (3002, 528), (3002, 496), (3002, 2**20)])
@pytest.mark.parametrize("codec", ["bitshuffle and lz4", "bitshuffle and zstd"])
def test_a_header_that_the_blocks_contradict_is_an_error(h5, codec, total, block):
    """There are as many blocks of 528 bytes as of 512, and their bits would be restored wrongly."""
    path, _ = written(h5, codec, values=np.full((12, 1501), 5, "i2"))
    put(path, (8, 0), struct.pack(">QI", total, block) + stored_chunks(path)[8, 0][1][12:])
    refused_at_8(path)


def damaged(rng, content, nbytes):
    content = bytearray(content)
    how = rng.randrange(4)
    at = rng.randrange(len(content))
    if how == 0:
        content[at] ^= 1 << rng.randrange(8)
    elif how == 1:
        del content[at:]
    elif how == 2:
        content[at:at] = rng.randbytes(rng.randrange(1, 40))
    else:
        number = rng.choice([0, 1, nbytes - 1, nbytes + 1, 2**31 - 1, 2**31, 2**32 - 1])
        content[at % 24 : at % 24 + 4] = struct.pack(rng.choice(["<I", ">I"]), number)
    return bytes(content)


@every_codec
def test_damaged_chunks_decode_to_the_right_size_or_are_refused(h5, codec):
    path, _ = written(h5, codec)
    chunks = [content for mask, content in stored_chunks(path).values() if not mask]
    with h5py.File(path) as file:
        pipeline = FilterPipeline(filters_of(file["data"]), 3002)
    rng, refused = random.Random(0), 0
    for _ in range(300):
        content = damaged(rng, rng.choice(chunks), 3002)
        try:
            assert len(pipeline.decode(np.frombuffer(content, np.uint8), 0)) == 3002
        except CorruptError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("codec", NUMBERS)
def test_without_the_library_h5py_reads_and_a_warning_says_what_to_install(h5, codec, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    path, values = written(h5, codec)
    with caplog.at_level(logging.WARNING, logger="lit_async_data"):
        assert readers_of(path) == {"locked"}
        assert (read(path, [11, 0]) == values[[11, 0]]).all()
    why = "the library that decodes its filters is missing: pip install 'lit-async-data[codecs]'"
    assert {*caplog.messages} == {f"{path}:/data: is read by h5py, one thread at a time: {why}"}


def test_the_library_is_imported_when_a_file_needs_it_and_no_plugin_is_needed(h5):
    stored = {"data": np.full((12, 1501), 5, "i2"), "chunks": (1, 1501)}
    codecs = {codec: stored | options for codec, options in CODECS.items()}
    path = h5(plain=stored | {"compression": "gzip"}, **codecs)
    program = f"""
import sys, h5py, numpy as np
from lit_async_data import CorruptError, FormatError, HDF5Source
HDF5Source({path!r}, ["plain"])
assert "imagecodecs" not in sys.modules
source = HDF5Source({path!r}, {list(CODECS)!r})
assert "imagecodecs" in sys.modules
out = {{key: np.empty((12, 1501), "i2") for key in source.spec.fields}}
source.read_into(np.arange(12), out)
assert all((read == 5).all() for read in out.values())
assert not h5py.h5z.filter_avail(32004)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("parameters", [(0, 4), (0, 4, 2, 0, 9)])
def test_unknown_parameters_are_left_to_h5py(h5, monkeypatch, parameters):
    path, _ = written(h5, "bitshuffle and lz4")
    monkeypatch.setattr(
        "lit_async_data.sources.hdf5.index.index.codecs.filters_of",
        lambda dataset: tuple(which._replace(parameters=parameters) for which in filters_of(dataset)),
    )
    assert readers_of(path) == {"locked"}
