"""Loaders of other libraries: who draws random numbers when, states that cannot be asked for, Accelerate's marks."""

from __future__ import annotations

import random
import threading
import weakref

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.threads.interrupts import interrupted
from support.threads.waits import LONG, until
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from lit_async_data import DevicePrefetcher, prefetched
from lit_async_data.lightning.trainer.compat import pl
from lit_async_data.prefetch.draw_watch import DrawWatch
from lit_async_data.testing import FakeStreams


@pytest.fixture(autouse=True)
def feeders_end():
    """Threads that multiprocessing leaves to themselves when workers have ended."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(LONG)


# -- random numbers ----------------------------------------------------------------------------------------------------

DRAWS = {
    "torch": lambda: torch.randint(1000, (1,)).item(),
    "numpy": lambda: int(np.random.randint(1000)),  # noqa: NPY002  # the global generator is what this is about
    "random": lambda: random.randrange(1000),
}
SEEDS = (torch.manual_seed, np.random.seed, random.seed)
BATCHES = 14


class Sampler:
    """Draws a sample from a global generator for every ``every``-th batch; in a thread it waits until it may."""

    def __init__(self, name, every=1):
        self.name = name
        self.every = every
        self.gate = threading.Semaphore(10**6)

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for step in range(BATCHES):
            if threading.current_thread() is not threading.main_thread():
                assert self.gate.acquire(timeout=LONG)
            yield DRAWS[self.name]() if step % self.every == 0 else step


class Squares:
    """A dataset whose workers draw nothing."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index * index


def with_workers(name):
    sampler = Sampler(name)
    return sampler, DataLoader(Squares(), batch_size=1, sampler=sampler, num_workers=1)


def by_hand(name):
    """A loader of another library, which draws in its own `next`."""
    sampler = Sampler(name)

    class Loader:
        def __iter__(self):
            return (torch.tensor([index * index]) for index in sampler)

    return sampler, Loader()


def seeded(made, name, *, wrapped=True, pace=None):
    """What a seeded loop sees and draws itself.

    With ``pace="late"`` the loop goes on only when as much has been read ahead as there may be; with ``"early"`` a
    reader may draw for the next batch only when the loop has drawn.
    """
    sampler, loader = made(name)
    for seed in SEEDS:
        seed(7)
    seen = []
    with prefetched(loader, 2, device="cpu") as batches:
        if pace == "early":
            sampler.gate = threading.Semaphore(0)
        for batch in batches if wrapped else loader:
            if pace == "late":
                full(batches)
            seen.append((batch.item(), DRAWS[name]()))  # the loop's own draw: dropout, say
            sampler.gate.release()
    return seen


def full(batches):
    """Wait until nothing more is read ahead; at once where nobody reads ahead."""
    found = batches.machinery.engine.feed.reader
    if found is not None and found.worker is not None:
        until(found, lambda: found.ready >= found.depth or not found.reading)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("made", [with_workers, by_hand])
def test_a_seeded_run_is_the_same_whoever_is_faster_where_each_batch_is_drawn(made, name, caplog):
    """Late: 1. The loop has a batch. 2. The thread draws for the next two. 3. The loop draws. Early: 2 and 3 the other
    way round. Without us: the loop draws once for each batch that the loader draws for."""
    wanted = seeded(made, name, wrapped=False)
    assert len({tuple(wanted), tuple(seeded(made, name, wrapped=False))}) == 1
    assert seeded(made, name, pace="late") == wanted
    assert seeded(made, name, pace="early") == wanted
    lines = [record.getMessage() for record in caplog.records if "draws random numbers" in record.getMessage()]
    assert len(lines) == 2  # once for each loader that was wrapped and read
    assert lines[0].startswith(f"the loader draws random numbers from the global generator of {name} for its batches")


class Dropping(pl.LightningModule):
    """Draws in each step, as dropout does, and writes down what it has seen and drawn."""

    def __init__(self, name):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.name = name
        self.seen = []

    def training_step(self, batch, number):
        self.seen.append((batch.item(), DRAWS[self.name]()))
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", DRAWS)
def test_a_seeded_trainer_sees_and_draws_the_same_under_the_callback(name, tmp_path):
    found = []
    for callbacks in [], [DevicePrefetcher()]:
        model = Dropping(name)
        for seed in SEEDS:
            seed(7)
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=callbacks,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, with_workers(name)[1])
        found.append(model.seen)
    assert found[0] == found[1]
    assert len(found[0]) == 2 * BATCHES


def test_a_loader_that_draws_is_read_in_the_thread_of_its_consumer_pass_after_pass(caplog):
    _, loader = by_hand("torch")
    with prefetched(loader, 2, device="cpu") as batches:
        for _ in range(3):
            for _ in batches:
                assert batches.machinery.engine.feed.reader.worker is None
        assert batches.fill.host_depth == 0
        batches.device_depth = 3
        next(iter(batches))
        assert batches.machinery.engine.feed.reader.worker is None
    assert caplog.text.count("draws random numbers") == 1


def test_a_loader_that_draws_on_a_device_with_streams_is_the_same_too(monkeypatch):
    wanted = seeded(by_hand, "torch", wrapped=False)
    streams = FakeStreams("side")
    pretend(monkeypatch, lambda device: streams)
    _, loader = by_hand("torch")
    for seed in SEEDS:
        seed(7)
    seen = []
    with prefetched(loader, 2, device="cpu") as batches:
        for batch in batches:
            streams.synchronize()
            seen.append((batch.item(), DRAWS["torch"]()))
    assert seen == wanted


@pytest.mark.parametrize("made", [lambda order: order, list])
def test_an_order_that_is_drawn_with_the_first_batch_is_read_ahead(made, caplog):
    class Shuffled:
        def __iter__(self):
            order = list(range(BATCHES))
            random.shuffle(order)
            yield from made(order)

    with prefetched(Shuffled(), 2, device="cpu") as batches:
        for _ in range(2):
            assert sorted(batches) == list(range(BATCHES))
        next(iter(batches))
        next(batches)
        assert batches.machinery.engine.feed.reader.worker is not None
    assert "is_random" not in caplog.text


def test_a_sampler_that_draws_for_several_batches_at_a_time_is_seen(caplog):
    sampler = Sampler("torch", every=5)
    loader = DataLoader(Squares(), batch_size=1, sampler=sampler, num_workers=1)
    with prefetched(loader, 2, device="cpu") as batches:
        assert len(list(batches)) == BATCHES
        assert batches.fill.host_depth == 0
    assert caplog.text.count("draws random numbers") == 1


class Own(RandomSampler):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("sampler", "known"),
    [
        (SequentialSampler(Squares()), True),
        (RandomSampler(Squares()), True),
        (Weighted([0.5, 0.5], 2), True),
        (DistributedSampler(Squares(), num_replicas=2, rank=0), True),
        (RandomSampler(Squares(), replacement=True, generator=torch.default_generator), False),
        (Own(Squares()), False),
    ],
)
def test_samplers_of_torch_are_known_to_draw_when_a_pass_begins(sampler, known):
    batches = BatchSampler(sampler, 2, drop_last=False)
    assert DrawWatch(DataLoader(Squares(), sampler=sampler)).over is known
    assert DrawWatch(DataLoader(Squares(), batch_sampler=batches)).over is known
    assert DrawWatch(DataLoader(Squares(), batch_size=None, sampler=sampler)).over is known


def test_a_known_loader_is_read_ahead_from_its_first_batch_on():
    with prefetched([1, 2, 3], 2, device="cpu") as batches:
        next(batches)
        assert batches.machinery.engine.feed.reader.worker is not None
    assert not DrawWatch(iter([1])).over


# -- states ------------------------------------------------------------------------------------------------------------


class Prepared:
    """As Accelerate's loaders without ``use_stateful_dataloader``: the methods are there, and their state is not."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_state_that_cannot_be_asked_for_is_no_error_of_a_batch(depth):
    with prefetched(Prepared([1, 2, 3]), depth, device="cpu") as batches:
        for _ in range(2):
            assert list(batches) == [1, 2, 3]
        assert next(iter(batches)) == 1
        for _ in range(2):
            with pytest.raises(AttributeError, match="dl_state_dict"):
                batches.state_dict()
        assert list(batches) == [1, 2, 3]
        with pytest.raises(AttributeError, match="base_dataloader"):
            batches.load_state_dict({})
        assert list(batches) == [1, 2, 3]


def test_a_state_that_is_no_method_is_none():
    class Odd(list):
        state_dict = None
        load_state_dict = None

    with prefetched(Odd([1, 2]), device="cpu") as batches:
        assert list(batches) == [1, 2]
        assert batches.state_dict is None


# -- Accelerate's marks ------------------------------------------------------------------------------------------------


class GradientState:
    """As Accelerate's: a list of the loaders that are iterated over, of which the newest says how far it is."""

    def __init__(self):
        self.references = [None]
        self.num_steps = 4

    def _add_dataloader(self, loader):
        assert threading.current_thread() is threading.main_thread()
        self.references = [*self.references, weakref.ref(loader)]

    def _remove_dataloader(self, loader):
        assert threading.current_thread() is threading.main_thread()
        self.references = [each for each in self.references if each is None or each() is not loader]

    @property
    def active(self):
        return self.references[-1] and self.references[-1]()

    @property
    def end_of_dataloader(self):
        return False if self.active is None else self.active.end_of_dataloader

    @property
    def remainder(self):
        return -1 if self.active is None else self.active.remainder


class Accelerated:
    """As Accelerate's loaders: reads one batch ahead of what it gives, and sets its marks as it gives."""

    end_of_dataloader = False
    remainder = -1

    def __init__(self, batches, state, remainder):
        self.batches = batches
        self.gradient_state = state
        self.samples = remainder

    def __iter__(self):
        self.end_of_dataloader, self.remainder = False, self.samples
        self.gradient_state._add_dataloader(self)
        iterator = iter(self.batches)
        current = next(iterator)
        for following in iterator:
            yield current
            current = following
        self.end_of_dataloader = True
        yield current
        self.gradient_state._remove_dataloader(self)


def marked(loader, state, inner=None):
    """What a loop sees beside each batch, and after the last."""
    seen = []
    for batch in loader:
        seen.append((batch, state.end_of_dataloader, state.remainder))
        if inner is not None and batch == 1:
            seen.append(marked(inner, state))
    return [*seen, ("end", state.end_of_dataloader, state.remainder, len(state.references))]


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_marks_of_accelerate_are_those_of_the_batch_in_hand(depth):
    state = GradientState()
    loader, inner = Accelerated([0, 1, 2, 3, 4, 5], state, 3), Accelerated([7, 8, 9], state, 1)
    wanted = marked(loader, state, inner)
    assert [each[1] for each in wanted if isinstance(each, tuple)] == [False] * 5 + [True, False]
    with prefetched(loader, depth, device="cpu") as batches, prefetched(inner, depth, device="cpu") as validation:
        for _ in range(2):
            assert marked(batches, state, validation) == wanted
            assert loader.gradient_state is state


def test_marks_are_right_where_the_end_is_known_before_the_last_batch_is_handed_over(monkeypatch):
    """A device queue asks for what follows the last batch as soon as there is room."""
    streams = FakeStreams("compute")
    pretend(monkeypatch, lambda device: streams)
    state = GradientState()
    loader = Accelerated([0, 1, 2, 3, 4, 5], state, 3)
    wanted = marked(loader, state)
    seen = []
    with prefetched(loader, 2, device="cpu") as batches:
        for batch in batches:
            full(batches)
            batches.machinery.prefetch()
            seen.append((batch, state.end_of_dataloader, state.remainder))
        seen.append(("end", state.end_of_dataloader, state.remainder, len(state.references)))
    assert seen == wanted


class OlderState(GradientState):
    """Of Accelerate 1.2, which refuses to remove what is not in its list."""

    def _remove_dataloader(self, loader):
        self.references.remove(next((each for each in self.references[1:] if each() is loader), loader))


@pytest.mark.parametrize(("depth", "state"), [(0, GradientState), (0, OlderState), (2, GradientState)])
def test_marks_are_right_again_wherever_an_interrupt_came(depth, state):
    """Two batches are taken and the pass is ended, with an interrupt at one place after another."""
    place, whole = 0, False
    while not whole:
        state_now = state()
        loader = Accelerated([0, 1, 2, 3, 4, 5], state_now, 3)
        wanted = marked(loader, state_now)
        with prefetched(loader, depth, device="cpu") as batches:
            try:
                with interrupted(place):
                    taken = iter(batches)
                    assert [next(taken), next(taken)] == [0, 1]
                    batches.stop()
                whole = True
            except KeyboardInterrupt:
                place += 1
            assert marked(batches, state_now) == wanted
        assert state_now.references == [None]
        assert loader.gradient_state is state_now
    assert place > 100


def test_a_pass_that_is_left_leaves_nothing_in_accelerates_list():
    state = GradientState()
    loader = Accelerated([0, 1, 2, 3], state, 3)
    with prefetched(loader, 2, device="cpu") as batches:
        next(iter(batches))
        assert loader.gradient_state.num_steps == 4  # whoever asks the loader for it meanwhile
        assert state.active.batches is loader.batches
        assert next(iter(batches)) == 0
        assert len(state.references) == 2
    assert state.references == [None]
    assert loader.gradient_state is state
    batches = prefetched(loader, 2, device="cpu")
    next(batches)
    del batches  # dropped without being closed
    assert state.references == [None]
    assert loader.gradient_state is state
