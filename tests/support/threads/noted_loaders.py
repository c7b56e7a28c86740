"""Loaders that write down who calls what, and the threads that read them."""

import threading

import torch
from torch.utils.data import IterableDataset

from support.threads.waits import LONG, until


class Loader:
    """Writes down who calls what; each ``next`` can be held up."""

    def __init__(self, batches=6, *, fail=(), gate=None):
        self.batches = batches
        self.fail = dict(fail)
        self.gate = gate
        self.waiting = threading.Event()
        self.log = []
        self.threads = []
        self.epoch = 0
        self.batch_size = 3

    def __len__(self):
        return self.batches

    def set_epoch(self, epoch):
        self.log.append(f"set_epoch {epoch}")
        self.epoch = epoch

    def __iter__(self):
        self.log.append("iter")
        assert threading.current_thread() is threading.main_thread()
        return Iterator(self)


class Iterator:
    def __init__(self, loader):
        self.loader, self.step = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        loader, step = self.loader, self.step
        loader.threads.append(threading.current_thread())
        if loader.gate is not None and step:
            loader.waiting.set()
            assert loader.gate.acquire(timeout=LONG)
        if step >= loader.batches:
            raise StopIteration
        self.step += 1
        if step in loader.fail:
            raise loader.fail[step]
        return {"x": torch.full((2, 2), step), "epoch": loader.epoch, "step": step}


class Stateful(Loader):
    """One whose state is what its last iterator has given, as with StatefulDataLoader."""

    start = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.state = {"given": 0}

    def __iter__(self):
        iterator = super().__iter__()
        iterator.step, self.start = self.start, 0
        return self.counted(iterator)

    def counted(self, iterator):
        for batch in iterator:
            self.state["given"] = batch["step"] + 1
            yield batch
        self.state["given"] = 0

    def state_dict(self):
        return self.state  # the very dict that it goes on to change

    def load_state_dict(self, state):
        self.log.append("load")
        self.state, self.start = dict(state), state["given"]


class MineError(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def steps(batches):
    return [batch["step"] for batch in batches]


def listed(batches):
    return [batch[0].item() for batch in batches]


def numbers(count=6):
    return [torch.full((3,), float(number)) for number in range(count)]


def read_ahead(loader, count):
    """Wait until at least `count` batches are ready on the host."""
    found = loader._run.engine.feed.reader
    until(found, lambda: len(found.pulled) >= count)


def reader():
    return [thread for thread in threading.enumerate() if "lit_async_data reader" in thread.name]
