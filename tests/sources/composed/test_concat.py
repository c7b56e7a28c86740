"""Several sources as one: each sample, part and column of the right one."""

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.parted import Failing, batches_of, numbered, parted, read

from lit_async_data import ConcatSource, Field, HDF5Source, ManifestSource, SubsetSource
from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.source import Location, StorageLayout
from lit_async_data.testing import ArraySource


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_samples_run_through_all_sources(lengths, data):
    begins = np.cumsum([0, *lengths]).tolist()
    both = ConcatSource([numbered(length, first) for length, first in zip(lengths, begins)])
    assert len(both) == begins[-1]
    samples = data.draw(st.lists(st.integers(0, len(both) - 1), max_size=20))
    assert read(both, samples) == samples
    where = [max(n for n, begin in enumerate(begins) if begin <= sample) for sample in samples]
    expected = [Location("ArraySource", "/", sample - begins[n]) for sample, n in zip(samples, where)]
    assert both.locate(samples) == both.locate(np.array(samples, np.int32)) == expected


def test_locate_knows_the_samples_of_subsets():
    both = ConcatSource([numbered(3), SubsetSource(parted(), [9, 1])])
    places = [("files/a.h5", "/", 1), ("files/b.h5", "/", 5), ("ArraySource", "/", 0)]
    assert both.locate([4, 3, 0]) == [Location(*place) for place in places]
    with pytest.raises(IndexError, match=r"whole numbers below 5, not 1\.5"):
        both.locate([1.5])
    with pytest.raises(IndexError, match=r"whole numbers below 5, not 1\.5"):
        SubsetSource(both, [4, 0]).locate([1.5])


def test_no_sources_are_refused():
    with pytest.raises(ConfigError, match=r"^sources: empty; give at least one"):
        ConcatSource([])


def test_chunks_of_all_are_read_as_the_slowest_is():
    runs = (ChunkRun(4, 2), ChunkRun(6, 3))
    layouts = [
        StorageLayout(runs, reading="copied", spread=1.5),
        StorageLayout(reading="decoded", compressed=True, chunks_per_run=4),
        StorageLayout(reading="locked"),
    ]
    sources = [ArraySource({"y": np.arange(10)}, parts={"a.h5": 10}, chunks=layout) for layout in layouts]
    assert ConcatSource(sources).chunks == StorageLayout(
        (*runs, ChunkRun(10, 1), ChunkRun(10, 1)), compressed=True, reading="decoded", spread=1.5, chunks_per_run=4
    )
    assert ConcatSource(sources[1:]).chunks == StorageLayout(compressed=True, reading="decoded", chunks_per_run=4)
    assert ConcatSource([sources[2], sources[0]]).chunks.reading == "locked"
    assert ConcatSource(sources).chunks.order is None
    turned = StorageLayout(runs, order=np.arange(10)[::-1])
    both = ConcatSource([sources[0], ArraySource({"y": np.arange(10)}, chunks=turned)])
    assert both.chunks.order.tolist() == [*range(10), *range(19, 9, -1)]


def test_parts_columns_and_overlap_of_all():
    one, two = parted({"a.h5": 1, "b.h5": 2}, overlap=2), parted({"c.h5": 2}, overlap=5)
    both = ConcatSource([one, numbered(4), two, SubsetSource(numbered(4), [1])])
    parts = {"a.h5": 1, "b.h5": 2, "sources[1]": 4, "c.h5": 2, "sources[3]": 1}
    assert [(part.name, part.samples) for part in both.parts] == list(parts.items())
    assert both.chunks.overlap == 5
    assert both.column("y").tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 1]
    assert [part.name for part in both.places().parts] == [part.name for part in both.parts]


def test_a_column_of_text_and_numbers_is_refused():
    text, number = (parted({"a.h5": 2}, who=np.array(who)) for who in (["p", "q"], [1, 2]))
    with pytest.raises(FormatError, match=r"'who' holds numbers in 1 of 2 .*, but text in ArraySource"):
        ConcatSource([text, SubsetSource(number, [1])]).column("who")


def test_an_error_names_the_sample_as_the_whole_counts_it():
    for both in (
        ConcatSource([numbered(3), Failing(5, bad=4)]),
        ConcatSource([numbered(6), SubsetSource(Failing(5, bad=4), [0, 4])]),
    ):
        with pytest.raises(CorruptError) as caught:
            read(both, [0, 7])
        assert caught.value.sample_id == 7
    with pytest.raises(CorruptError) as caught:
        read(ConcatSource([Failing(5, 1, CorruptError("?"))]), [1])
    assert caught.value.sample_id is None
    with pytest.raises(CorruptError) as caught:  # what was not asked for has no number that anybody knows
        read(ConcatSource([Failing(5, 1, CorruptError("?", sample_id=3))]), [1])
    assert caught.value.sample_id is None


@pytest.mark.parametrize("return_indices", [False, True])
def test_the_order_is_that_of_any_source_of_that_length(return_indices):
    both = ConcatSource([numbered(7), numbered(6, 7)])
    options = {"shuffle": "global", "seed": 5, "return_indices": return_indices}
    found, expected = (batches_of(source, **options) for source in (both, numbered(13)))
    for one, other in zip(found, expected, strict=True):
        assert {key: value.tolist() for key, value in one.items()} == {k: v.tolist() for k, v in other.items()}


def test_numbers_that_a_file_names_beside_a_table(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("y", data=[7, 2], dtype=h5py.enum_dtype({"cat": 2, "dog": 7}, "i1"))
        file.create_dataset("z", data=[7, 2], dtype=h5py.enum_dtype({"cat": 7, "dog": 2}, "i1"))
    table, classes = pa.table({"y": ["dog", "cat"]}), ["dog", "cat"]
    both = ConcatSource(
        [
            HDF5Source(tmp_path / "x.h5", {"y": Field("y", classes=classes)}),
            ManifestSource(table, {"y": {"name": "y", "classes": classes}}),
            HDF5Source(tmp_path / "x.h5", {"y": Field("z", classes=classes)}),
        ]
    )
    assert both.spec.names("y", both.column("y")).tolist() == ["dog", "cat", "dog", "cat", "cat", "dog"]
    stored = [HDF5Source(tmp_path / "x.h5", {"y": name}) for name in ("y", "z")]
    with pytest.raises(FormatError, match=r"'y' is 2 dog, 7 cat in sources\[2\].*, but 2 cat, 7 dog in sources\[0\]"):
        ConcatSource([stored[0], ArraySource({"y": np.arange(3)}), stored[1]])
    assert ConcatSource([ArraySource({"y": np.arange(3)}), stored[0]]).spec["y"].meanings == ((2, "cat"), (7, "dog"))
