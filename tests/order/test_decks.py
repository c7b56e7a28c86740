"""Decks: the order of an epoch over all ranks. It never changes, or runs would resume in another one."""

import hashlib

import numpy as np
import pytest
from support.plans import plan_of

from lit_async_data.order.buckets import Buckets
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.weights import Weights

LENGTH = 94
LENGTHS = np.arange(LENGTH) * 7919 % 37
KINDS = {
    "plain": {},
    "in storage order": {"order": np.arange(LENGTH)[::-1]},
    "weighted": {"weights": Weights(np.arange(LENGTH) + 1.0)},
    "by length": {"buckets": Buckets.of(LENGTHS, 10, 80, 4)},
}


def deck_of(shuffle, epoch=3, **options):
    runs = ChunkRun(47, 9), ChunkRun(47, 5)
    given = {"length": LENGTH, "batch_size": 10, "seed": 5, "epoch": epoch, "runs": runs, "shuffle_chunks": 3}
    return plan_of(shuffle=shuffle, **given, **options).deck


# Made by the version of 2026-11-29, before orders were decks.
DIGESTS = {
    ("chunk", "plain"): "a263ca46beba",
    ("chunk", "in storage order"): "d9975e82421f",
    ("chunk", "weighted"): "c2dce76a28f8",
    ("chunk", "by length"): "7e816f08d383",
    ("global", "plain"): "d184cdd2f994",
    ("global", "in storage order"): "d184cdd2f994",
    ("global", "weighted"): "4bc2dbd4a04c",
    ("global", "by length"): "a064b25696b9",
}


@pytest.mark.parametrize(("shuffle", "kind"), DIGESTS)
def test_the_order_is_the_one_of_earlier_versions(shuffle, kind):
    deck = deck_of(shuffle, **KINDS[kind])
    order = deck.samples(np.arange(LENGTH)).astype("<i8")
    assert hashlib.sha256(order.tobytes()).hexdigest()[:12] == DIGESTS[shuffle, kind]


@pytest.mark.parametrize("kind", ["plain", "in storage order", "by length"])
@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
def test_a_deck_has_each_sample_once_and_chunks_by_position(shuffle, kind):
    deck, positions = deck_of(shuffle, **KINDS[kind]), np.arange(LENGTH)
    samples = deck.samples(positions)
    assert sorted(samples.tolist()) == list(range(LENGTH))
    assert (deck.chunk_order is not None) == (shuffle == "chunk")
    if shuffle == "chunk":
        stored = samples if kind != "in storage order" else LENGTH - 1 - samples
        chunks = np.where(stored < 47, stored // 9, 6 + (stored - 47) // 5)
        places = deck.chunk_places(positions)
        assert len({*zip(places.tolist(), chunks.tolist(), strict=True)}) == len({*chunks.tolist()}) == 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", ["chunk", "global"])
def test_substitutes_depend_on_position_and_attempt_alone(shuffle, kind):
    decks = [deck_of(shuffle, **KINDS[kind]) for _ in range(2)]
    drawn = [[deck.substitute(at, attempt) for at in (0, 50) for attempt in range(40)] for deck in decks]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0]}) > 3
