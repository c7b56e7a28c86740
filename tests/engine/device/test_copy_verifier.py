"""Copy verification is silent where everything is right, and every mutant of the way to a device makes it report."""

import contextlib
import functools
import re

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


def test_it_watches_as_many_batches_as_it_was_told_and_waits_for_the_device_once():
    streams = FakeStreams("compute")
    forced = []
    happened = streams.happened

    def counting(event, *, block):
        if block and event.stream is streams.compute():
            forced.append(len(watched()))
        return happened(event, block=block)

    def watched():
        return [call for call in streams.calls if call == ("checksum", "compute")]

    streams.happened = counting
    trained(streams, epochs=1, verify_copies=3)
    assert len(watched()) == 3 * 3 * 3  # three fields: as they arrived, at hand-over and at release
    assert forced == [27]


@pytest.mark.parametrize(
    ("mutant", "slow", "transforms", "when"),
    [
        (training_loop.ComputeNeverWaits, "side", False, "hand-over"),
        (training_loop.ComputeNeverWaits, "side", True, "hand-over"),
        (training_loop.SideNeverWaits, "compute", False, "hand-over"),
    ],
)
def test_a_missing_wait_is_found(mutant, slow, transforms, when):
    streams = mutant(slow)
    with pytest.raises(TransferError, match=rf"^batch \d of epoch 0: .*x.* \(found at {when}\)"):
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


@pytest.mark.parametrize(("made", "silent"), [(FakeStreams, True), (training_loop.CopiesCountAsDoneAtOnce, False)])
def test_a_slot_that_is_filled_again_too_early_is_found(made, silent):
    """1. A copy is enqueued on side, which is slow. 2. Its slot is filled again. 3. The copy runs."""
    streams = made("side")
    found = []
    with queue_on(streams, workers=0, verify_copies=STEPS) as queue:
        plan = queue.feed.pipeline.schedule.plan(0)
        step = Step(streams)
        copied_ahead(queue, STEPS)
        for number in range(STEPS):
            step(BatchIndex(0, number), queue.take(BatchIndex(0, number)), plan.batch(number))
        try:
            queue.verifier.settle()
        except TransferError as error:
            found.append(str(error))
    assert bool(found) is not silent
    assert all(re.search(r"batch 0 of epoch 0: .* did not arrive as it was read", each) for each in found)


@contextlib.contextmanager
def loader_on_cpu(verify_copies=100, **options):
    with verified_copies(verify_copies), loader_of(numbers(40, 5000), queue_depth=2, **options) as loader:
        yield loader


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("transform", [None, lambda batch: batch["x"].mul_(2), lambda batch: batch | {"s": "text"}])
def test_it_is_silent_on_the_cpu_too(depth, transform):
    with loader_on_cpu(device_depth=depth, device_transform=transform) as loader:
        for _ in range(2):
            assert len(list(loader)) == 10


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
