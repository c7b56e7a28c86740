"""The filters of HDF5: a chunk decodes to what was encoded, or is refused."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.storage import codecs
from lit_async_data.sources.hdf5.storage.codecs import DEFLATE, FLETCHER32, SHUFFLE, Filter, FilterPipeline, fletcher32


@pytest.fixture(params=["libdeflate", "zlib"])
def inflater(request, monkeypatch):
    if request.param == "zlib":
        monkeypatch.setattr(codecs, "_inflate", codecs.inflate_with_zlib)


filters = st.lists(st.sampled_from([SHUFFLE, DEFLATE, FLETCHER32]), unique=True)  # in any order


@given(st.binary(min_size=1, max_size=400), filters, st.sampled_from([1, 2, 4, 8]), st.integers(0, 7))
def test_a_chunk_decodes_to_what_was_encoded(content, which, itemsize, left_out):
    """Encodes independently: shuffle by transposing, the checksum by HDF5's own loop."""
    stored, mask = content, 0
    for number, filter_ in enumerate(which):
        if left_out >> number & 1:
            mask |= 1 << number
        elif filter_ == SHUFFLE:
            whole = len(stored) // itemsize * itemsize
            table = np.frombuffer(stored[:whole], np.uint8).reshape(-1, itemsize)
            stored = table.T.tobytes() + stored[whole:]
        elif filter_ == DEFLATE:
            stored = zlib.compress(stored, 1)
        else:
            stored += checksum(stored).to_bytes(4, "little")
    pipeline = tuple(Filter(filter_, (itemsize,)) for filter_ in which)
    decoded = FilterPipeline(pipeline, len(content)).decode(np.frombuffer(stored, np.uint8), mask)
    assert decoded.tobytes() == content


def checksum(data):
    """HDF5's loop, word by word, folding after each."""
    first = second = 0
    for at in range(0, len(data), 2):
        first += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        first = (first & 0xFFFF) + (first >> 16)
        second += first
        second = (second & 0xFFFF) + (second >> 16)
    return second << 16 | first


@given(st.binary(max_size=2000))
def test_the_checksum_is_that_of_hdf5(data):
    assert fletcher32(np.frombuffer(data, np.uint8)) == checksum(data)


def test_the_checksum_is_exact_over_many_words(monkeypatch):
    data = np.full(4 * codecs._SUM_WORDS + 11, 255, np.uint8)
    whole = fletcher32(data)
    monkeypatch.setattr(codecs, "_SUM_WORDS", 7)
    assert fletcher32(data) == whole == checksum(data.tobytes())


@pytest.mark.usefixtures("inflater")
@pytest.mark.parametrize(
    ("which", "stored"),
    [
        ((DEFLATE,), zlib.compress(b"x" * 15)),
        ((DEFLATE,), zlib.compress(b"x" * 17)),
        ((DEFLATE,), zlib.compress(b"x" * 10**6)),
        ((DEFLATE,), zlib.compress(b"x" * 16)[:-6]),
        ((DEFLATE,), b"rubbish"),
        ((DEFLATE,), b""),
        ((), b"x" * 15),
        ((FLETCHER32,), b"x" * 16 + b"\0\0\0\0"),
        ((FLETCHER32,), b"xy"),
    ],
)
def test_what_does_not_decode_to_exactly_a_chunk_is_refused(which, stored):
    with pytest.raises(CorruptError):
        FilterPipeline(tuple(Filter(w) for w in which), 16).decode(np.frombuffer(stored, np.uint8), 0)
