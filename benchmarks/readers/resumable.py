"""Loaders that can be stopped and continued: this package, torchdata's StatefulDataLoader, MosaicML Streaming.

Samples are their own numbers. Ranks are simulated: their loaders take turns.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import itertools
import json
import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from files.numbered import write_numbers

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.sources.contract.source import Source

SEED, EPOCH = 5, 2
# The samples of a step, over all ranks.
Step = list[int]


class RefusedError(Exception):
    """A loader cannot go on in this way, and says so."""


class Leg(NamedTuple):
    """How an epoch is dealt and read, from a place on."""

    ranks: int
    batch_size: int
    workers: int = 0
    depth: int = 4
    kind: str = "thread"

    @property
    def step(self) -> int:
        return self.ranks * self.batch_size


class Faults(NamedTuple):
    """Samples that did not come, samples that came too often, and steps that had others than the next ones."""

    lost: int
    repeated: int
    disordered: int


def compared(steps: Sequence[Step], wanted: Sequence[int]) -> Faults:
    """The faults of steps; the order of the samples in a step is that of its ranks, and does not count."""
    taken, due = Counter(itertools.chain.from_iterable(steps)), Counter(wanted)
    done = disordered = 0
    for step in steps:
        disordered += sorted(step) != sorted(wanted[done : done + len(step)])
        done += len(step)
    return Faults((due - taken).total(), (taken - due).total(), disordered)


class Stoppable(abc.ABC):
    """A loader of an epoch in random order, which is stopped once and continued."""

    @abc.abstractmethod
    def uninterrupted(self, ranks: int) -> list[int]:
        """The epoch in its order over all ranks."""

    @abc.abstractmethod
    def stopped(self, first: Leg, steps: int, then: Leg) -> list[Step]:
        """The first steps, and those of the rest after a resume.

        Raises:
            RefusedError: It cannot go on like that.
        """


# -- this package ------------------------------------------------------------------------------------------------------


class Ranks:
    """The loaders of all ranks."""

    def __init__(self, source: Source, leg: Leg, state: Any, options: Mapping[str, Any]) -> None:
        read = {"workers": leg.workers, "queue_depth": leg.depth, "worker_kind": leg.kind}
        given = {**options, **read, "batch_size": leg.batch_size}
        self._loaders = [AsyncLoader(source, given, rank=rank, world_size=leg.ranks) for rank in range(leg.ranks)]
        if state is not None:
            for loader in self._loaders:
                loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        for loader in self._loaders:
            loader.set_epoch(epoch)

    def steps(self) -> Iterator[Step]:
        """The steps of a pass."""
        for batches in zip(*self._loaders, strict=True):
            yield [number for (numbers,) in batches for number in numbers.tolist()]

    def state(self) -> Any:
        """The state after JSON; it has to be the same on all ranks."""
        (state,) = {json.dumps(loader.state_dict()) for loader in self._loaders}
        return json.loads(state)

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()


class Ours(Stoppable):
    """`AsyncLoader` of a file."""

    def __init__(self, folder: str, length: int) -> None:
        self._source = HDF5Source(write_numbers(folder, "contiguous", length), ("y",))

    def uninterrupted(self, ranks: int) -> list[int]:
        return [number for step in self._taken(Leg(ranks, 1))[0] for number in step]

    def stopped(self, first: Leg, steps: int, then: Leg) -> list[Step]:
        begun, state = self._taken(first, steps)
        return begun + self._taken(then, state=state)[0]

    def _taken(self, leg: Leg, steps: int | None = None, state: Any = None) -> tuple[list[Step], Any]:
        with contextlib.closing(Ranks(self._source, leg, state, {"shuffle": "global", "seed": SEED})) as ranks:
            ranks.set_epoch(EPOCH)
            return list(itertools.islice(ranks.steps(), steps)), ranks.state()


# -- torchdata ---------------------------------------------------------------------------------------------------------


class Stateful(Stoppable):
    """StatefulDataLoader with a StatefulDistributedSampler; each rank saves a state of its own."""

    def __init__(self, folder: str, length: int) -> None:
        self._length = length
        self._torchdata = importlib.import_module("torchdata.stateful_dataloader")
        self._sampler = importlib.import_module("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler

    def uninterrupted(self, ranks: int) -> list[int]:
        return [number for step in self._taken(Leg(ranks, 1))[0] for number in step]

    def stopped(self, first: Leg, steps: int, then: Leg) -> list[Step]:
        if first.ranks != then.ranks:
            raise RefusedError("each rank has a state of its own, and none for other ranks")
        begun, states = self._taken(first, steps)
        return begun + self._taken(then, states=states)[0]

    def _taken(self, leg: Leg, steps: int | None = None, states: Any = None) -> tuple[list[Step], Any]:
        loaders = [self.loader(leg, rank) for rank in range(leg.ranks)]
        for loader, state in zip(loaders, states or (), strict=states is not None):
            loader.load_state_dict(pickle.loads(state))
        try:
            passes = [iter(loader) for loader in loaders]
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise RefusedError(str(error)) from error
        taken = [
            [number for batch in batches for number in batch.tolist()]
            for batches in itertools.islice(zip(*passes, strict=True), steps)
        ]
        return taken, [pickle.dumps(loader.state_dict()) for loader in loaders]

    def loader(self, leg: Leg, rank: int) -> Any:
        sampler = self._sampler(range(self._length), num_replicas=leg.ranks, rank=rank, shuffle=True, seed=SEED)
        sampler.set_epoch(EPOCH)
        return self._torchdata.StatefulDataLoader(
            range(self._length), leg.batch_size, sampler=sampler, num_workers=leg.workers
        )


def first_of_stateful(length: int, batch_size: int, workers: int) -> tuple[float, float]:
    """Seconds to the first batch of an epoch, and after a resume at nine tenths of it."""
    contender, leg = Stateful("", length), Leg(1, batch_size, workers)
    started = time.perf_counter()
    loader = contender.loader(leg, 0)
    next(iter(loader))
    fresh = time.perf_counter() - started
    epoch = iter(loader)
    for _ in range(length * 9 // 10 // batch_size):
        next(epoch)
    state = loader.state_dict()
    started = time.perf_counter()
    loader = contender.loader(leg, 0)
    loader.load_state_dict(state)
    next(iter(loader))
    return fresh, time.perf_counter() - started


# -- MosaicML Streaming ------------------------------------------------------------------------------------------------


class Streaming(Stoppable):
    """The order that a StreamingDataset computes for the ranks and workers of one node.

    It is asked for it as its own workers ask, as one process cannot be several of its ranks.
    """

    def __init__(self, folder: str, length: int) -> None:
        logging.getLogger("streaming").setLevel(logging.ERROR)
        self._base = importlib.import_module("streaming.base")
        self._work = importlib.import_module("streaming.base.batching").generate_work
        self._world = importlib.import_module("streaming.base.world").World
        self._path = os.path.join(folder, "streaming")
        with self._base.MDSWriter(out=self._path, columns={"y": "int"}) as writer:
            for number in range(length):
                writer.write({"y": number})
        self._length = length
        self._dataset = self._base.StreamingDataset(
            local=self._path, batch_size=1, shuffle=True, shuffle_seed=SEED, num_canonical_nodes=1
        )
        self._dataset._resume(self._world(1, 1, 1, 0), EPOCH)  # sets the block of its shuffle
        self._dataset.initial_physical_nodes = 1

    def uninterrupted(self, ranks: int) -> list[int]:
        return [number for step in self._steps(Leg(ranks, 1), 0) for numbers in step for number in numbers]

    def stopped(self, first: Leg, steps: int, then: Leg) -> list[Step]:
        begun = list(itertools.islice(self._steps(first, 0), steps))
        # As its StreamingDataLoader counts: those of the first rank, times the ranks.
        position = first.ranks * sum(len(step[0]) for step in begun)
        every = [*begun, *self._steps(then, position)]
        return [list(itertools.chain.from_iterable(step)) for step in every]

    def _steps(self, leg: Leg, position: int) -> Iterator[list[list[int]]]:
        """For each step the samples of each rank. A rank takes the batches of its workers in turns."""
        self._dataset.batch_size = leg.batch_size
        workers = max(leg.workers, 1)
        try:
            (ranks,) = self._work("random", self._dataset, self._world(1, leg.ranks, workers, 0), EPOCH, position)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise RefusedError(str(error)) from error
        for batch, worker in itertools.product(range(ranks.shape[2]), range(workers)):
            step = [[int(number) for number in rank[worker, batch] if number >= 0] for rank in ranks]
            if any(step):
                yield step


OURS = "AsyncLoader"
CONTENDERS: dict[str, type[Stoppable]] = {
    OURS: Ours,
    "StatefulDataLoader (torchdata)": Stateful,
    "MosaicML Streaming": Streaming,
}


def installed(folder: str, length: int) -> Iterable[tuple[str, Stoppable]]:
    """The contenders whose libraries can be imported; a line tells of the others."""
    for name, kind in CONTENDERS.items():
        try:
            yield name, kind(folder, length)  # type: ignore[call-arg]  # all take these
        except ImportError as error:
            print(f"\n{name} takes no part: {error}")
