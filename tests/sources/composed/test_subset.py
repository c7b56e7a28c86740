import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sources.parted import Failing, batches_of, numbered, parted, read

from lit_async_data import AsyncLoader, ConcatSource, SubsetSource
from lit_async_data.errors import ConfigError, MissingError, ReadError
from lit_async_data.order.chunk_order import ChunkOrder, ChunkRun
from lit_async_data.sources.contract.source import Location, Part, StorageLayout
from lit_async_data.testing import ArraySource

some_runs = st.lists(st.builds(ChunkRun, samples=st.integers(1, 40), rows=st.integers(1, 12)), min_size=1, max_size=5)


def chunk_of_each(runs):
    """The number of the chunk of each sample, counted one by one."""
    chunks, begun = [], 0
    for run in runs:
        chunks += [begun + sample // run.rows for sample in range(run.samples)]
        begun = chunks[-1] + 1
    return chunks


@pytest.mark.parametrize("given", [[7, 3, 3, 0], np.array([7, 3, 3, 0], np.uint8), (7, 3, 3, 0)])
def test_a_subset_reads_its_samples_in_its_order(given):
    subset = SubsetSource(numbered(), given)
    assert len(subset) == 4
    assert read(subset, [0, 1, 2, 3, 0]) == [7, 3, 3, 0, 7]
    assert read(subset, []) == []
    assert subset.samples.dtype == np.int64
    assert subset.spec == numbered().spec


def test_a_mask_takes_the_samples_where_it_is_true():
    mask = [False] * 8 + [True, True]
    assert read(SubsetSource(numbered(), mask), [0, 1]) == [8, 9]
    assert read(SubsetSource(numbered(), np.array(mask)), [1]) == [9]


def test_a_subset_keeps_a_copy_that_nobody_can_write_to():
    mine = np.array([1, 2, 3])
    subset = SubsetSource(numbered(), mine)
    mine[:] = 0
    assert read(subset, [0, 1, 2]) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        subset.samples[0] = 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty; select at least one"),
        ([False] * 10, "empty; select at least one"),
        ([True] * 9, "a mask of 9 values for 10 samples"),
        ([True] * 11, "a mask of 11 values for 10 samples"),
        ([0, 10], "10 is not a sample number; the source has 0 to 9"),
        ([0, -1], "-1 is not a sample"),
        (np.array([2**64 - 1], np.uint64), "18446744073709551615 is not a sample"),
        ([1.0, 2.0], "1.0 is neither a whole number nor a bool"),
        (["a"], "'a' is neither"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (3, r"shape \(\)"),
    ],
)
def test_samples_that_are_none_are_refused(given, message):
    with pytest.raises(ConfigError, match=f"^samples: .*{message}"):
        SubsetSource(numbered(), given)


def test_samples_are_named_by_their_numbers_in_the_innermost_whole():
    outer = SubsetSource(SubsetSource(parted(), [9, 8, 5, 1]), [3, 0, 1])
    ids = outer.ids(np.array([0, 1, 2]))
    assert ids.tolist() == outer.ids([0, 1, 2]).tolist() == [1, 9, 8] == read(outer, [0, 1, 2])
    places = [("files/a.h5", "/", 1), ("files/b.h5", "/", 5), ("files/b.h5", "/", 4)]
    assert outer.locate(ids) == list(itertools.starmap(Location, places))
    for numbers, lost in (([0, 1], 0), ([9, 5], 5)):  # not even one that the source within has
        with pytest.raises(IndexError, match=f"^sample {lost} is not one of the 3 of 4 samples of "):
            outer.locate(numbers)


def test_a_subset_says_what_it_is():
    assert SubsetSource(numbered(1000), np.arange(700)).name == "700 of 1,000 samples of ArraySource"
    both = ConcatSource([numbered(1000), numbered(500)])
    assert SubsetSource(both, np.arange(7)).name == "7 of 1,500 samples of ArraySource and 1 more"
    assert ConcatSource([numbered()]).name == "ArraySource"


def test_group_codes_are_one_for_each_sample():
    assert SubsetSource(numbered(), [1, 2], group_codes=[5, 6]).group_codes.tolist() == [5, 6]
    assert SubsetSource(numbered(), [1, 2]).group_codes is None
    with pytest.raises(ConfigError, match=r"^group_codes: .*2 samples"):
        SubsetSource(numbered(), [1, 2], group_codes=[5])


@given(some_runs, st.data())
def test_runs_of_a_subset_are_those_counted_one_by_one(runs, data):
    length = sum(run.samples for run in runs)
    sorted_or_not = st.sampled_from([sorted, list])
    numbers = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=60))
    samples = data.draw(sorted_or_not)(numbers)
    whole = parted({"a.h5": length}, runs=runs)
    found = SubsetSource(whole, samples).chunks.runs
    chunks = chunk_of_each(runs)
    by_hand = [len(list(same)) for _, same in itertools.groupby(chunks[sample] for sample in samples)]
    counts = [run.rows for run in found for _ in range(run.samples // run.rows)]
    assert counts == by_hand
    assert all(run.samples % run.rows == 0 for run in found)
    assert all(one.rows != other.rows for one, other in itertools.pairwise(found)), "equal neighbours are one run"


def test_what_else_is_known_of_chunks_is_that_of_the_whole():
    layout = StorageLayout((ChunkRun(10, 4),), compressed=True, reading="decoded", spread=1.5, chunks_per_run=3)
    whole = ArraySource({"y": np.arange(10)}, parts={"a.h5": 10}, chunks=layout)
    assert SubsetSource(whole, [0, 1, 5, 9]).chunks == StorageLayout(
        (ChunkRun(2, 2), ChunkRun(2, 1)), compressed=True, reading="decoded", spread=1.5, chunks_per_run=3
    )
    alone = StorageLayout(reading="python")
    whole = ArraySource({"y": np.arange(10)}, parts={"a.h5": 10}, chunks=alone)
    assert SubsetSource(whole, [0, 1]).chunks == alone


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=200, max_size=200), st.integers(1, 5))
def test_a_shuffle_by_chunks_visits_each_stored_chunk_once(mask, width):
    mask[0] = True
    whole = parted({"a.h5": 200}, runs=[ChunkRun(200, 16)])
    subset = SubsetSource(whole, mask)
    order = ChunkOrder(subset.chunks.runs, width, key=3)
    samples = order.samples(np.arange(len(subset)))
    assert sorted(samples.tolist()) == list(range(len(subset)))
    for number in range(order.groups):
        group = order.group(number)
        inside = set((subset.samples[samples[group.first : group.end]] // 16).tolist())
        outside = set((subset.samples[np.delete(samples, np.arange(group.first, group.end))] // 16).tolist())
        assert len(inside) <= width
        assert not inside & outside


def test_parts_without_samples_are_gone():
    whole = parted({"a.h5": 4, "b.h5:/left": 3, "c.h5": 3})
    assert SubsetSource(whole, [1, 2, 8]).parts == (
        Part("files/a.h5", "/", "a.h5", 2),
        Part("files/c.h5", "/", "c.h5", 1),
    )


def test_where_numbers_go_back_another_part_begins():
    whole = parted({"a.h5": 4, "b.h5": 4})
    parts = SubsetSource(whole, [5, 6, 1, 2, 1, 1, 7]).parts
    assert [(part.name, part.samples) for part in parts] == [("b.h5", 2), ("a.h5", 2), ("a.h5", 2), ("b.h5", 1)]


def test_a_subset_takes_columns_and_overlap_from_the_whole():
    whole = parted({"a.h5": 5}, overlap=3, who=np.array(["p", "q", "r", "s", "t"]))
    subset = SubsetSource(SubsetSource(whole, [4, 3, 0]), [2, 1])
    assert subset.column("who").tolist() == ["p", "s"]
    assert subset.chunks.overlap == 3
    with pytest.raises(MissingError, match="nobody"):
        subset.column("nobody")


@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_subsets_with_ids_of_the_whole(shuffle, workers):
    whole = parted({"a.h5": 50}, first=100, runs=[ChunkRun(50, 8)])
    subset = SubsetSource(SubsetSource(whole, np.arange(50) % 3 > 0), np.arange(5, 30))
    batches = batches_of(subset, shuffle=shuffle, workers=workers, return_indices=True)
    ids = np.concatenate([batch["index"].numpy() for batch in batches])
    assert np.array_equal(ids, np.concatenate([batch["y"].numpy() for batch in batches]) - 100)
    assert sorted(ids[:25]) == sorted(ids[25:]) == np.flatnonzero(np.arange(50) % 3 > 0)[5:30].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_a_loader_name_samples_as_the_whole_does(workers):
    subset = SubsetSource(Failing(20, bad=13, error=OSError(5, "gone")), [19, 18, 17, 16, 13, 12, 11, 10])
    options = {"shuffle": "none", "workers": workers}
    with AsyncLoader(subset, {"batch_size": 4, **options}) as loader:
        assert next(loader)["y"].tolist() == [19, 18, 17, 16]
        with pytest.raises(ReadError, match=r"\(samples 13, 12, 11, … \(4 in all\)\)") as caught:
            next(loader)
        assert caught.value.sample_id == 13
