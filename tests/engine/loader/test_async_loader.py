import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.sources.numbered import WIDE, loader_of, numbers, order, seen
from support.threads.waits import until
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncLoader
from lit_async_data.engine.pipeline.pipeline import READY
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize(
    ("workers", "queue_depth", "device_depth"), [(0, 4, 2), (1, 1, 2), (1, 4, 0), (2, 1, 0), (2, 4, 2)]
)
def test_the_order_never_depends_on_how_it_is_read(workers, queue_depth, device_depth):
    with loader_of(workers=workers, queue_depth=queue_depth, device_depth=device_depth) as loader:
        assert [seen(loader) for _ in range(3)] == [order(0), order(1), order(2)]


def test_the_length_is_the_number_of_batches():
    with loader_of() as loader, loader_of(drop_last=True) as dropping:
        assert len(loader) == len(list(loader)) == 5
        assert len(dropping) == len(list(dropping)) == 4


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("width", [WIDE, 3], ids=["lent", "several batches to a slot"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_short_batches_are_filled_with_their_last_sample(monkeypatch, ranks, width, on_device):
    streams, found, options = FakeStreams("compute"), [], {"pad_last": True, "return_indices": True}
    if on_device:  # with a transform, without which fields would leave their block on the slow stream
        pretend(monkeypatch, lambda device: streams)
        options["device_transform"] = lambda batch: batch
    for rank in range(ranks):
        with loader_of(numbers(17, width), rank=rank, world_size=ranks, **options) as loader:
            batches = list(loader)
            assert list(loader.spec) == list(batches[0]) == ["x", "y", "mask", "index"]
        for batch in batches:
            real = int(batch["mask"].sum())
            assert batch["x"].shape == (4, width)
            assert batch["mask"].tolist() == [True] * real + [False] * (4 - real)
            assert batch["y"][real:].eq(batch["y"][real - 1]).all()
            assert torch.equal(batch["x"][:, 1], batch["y"].float())
            assert torch.equal(batch["index"], batch["y"])
            found += batch["y"][:real].tolist()
    assert sorted(found) == list(range(17))


@pytest.mark.parametrize("hook", [None, lambda sample: pytest.fail("called")])
def test_masks_need_a_key_of_their_own(hook):
    with pytest.raises(ConfigError, match="pad_last: the source has a field 'mask' of its own"):
        loader_of(ArraySource({"mask": np.arange(4)}), pad_last=True, batch_transform=hook)


def test_iterating_again_and_again_starts_no_threads_and_drops_nothing_that_was_read():
    with loader_of(workers=2) as loader:
        for _ in range(4):
            seen(loader)
        # 5 batches an epoch, and at the end no more than the slots that are read ahead.
        assert 20 <= loader.stats().read.batches <= 20 + loader.footprint.budget.slots
        for _ in range(30):
            next(iter(loader))
        assert sum("lit_async_data" in thread.name for thread in threading.enumerate()) <= 2


@pytest.mark.parametrize("length", [1, 4, 8, 12])
@pytest.mark.parametrize("keep", [False, True])
def test_no_slot_is_lost_when_an_epoch_is_shorter_than_the_queue(length, keep):
    with loader_of(numbers(length), shuffle="none", timeout_s=60) as loader:
        kept = []
        for _ in range(8):
            batches = list(loader)
            assert seen(batches) == list(range(length))
            kept += batches if keep else []
        del batches, kept
        pipeline = loader._run.engine.feed.pipeline
        assert pipeline.pool.held == 0
        until(pipeline, lambda: pipeline.ready == pipeline.pool.count(READY) == len(pipeline.pool))


def test_set_epoch_chooses_the_next_pass():
    with loader_of() as loader:
        loader.set_epoch(5)
        assert seen(loader) == order(5)
        loader.batch_sampler.sampler.set_epoch(9)
        assert seen(loader) == order(9)
        assert seen(loader) == order(10)
        loader.batch_sampler.sampler.set_epoch(10)  # as Lightning, whose epoch 9 had two passes
        assert seen(loader) == order(11)
        loader.set_epoch(10)  # as a user, who means this epoch
        assert seen(loader) == order(10)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_in_use_cannot_be_pickled_or_copied_and_says_what_to_do(way):
    with loader_of() as loader:
        next(loader)
        with pytest.raises(TypeError, match="pickle or copy its source and its options, and build another loader"):
            way(loader)


@pytest.mark.parametrize("given", [{}, {"world_size": 1}, {"rank": 1, "world_size": 2}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_would_read_the_same_samples_are_an_error_at_the_first_batch(monkeypatch, given, ranks):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    with AsyncLoader(numbers(), {"batch_size": 4, "workers": 0}, **given) as loader:
        if ranks > 1 and not given:
            with pytest.raises(ConfigError) as error:
                next(loader)
            assert error.value.option == "world_size"
        else:
            assert len(list(loader)) == len(loader)


@pytest.mark.parametrize(
    ("options", "ranks", "warned"),
    [
        ({}, (0, 1), True),
        ({"batch_by": "y"}, (0, 1), True),
        ({}, (1, 2), False),  # rank 0 says it
        ({"shuffle": False}, (0, 1), False),
        ({"weights": "y"}, (0, 1), False),
    ],
)
def test_a_loop_that_may_train_is_told_of_stored_order_that_nobody_asked_for(caplog, options, ranks, warned):
    with AsyncLoader(numbers(), {"batch_size": 4} | options, rank=ranks[0], world_size=ranks[1]) as loader:
        with torch.no_grad():
            list(loader)
        assert not caplog.messages
        list(loader)
        list(loader)
    said = "samples come in stored order; for training write shuffle=True in the loader's options, elsewhere "
    assert [said in line for line in caplog.messages] == [True] * warned


# Another rank may have another one.
@pytest.mark.parametrize(
    ("said", "options", "ranks", "seed"),
    [("4", {}, 1, 4), ("4", {"seed": 7}, 1, 7), ("4", {}, 2, 0), ("x", {}, 1, 0)],
)
def test_without_a_seed_it_is_that_of_lightning(monkeypatch, said, options, ranks, seed):
    with loader_of(**options, world_size=ranks) as found, loader_of(seed=seed, world_size=ranks) as wanted:
        monkeypatch.setenv("PL_GLOBAL_SEED", said)
        next(found)
        assert found.state_dict()["seed"] == found.order.decks.seed == seed
        found.set_epoch(0)
        first, second = seen(wanted), seen(wanted)
        assert seen(found) == first
        monkeypatch.setenv("PL_GLOBAL_SEED", "11")  # too late for the epochs of this run
        assert seen(found) == second
