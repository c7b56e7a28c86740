"""Batches in slots: what is kept of them never changes, and a slot is filled again when nobody reads it any more."""

import itertools
import weakref

import numpy as np
import pytest
from support.device.training_loop import STEPS, Step, queue_on
from support.sources.numbered import loader_of, order, seen
from support.threads.number_pipelines import running
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.batch.spec import SMALL_BYTES
from lit_async_data.engine import resources
from lit_async_data.engine.device.feeds import BLOCK, MOST_BLOCKS, CopyFeed, LentFeed, SmallCopies, moves
from lit_async_data.engine.device.queues import InlineQueue
from lit_async_data.engine.pipeline.pipeline import COPYING
from lit_async_data.order.plan import BatchIndex, Limits

pytestmark = pytest.mark.usefixtures("however_slow_the_machine_is")


@pytest.mark.parametrize(
    ("to", "goes"),
    [
        (lambda self, device: None, True),
        (lambda self, other=None, device=None: None, True),
        (lambda self, *given, **named: None, True),
        (lambda self, other=None, *contexts, **context: None, False),  # as those of pint
        (lambda self, units, equivalence=None: None, False),  # of unyt
        (lambda self, tz: None, False),  # of arrow
        ("a place", False),
    ],
)
def test_an_object_goes_to_a_device_unless_its_to_converts_to_something_else(to, goes):
    assert moves(type("Value", (), {"to": to})()) is goes


def copy_by(copies, array):
    copies.replace(arrays := {"x": array}, ["x"])
    return arrays["x"]


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "array", [np.uint8(3), np.zeros((0, 2)), np.arange(1j, 5), np.arange(24).reshape(4, 6)[:, ::2]]
)
def test_a_copy_has_the_values_and_type_of_the_array(array):
    copy = copy_by(SmallCopies(), np.asarray(array))
    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    assert (copy == array).all()
    assert copy.flags.c_contiguous
    assert copy.flags.writeable
    assert not np.shares_memory(copy, array)


@pytest.mark.parametrize("count", [1, 100, 3000, SMALL_BYTES // 8, SMALL_BYTES // 8 + 1])
def test_copies_that_are_kept_never_change(count):
    copies = SmallCopies()
    kept = [copy_by(copies, np.full(count, number)) for number in range(300)]
    for number, copy in enumerate(kept):
        assert (copy == number).all()
        copy[...] = -1  # the user writes to it
    assert all((copy == -1).all() for copy in kept)


def test_copies_beyond_the_blocks_are_ordinary_ones():
    copies = SmallCopies()
    kept = [copy_by(copies, np.full(SMALL_BYTES // 8, number)) for number in range(2 * MOST_BLOCKS + 3)]
    assert len(copies._blocks) == MOST_BLOCKS
    assert sum(copy.base is None for copy in kept) == 3
    assert all((copy == number).all() for number, copy in enumerate(kept))


def test_a_block_is_used_again_when_the_last_view_of_its_copies_is_gone():
    copies = SmallCopies()
    count = BLOCK // 8 // 2
    first = copy_by(copies, np.full(count, 1))
    view = first[3:5]
    where = address(first)
    del first
    others = [copy_by(copies, np.full(count, 2)) for _ in range(3)]
    assert view.tolist() == [1, 1]
    assert where not in [address(other) for other in others]
    del view, others
    again = [copy_by(copies, np.full(count, 3)) for _ in range(4)]
    assert where in [address(other) for other in again]
    assert len(copies._blocks) == 2


def test_a_slot_is_not_filled_again_before_all_of_its_batches_have_been_copied():
    """1. Batches 1 and 2 lie in one slot. 2. Batch 1 has been copied. 3. The copy of batch 2 is enqueued on a slow side
    stream. 4. Batch 3 is read. 5. The copy runs."""
    streams = FakeStreams("side")
    step = Step(streams)
    with queue_on(streams, workers=0, batches=2) as queue:
        plan = queue.feed.pipeline.schedule.plan(0)
        queue.feed.poll = queue.feed.get  # batches are read when the queue looks for them
        for queue.depth in (2, 4):
            queue.prefetch(BatchIndex(0, 0))
            if queue.depth == 2:
                streams.synchronize()
        for number in range(STEPS):
            step(BatchIndex(0, number), queue.take(BatchIndex(0, number)), plan.batch(number))
        streams.synchronize()
    assert step.wrong == []


@pytest.mark.parametrize("ending", ["another epoch", "the end of the pass"])
def test_a_slot_is_free_when_the_rest_of_its_batches_is_dropped(ending):
    with queue_on(FakeStreams("side"), depth=0, workers=0, batches=2) as queue:
        for number in range(2):  # batches 1 and 2 lie in one slot
            queue.take(BatchIndex(0, number))
        assert queue.feed.ready == 1
        if ending == "another epoch":
            queue.feed.prefetch(BatchIndex(5, 0))
        else:
            queue.feed.rest(wait=True)
        assert queue.feed.ready == 0
        queue.reclaim(block=True)
        assert queue.feed.pipeline.pool.count(COPYING) == 0


class Interrupted(FakeStreams):
    """A device whose first wait for all of side ends with Ctrl-C."""

    waited = False

    def happened(self, event, *, block):
        if block and not self.waited:
            self.waited = True
            raise KeyboardInterrupt
        return super().happened(event, block=block)


@pytest.mark.parametrize("batches", [1, 3])
def test_the_memory_of_an_interrupted_copy_stays_pinned_until_side_is_done(batches, monkeypatch):
    """1. A copy is enqueued on side, which is slow. 2. Ctrl-C comes while the queue closes. 3. The feed is closed, and
    the pool drops its arrays: where one of them ends, its memory is pinned no more."""
    ended = []

    def allocated(nbytes, *, pinned):
        slot = np.zeros(2 * nbytes, np.uint8)[:nbytes]  # its views refer to the whole array, as those of a shared slot
        weakref.finalize(slot, ended.append, nbytes)
        return slot

    monkeypatch.setattr(resources, "allocated", allocated)
    streams = Interrupted("side")
    with queue_on(streams, depth=0, workers=0, batches=batches) as queue:
        queue.take(BatchIndex(0, 0))
        with pytest.raises(KeyboardInterrupt):
            queue.close()
        queue.feed.close()
        assert streams.side.pending
        assert len(ended) == 1  # of two slots
        queue.close()
        assert len(ended) == 2


@pytest.mark.parametrize("kept", [lambda values: values, lambda values: values[0], lambda values: values.numpy()[1:2]])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_kept_never_changes(kept, workers):
    with loader_of(workers=workers) as loader:
        everything = [{name: kept(batch[name]) for name in ("x", "y")} for _ in range(6) for batch in loader]
        again = list(itertools.chain(loader, loader))
    assert len(everything) == 30
    assert len(again) == 10
    for part in everything:
        labels = np.atleast_1d(np.asarray(part["y"]))
        assert (np.asarray(part["x"]).reshape(len(labels), -1) == labels[:, None]).all()


def test_keeping_labels_keeps_no_slot():
    with loader_of() as loader:
        labels = [batch["y"] for _ in range(4) for batch in loader]
        assert loader.stats().slots == loader.footprint.budget.slots == 5
        assert len(labels) == 20


def test_keeping_batches_makes_more_slots_and_letting_go_frees_them():
    with loader_of() as loader:
        kept = [batch for _ in range(2) for batch in loader]
        assert loader.stats().slots > loader.footprint.budget.slots
        del kept
        assert len([seen(loader) for _ in range(3)]) == 3
        assert loader._run.engine.feed.pipeline.pool.held == 0


def test_beyond_the_budget_batches_are_copies_and_it_is_said_once(caplog):
    slot = loader_of().footprint.layout.nbytes
    with loader_of(memory_budget=6 * slot, queue_depth=2) as loader:
        kept = [batch for _ in range(4) for batch in loader]
        stats = loader.stats()
    assert stats.slots == 6
    assert stats.copied >= len(kept) - 6
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("all 6 slots hold batches that are still in use, and there can be no more")
    assert seen(kept) == [number for epoch in range(4) for number in order(epoch)]


def test_a_batch_may_be_written_to_while_others_are_filled():
    with loader_of() as loader:
        first = next(loader)
        first["x"].zero_()
        rest = list(loader)
        assert first["x"].abs().sum() == 0
        assert all((batch["x"][:, 0] == batch["y"]).all() for batch in rest)


@pytest.mark.parametrize("kind", [CopyFeed, LentFeed])
def test_a_shorter_pass_is_followed_by_the_next_epoch(kind):
    with running(length=40, workers=0) as pipeline:
        feed = kind(pipeline)
        assert feed.following(BatchIndex(0, 2)) == (0, 3)
        feed.follow(pipeline.schedule.limited(Limits(0, 3)))
        assert feed.following(BatchIndex(0, 2)) == (1, 0)


def test_keeping_one_of_several_keeps_its_slot_and_nothing_ever_changes(monkeypatch):
    monkeypatch.setattr("lit_async_data.batch.spec.SMALL_BYTES", 0)  # even these are handed out as they lie in the slot
    with running(length=24, batches=3, most_slots=100) as pipeline:
        queue = InlineQueue(LentFeed(pipeline), 1, None)
        held = {}
        for number in range(3):
            for step in range(6):
                array = queue.take(BatchIndex(number, step))["x"]
                if step % 3 == 1:
                    held[number, step] = array
        del array
        assert {key: array.tolist() for key, array in held.items()} == {
            (number, step): [4 * step + i for i in range(4)] for number, step in held
        }
        queue.close()
        assert pipeline.pool.held == len(held)
        held.clear()
        assert pipeline.pool.held == 0


def test_a_seek_lets_go_of_the_batches_that_were_to_come(monkeypatch):
    monkeypatch.setattr("lit_async_data.batch.spec.SMALL_BYTES", 0)
    with running(length=24, batches=3, depth=1) as pipeline:
        queue = InlineQueue(LentFeed(pipeline), 1, None)
        for number in range(20):
            for step in range(number % 5):
                assert queue.take(BatchIndex(number, step))["x"].tolist()[0] == 4 * step
            queue.prefetch(BatchIndex(number + 1, 0))
        queue.close()
        assert len(pipeline.pool) == 2
