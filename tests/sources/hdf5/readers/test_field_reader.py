"""Windows, padding and conversions of the rows that another reader reads."""

import numpy as np
import pytest
from support.files.sequences import sequences, written
from support.memory import SMALL, peak
from support.sources.oracle import read

from lit_async_data import AsyncLoader, Field, HDF5Source
from lit_async_data.sources.hdf5.readers import field_reader


@pytest.mark.parametrize(("dtype", "fill"), [(None, -100), (None, 0), (None, 300), ("int64", -100), ("float32", -100)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("where", ["heap", "offsets"])
def test_padding_has_the_value_and_the_side_that_are_asked_for(path, where, dtype, fill, side):
    values = sequences(np.int16)
    written(path, values, np.int16)
    field = Field({"heap": "x", "offsets": "z"}[where], dtype=dtype, fill=fill, pad_side=side)
    source = HDF5Source(path, {"x": field, "y": "y"})
    with AsyncLoader(source, {"batch_size": 8, "batch_by": "x", "workers": 0}) as loader:
        for batch in loader:
            for row, x, length in zip(batch["y"].tolist(), batch["x"], batch["x_length"].tolist(), strict=True):
                rest = len(x) - length
                padding, found = (x[:rest], x[rest:]) if side == "left" else (x[length:], x[:length])
                assert np.array_equal(found.numpy(), values[row])
                assert (padding == fill).all()


ROWS = np.random.default_rng(0).integers(0, 8, (128, 64, 256), np.uint8)


def test_converted_values_are_read_in_small_blocks(h5, monkeypatch):
    monkeypatch.setattr(field_reader, "BLOCK_BYTES", 2**18)
    source = HDF5Source(h5(data=ROWS.astype("f8")), {"x": Field("data", dtype="float32")})
    order = np.random.default_rng(1).permutation(128)
    out = {"x": np.empty((128, *ROWS.shape[1:]), np.float32)}
    assert peak(lambda: source.read_into(order, out)) < 4 * 2**18 + SMALL  # of 16 MiB
    assert (out["x"] == ROWS[order]).all()
    assert (read(source, order[:3])["x"] == ROWS[order[:3]]).all()


def test_a_padded_window_literally(h5):
    path = h5(x=np.arange(1, 5), y=np.arange(4))
    for pad, begin, end in ("last", [1, 1, 1, 2], [3, 4, 4, 4]), ("zero", [0, 0, 1, 2], [3, 4, 0, 0]):
        fields = [Field("x", window=(-2, 2), pad=pad), "y"]
        source = HDF5Source(path, fields)
        assert list(source.spec) == ["x", "x_mask", "y"]
        x, mask, y = source[0]
        assert (x.tolist(), mask.tolist(), y) == (begin, [False, False, True, True], 0)
        source = HDF5Source(path, {"x": Field("x", window=(0, 4), pad=pad)})
        assert source[2]["x"].tolist() == end
        assert source[2]["x_mask"].tolist() == [True, True, False, False]
