"""Errors come at the place of their batch, and cost no other."""

import pytest
from support.threads.number_pipelines import WHOLE, failing_at, running, taken

from lit_async_data.engine.device.feeds import LentFeed
from lit_async_data.engine.device.queues import InlineQueue
from lit_async_data.engine.pipeline.pipeline import FILLING, READY
from lit_async_data.errors import ReadError, SourceError
from lit_async_data.order.plan import BatchIndex, EpochPlan

pytestmark = pytest.mark.usefixtures("however_slow_the_machine_is")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_comes_at_its_place_once_and_the_order_goes_on(workers):
    with running(failing_at(4, OSError(5, "Input/output error")), workers=workers) as pipeline:
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        with pytest.raises(ReadError, match=r"batch 1 of epoch 0 \(samples 4, 5, 6, … \(4 in all\)\)") as caught:
            taken(pipeline, BatchIndex(0, 1))
        assert caught.value.sample_id == 4
        assert caught.value.worker == (None if workers == 0 else pytest.approx(0, abs=1))
        assert isinstance(caught.value.__cause__, OSError)
        assert taken(pipeline, BatchIndex(0, 2)) == WHOLE[2]
        assert pipeline.pool.count(FILLING) + pipeline.pool.count(READY) <= len(pipeline.pool)


def test_an_error_that_says_where_it_happened_is_passed_on_as_it_is():
    error = SourceError("f.h5:/data[4]: bad", file="f.h5", row=4)
    with running(failing_at(0, error)) as pipeline, pytest.raises(SourceError) as caught:
        taken(pipeline, BatchIndex(0, 0))
    assert caught.value is error
    assert (error.stage, error.worker, error.row) == ("read", 0, 4)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RecursionError(), MemoryError()], ids=repr)
def test_nothing_that_a_read_raises_kills_a_worker(error):
    with running(failing_at(0, error)) as pipeline:
        with pytest.raises(ReadError, match=type(error).__name__):
            taken(pipeline, BatchIndex(0, 0))
        assert taken(pipeline, BatchIndex(0, 1)) == WHOLE[1]


def test_an_interrupt_in_the_callers_thread_is_an_interrupt():
    """What follows it is the loader's business: see test_interrupts.py."""
    with running(failing_at(0, KeyboardInterrupt()), workers=0) as pipeline, pytest.raises(KeyboardInterrupt):
        taken(pipeline, BatchIndex(0, 0))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_planning_comes_at_its_place(workers, monkeypatch):
    """It killed the worker, whose death then had no cause."""
    stretch = EpochPlan.stretch

    def planned(self, step, count):
        if step == 1:
            raise MemoryError("no more")
        return stretch(self, step, count)

    monkeypatch.setattr(EpochPlan, "stretch", planned)
    with running(workers=workers) as pipeline:
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        with pytest.raises(ReadError, match=r"^batch 1 of epoch 0 could not be read: MemoryError: no more$") as caught:
            taken(pipeline, BatchIndex(0, 1))
        assert isinstance(caught.value.__cause__, MemoryError)
        assert taken(pipeline, BatchIndex(0, 2)) == WHOLE[2]


def test_of_batches_read_together_only_the_bad_one_fails():
    with running(failing_at(9, SourceError("nine")), length=24, batches=6) as pipeline:
        queue = InlineQueue(LentFeed(pipeline), 1, None)
        for step in range(6):
            if step == 2:
                with pytest.raises(SourceError) as caught:
                    queue.take(BatchIndex(0, step))
                assert "in batch 2 of epoch 0, samples 8, 9, 10, … (4 in all)" in caught.value.__notes__
            else:
                assert queue.take(BatchIndex(0, step))["x"].tolist() == [4 * step + i for i in range(4)]
        queue.close()
