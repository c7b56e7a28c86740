"""Compressed chunks are decoded once per group, by whichever worker, and kept within the cache."""

import itertools

import numpy as np
import pytest
from support.files.hdf5 import stored_spans

from lit_async_data import AsyncLoader, HDF5Source, MemoryBudgetError
from lit_async_data.sources.hdf5.readers import part_reader as holding

VALUES = np.arange(600 * 50, dtype=np.int32).reshape(600, 50)


@pytest.fixture
def file(h5):
    """600 samples in 60 chunks, and their numbers."""
    return h5(data={"data": VALUES, "chunks": (10, 50), "compression": "gzip"}, labels=np.arange(600))


def epochs(source, number, **options):
    """The samples of each epoch, in order and checked."""
    found = []
    with AsyncLoader(source, {"batch_size": 16, "shuffle": True, **options}) as loader:
        for _ in range(number):
            epoch = []
            for data, labels in loader:
                assert (data[:, 0] == labels * 50).all()
                assert (data[:, -1] == labels * 50 + 49).all()
                epoch += labels.tolist()
            found.append(epoch)
    return found


@pytest.mark.usefixtures("one_batch_per_slot")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffle_by_chunks_decodes_each_once_per_epoch(file, decodings, workers):
    source = HDF5Source(file)
    decodings.clear()
    first, second = epochs(source, 2, shuffle="chunk", shuffle_chunks=8, workers=workers)
    assert sorted(first) == sorted(second) == list(range(600))
    assert first != second
    # Of the second epoch the first may find some that the end of the first has left, and what was read ahead of a third
    # was decoded too: 5 slots of 16 samples out of 80 a group, and the group behind it.
    assert 2 * 60 - 16 <= len(decodings) <= 2 * 60 + (16 if workers else 0)


def test_each_chunk_of_each_field_is_decoded_once_whatever_its_size(h5, decodings):
    path = h5(
        data={"data": VALUES, "chunks": (10, 50), "compression": "gzip"},
        labels={"data": np.arange(600), "chunks": (150,), "compression": "gzip"},
        mask={"data": -VALUES[:, :20], "chunks": (70, 20), "compression": "gzip"},
    )
    source = HDF5Source(path, ["data", "labels", "mask"])
    decodings.clear()
    options = {"batch_size": 16, "shuffle": "chunk", "shuffle_chunks": 8, "workers": 0}
    with AsyncLoader(source, options) as loader:
        for data, labels, mask in loader:
            assert (data[:, 0] == labels * 50).all()
            assert (mask == -data[:, :20]).all()
    assert len(decodings) == len(set(decodings)) == 60 + 4 + 9


@pytest.mark.usefixtures("however_slow_the_machine_is")
def test_batches_that_are_read_together_cost_no_decoding(file, decodings):
    """60 chunks are decoded, and at most the first 8 of the next epoch; a few twice, by slow workers.

    If each slot held 32 batches, 40 more would be decoded: four workers would hold more than two groups of chunks.
    """
    options = {"batch_size": 4, "shuffle": "chunk", "shuffle_chunks": 8, "workers": 4}
    decodings.clear()
    for _ in range(4):
        with AsyncLoader(HDF5Source(file), options) as loader:
            loader._machinery.wiring.steps_wanted = lambda: (None, 0)  # nothing is read of a second epoch
            assert loader.footprint.layout.batches > 1
            assert sorted(itertools.chain.from_iterable(labels.tolist() for _, labels in loader)) == list(range(600))
    assert len(decodings) <= 4 * 75


@pytest.mark.parametrize("shuffle", ["global", "chunk", "none"])
def test_a_dataset_that_fits_the_cache_is_decoded_once_ever(file, decodings, shuffle):
    source = HDF5Source(file)
    decodings.clear()
    found = epochs(source, 3, shuffle=shuffle, workers=1, cache_bytes=600 * 50 * 4)
    assert [sorted(epoch) for epoch in found] == [list(range(600))] * 3
    assert len(decodings) == 60


def test_a_cache_is_given_back_with_its_loader_unless_another_wants_it(file, decodings):
    source = HDF5Source(file)
    options = {"batch_size": 16, "shuffle": "none", "workers": 0}
    cache = 600 * 50 * 4
    with AsyncLoader(source, options | {"cache_bytes": cache}) as first:
        with AsyncLoader(source, options | {"cache_bytes": cache}) as second:
            assert len(list(first)) == len(list(second))
        decodings.clear()
        assert len(list(first)) == 38
        assert decodings == []
    with AsyncLoader(source, options) as third:
        assert len(list(third)) == 38
    assert len(decodings) == 60


def test_a_cache_for_half_of_a_dataset_saves_half_of_the_decoding(file, decodings, monkeypatch):
    monkeypatch.setattr(holding, "RECENT_BYTES", 0)
    source = HDF5Source(file)
    decodings.clear()
    epochs(source, 2, shuffle="none", workers=0, cache_bytes=600 * 50 * 2)
    assert len(decodings) == 60 + 30


def test_one_sample_per_chunk_is_cached_too(h5, decodings):
    data = {"data": VALUES[:40].astype(">i4"), "chunks": (1, 50), "compression": "gzip"}
    source = HDF5Source(h5(data=data, labels=np.arange(40)))
    decodings.clear()
    epochs(source, 3, shuffle="global", workers=1, cache_bytes=40 * 50 * 4)
    assert len(decodings) == 40


def test_filters_that_only_libhdf5_knows_are_shuffled_by_chunks_too(h5):
    source = HDF5Source(h5(data={"data": VALUES, "chunks": (7, 50), "scaleoffset": 0}, labels=np.arange(600)))
    assert source.chunks.reading == "locked"
    for epoch in epochs(source, 2, shuffle_chunks=4):
        assert sorted(epoch) == list(range(600))


# With several batches in a slot, the slots take more memory, and get smaller where the budget is small.
@pytest.mark.usefixtures("one_batch_per_slot")
def test_a_shuffle_that_does_not_fit_the_budget_is_refused(file):
    source = HDF5Source(file)
    options = {"batch_size": 16, "shuffle": "chunk", "shuffle_chunks": 20, "workers": 2}
    needed = AsyncLoader(source, options).footprint.budget
    # Two groups, and for each worker a stored chunk, a decoded one, and the slab in use.
    stored = max(size for _, size in stored_spans(file))
    assert needed.decoded == 40 * 10 * 50 * 4 + 2 * (2 * 10 * 50 * 4 + stored)
    with pytest.raises(MemoryBudgetError, match=r"decoded need .* smaller batch_size or queue_depth, shuffle_chunks"):
        AsyncLoader(source, options | {"memory_budget": needed.total - 1})
    with pytest.raises(MemoryBudgetError, match="cache_bytes"):
        AsyncLoader(source, options | {"memory_budget": needed.total, "cache_bytes": 1})


def test_auto_shuffles_by_chunk_where_compressed_samples_share_one(file, h5):
    assert AsyncLoader(HDF5Source(file), {"batch_size": 4, "shuffle": True}).order.shuffle == "chunk"
    raw = HDF5Source(h5("raw.h5", data={"data": np.zeros((60, 50)), "chunks": (10, 50)}), ["data"])
    assert AsyncLoader(raw, {"batch_size": 4, "shuffle": True}).order.shuffle == "global"
    assert AsyncLoader(raw, {"batch_size": 4, "shuffle": "chunk"}).order.chunk_order.chunks == 6
