"""Copy verification is silent where everything is right, and every mutant of the way to a device makes it report."""

import contextlib
import functools

import pytest
from support.device import training_loop
from support.device.training_loop import SLOW, STEPS, Step, copied_ahead, on_device, pretend, queue_on, trained
from support.sources.numbered import loader_of, numbers
from waiting.on_device.copy_verifier import TransferError, verified_copies
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.order.plan import BatchIndex


@SLOW
@pytest.mark.parametrize(("depth", "transforms", "late"), [(0, True, False), (2, False, True), (2, True, True)])
def test_it_is_silent_where_every_batch_arrives(slow, depth, transforms, late):
    streams = FakeStreams(slow)
    transform = on_device(streams) if transforms else None
    assert trained(streams, epochs=2, depth=depth, transform=transform, late=late, verify_copies=7) == []
    assert ("checksum", "compute") in streams.calls


@pytest.mark.parametrize("transforms", [False, True])
def test_a_missing_wait_is_found(transforms):
    streams = training_loop.ComputeNeverWaits("side")
    with pytest.raises(TransferError, match=r"^batch \d of epoch 0: .*x.* \(found at hand-over\)"):
        trained(streams, depth=1, transform=on_device(streams) if transforms else None, verify_copies=100)


def test_a_copy_into_memory_that_the_step_still_reads_is_found_at_release():
    """1. Batch 0 is handed over, and compute sums it. 2. It is released; compute is to sum it again, late. 3. Its
    memory is given out again, and the next copy, which waits for nothing, is faster. 4. Compute sums."""
    streams = training_loop.SideNeverWaits("compute")
    with queue_on(streams, depth=1, verify_copies=2) as queue:
        queue.feed.poll = queue.feed.get
        queue.take(BatchIndex(0, 0))
        streams.synchronize()  # what is summed at hand-over is right
        queue.prefetch(BatchIndex(0, 1))
        queue.take(BatchIndex(0, 1))
        queue.prefetch(BatchIndex(0, 2))
        with pytest.raises(TransferError, match=r"batch 0 of epoch 0: .* changed .*\(found at release\)"):
            queue.take(BatchIndex(0, 2))


def test_a_slot_that_is_filled_again_too_early_is_found():
    """1. A copy is enqueued on side, which is slow. 2. Its slot is filled again. 3. The copy runs."""
    streams = training_loop.CopiesCountAsDoneAtOnce("side")
    with queue_on(streams, workers=0, verify_copies=STEPS) as queue:
        plan = queue.feed.pipeline.schedule.plan(0)
        step = Step(streams)
        copied_ahead(queue, STEPS)
        for number in range(STEPS):
            step(BatchIndex(0, number), queue.take(BatchIndex(0, number)), plan.batch(number))
        with pytest.raises(TransferError, match=r"batch 0 of epoch 0: .* did not arrive as it was read"):
            queue.verifier.settle()


@contextlib.contextmanager
def loader_on_cpu(verify_copies=100, **options):
    with verified_copies(verify_copies), loader_of(numbers(40, 5000), queue_depth=2, **options) as loader:
        yield loader


def test_changes_that_torch_does_not_see_are_found():
    with loader_on_cpu(verify_copies=2) as loader:
        batch = next(loader)
        batch["x"].numpy()[...] = 7
        next(loader)
        with pytest.raises(TransferError, match=r"batch 0 of epoch 0: batch\['x'\] changed while the step had it"):
            next(loader)


@pytest.mark.parametrize(("made", "found"), [(FakeStreams, False), (training_loop.ComputeNeverWaits, True)])
def test_a_loader_raises_what_its_canary_found(monkeypatch, made, found):
    pretend(monkeypatch, lambda device: made("side"))
    with loader_on_cpu(verify_copies=3) as loader:
        run = functools.partial(sum, (1 for _ in loader))
        if found:
            with pytest.raises(TransferError, match=r"batch 0 of epoch 0: .* did not arrive as it was read"):
                run()
        else:
            assert run() == 10
