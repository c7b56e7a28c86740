"""`Plan`: how each field is stored, as a trial tells; and what cannot be planned."""

import sys

import numpy as np
import pytest

from lit_async_data import StorageLayout
from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.testing import ArraySource
from lit_async_data.tools.pack import plan
from lit_async_data.tools.pack.plan import Plan

SMOOTH = (np.add.outer(np.arange(20), np.arange(64 * 64).reshape(64, 64)) // 64 % 256).astype("u1")


def plan_of(source, codec="auto", chunk=None):
    return Plan.of(source, codec, chunk, keep_parts=False)


def test_auto_compresses_what_was_compressed_and_becomes_smaller_and_no_small_samples():
    ramp = np.linspace(0, 1, 20 * 64 * 64, dtype="f4").reshape(20, 64, 64)
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 64), "u1")
    fields = {"smooth": SMOOTH, "ramp": ramp, "noise": noise, "rows": np.zeros((20, 128), "f4")}

    class Decoded(ArraySource):
        chunks = StorageLayout(reading="decoded")

    chosen = plan_of(Decoded(fields)).fields
    assert {field.key: (field.chunk, field.shuffle) for field in chosen} == {
        "smooth": (1, False),
        "ramp": (1, True),
        "noise": (0, False),
        "rows": (0, False),
    }
    Decoded.chunks = StorageLayout(reading="copied")
    assert not any(field.chunk for field in plan_of(Decoded(fields)).fields)
    shared = plan_of(ArraySource({"x": np.zeros((300, 128), "f4")}), "deflate")
    assert shared.fields[0].chunk == 128  # 64 KiB


def test_a_codec_without_its_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(ConfigError, match=r"zstd needs a library: pip install 'lit-async-data\[codecs\]'"):
        plan_of(ArraySource({"x": SMOOTH}), "zstd")


def test_a_piece_is_whole_chunks_of_both_files_where_they_are_not_too_large(monkeypatch):
    monkeypatch.setattr(plan, "PIECE_BYTES", 30 * 512)
    monkeypatch.setattr(plan, "MOST_PIECE_BYTES", 40 * 512)
    for rows, step in [(1, 28), (2, 28), (5, 35), (6, 28)]:  # 42 samples would be too large
        chunks = StorageLayout((ChunkRun(100, rows),), compressed=True, reading="decoded")
        source = ArraySource({"x": np.zeros((100, 128), "f4")}, chunks=chunks)
        assert plan_of(source, "deflate", 7).step == step
