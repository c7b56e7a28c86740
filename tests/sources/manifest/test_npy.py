"""`.npy` files: the arrays that were saved, or an error, whatever their bytes are."""

import io
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.sources.manifest.fields import NpyDecoder, npy_header


def decode(data, out):
    NpyDecoder(FieldSpec(out.shape, out.dtype), out.dtype).decode(data, out, None, "x.npy")


def saved(array, version=None):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asanyarray(array), version=version)
    return stream.getvalue()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("dtype", "version"),
    [*((dtype, (1, 0)) for dtype in ("<f4", "<i8", ">u2", "?", "<c8")), ("<f4", (2, 0)), ("<f4", (3, 0))],
)
def test_an_array_comes_out_as_it_was_saved(dtype, order, version):
    values = np.asarray(np.random.default_rng(0).integers(0, 2, (3, 4, 5)).astype(dtype), order=order)
    out = np.full((2, 3, 4, 5), 7, np.dtype(dtype).newbyteorder("="))
    data = saved(values, version)
    decode(data, out[1])
    assert (out[1] == values).all()
    assert (out[0] == out.dtype.type(7)).all()
    header = npy_header(data, "x.npy")
    assert (header.shape, header.dtype) == ((3, 4, 5), np.dtype(dtype))


@pytest.mark.parametrize("values", [np.float32(3), np.zeros((0, 3), "f4"), np.arange(5.0)[::2]])
def test_arrays_without_axes_or_elements_too(values):
    out = np.full(values.shape, 9, values.dtype)
    decode(memoryview(saved(values)), out)
    assert (out == values).all()


@pytest.mark.parametrize("out", [np.zeros((3, 3), "f4"), np.zeros((2, 3), "i4"), np.zeros((6,), "f4")])
def test_another_shape_or_type_is_named(out):
    said = rf"^x.npy: holds float32 of shape \(2, 3\), but .*{re.escape(f'{out.dtype} of shape {out.shape}')}"
    with pytest.raises(FormatError, match=said):
        decode(saved(np.zeros((2, 3), "f4")), out)


class Bomb:
    def __reduce__(self):
        return os.abort, ()


def test_objects_are_refused_before_they_are_read():
    for values in (np.array([Bomb(), Bomb()]), np.array([(1, Bomb())], [("a", "i4"), ("b", "O")])):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, values, allow_pickle=True)
        with pytest.raises(FormatError, match=r"^x.npy: holds Python objects, and pickle can run any code"):
            decode(stream.getvalue(), np.zeros(2, "f4"))


def test_every_cut_and_every_byte_too_many_is_an_error():
    data, out = saved(np.arange(6, dtype="f4")), np.zeros(6, "f4")
    for end in range(len(data)):
        with pytest.raises((CorruptError, FormatError), match=r"^x.npy: "):
            decode(data[:end], out)
    with pytest.raises(CorruptError, match=r"^x.npy: 25 bytes follow the header, but float32 of shape \(6,\) has 24"):
        decode(data + b"\0", out)


def with_header(text):
    padded = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + len(padded).to_bytes(2, "little") + padded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-6,)}", "shape"),
        ("{'descr': 'what', 'fortran_order': False, 'shape': (6,)}", "cannot be read"),
        ("(" * 900, "cannot be read"),
        (" " * 10_050, "cannot be read"),
        ("__import__('os').abort()", "cannot be read"),
    ],
)
def test_odd_headers_are_refused(text, message):
    with pytest.raises(CorruptError, match=f"^x.npy: .*{message}"):
        decode(with_header(text) + bytes(24), np.zeros(6, "f4"))


@given(data=st.binary(max_size=200), head=st.sampled_from([b"", b"\x93NUMPY\1\0", b"\x93NUMPY\2\0\x40\0\0\0"]))
def test_any_bytes_are_an_error_of_ours(data, head):
    with pytest.raises((CorruptError, FormatError), match=r"^x.npy: "):
        decode(head + data, np.zeros(6))
