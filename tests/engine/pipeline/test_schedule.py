"""The order that a source and options make."""

import numpy as np
import pytest
from support.sources.sequences import check_equal, loader_of, samples_of, stored

from lit_async_data import LoaderOptions, StorageLayout, split
from lit_async_data.engine.pipeline.sample_reader import schedule_of
from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.testing import ArraySource


def chunked(rows, order=None):
    layout = StorageLayout((ChunkRun(8, rows),), compressed=True, reading="decoded", order=order)
    return ArraySource({"y": np.arange(8)}, parts={"a": 8}, chunks=layout)


@pytest.mark.parametrize(("rows", "shuffle"), [(1, "global"), (4, "chunk")])
def test_auto_deals_by_chunks_where_samples_share_them(rows, shuffle):
    assert schedule_of(chunked(rows), LoaderOptions(batch_size=2, shuffle=True)).plan(0).shuffle == shuffle


@pytest.mark.parametrize(
    ("options", "more", "shuffled"),
    [
        ({"shuffle": True}, {}, True),
        ({"shuffle": True}, {"alike": True}, False),
        ({}, {}, False),
        ({"weights": np.ones(8)}, {}, True),
        ({"shuffle": False}, {}, False),
        ({"shuffle": False}, {"transform_draws": True}, True),
        ({"shuffle": False, "augment": False}, {"transform_draws": True}, False),
    ],
)
def test_epochs_differ_where_the_order_or_a_transform_draws(options, more, shuffled):
    assert schedule_of(chunked(1), LoaderOptions(batch_size=2, **options), **more).shuffled == shuffled


@pytest.mark.parametrize("shuffle", ["global", "chunk"])
def test_weights_are_those_of_the_samples_wherever_they_are_stored(shuffle):
    source, weights = chunked(4, order=np.arange(8)[::-1].copy()), np.arange(8) == 7
    options = LoaderOptions(batch_size=4, shuffle=shuffle, weights=weights)
    assert schedule_of(source, options).plan(0).batch(0).tolist() == [7, 7, 7, 7]


def test_a_split_and_lengths_of_the_user_do_as_well(source):
    sides = split(source, {"train": 0.5, "val": 0.5})
    wanted = {n: x for n, x in stored(source).items() if n in sides["val"].samples}
    with loader_of(sides["val"], workers=0) as loader:
        check_equal({n: x for batch in loader for n, x in samples_of(batch).items()}, wanted)
    arrays, lengths = ArraySource({"x": np.arange(40.0)}), np.arange(40) % 7 + 1
    with loader_of(arrays, batch_by=lengths, batch_elements=14, workers=0) as loader:
        batches = [batch["index"].tolist() for batch in loader]
    assert all(len(batch) * lengths[batch].max() <= 14 for batch in batches)
    assert len({number for batch in batches for number in batch}) == 40


@pytest.mark.parametrize(
    ("given", "option", "text"),
    [
        ({"batch_by": "z"}, "batch_by", "'z' is not one of the fields"),
        ({"batch_by": [1, 2, 3]}, "batch_by", "not the lengths of the 307 samples"),
        ({"batch_by": np.full(307, 5)}, "batch_by", "samples of x have other lengths"),
        ({"batch_elements": 100}, "batch_elements", "alone takes 180 elements"),
        ({"weights": "y"}, "weights", "cannot be combined with batch_by"),
        ({"buckets": [50, 100]}, "buckets", "the last bucket ends at 100"),
    ],
)
def test_options_that_do_not_fit_are_named(source, given, option, text):
    with pytest.raises(ConfigError, match=text) as caught:
        loader_of(source, **given)
    assert caught.value.option in (option, None)
