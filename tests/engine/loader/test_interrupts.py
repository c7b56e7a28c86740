"""Ctrl-C and then on, as in a notebook: wherever it comes, every batch is handed out once, in order, as it was read."""

import contextlib
import copy
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.threads.interrupts import interrupted
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncLoader, HDF5Source, ManifestSource, prefetched
from lit_async_data.errors import ClosedError
from lit_async_data.sources.manifest import files as table_files
from lit_async_data.testing import ArraySource

LENGTH, BATCH, WIDTH = 22, 4, 20_000  # over 64 KiB per batch, so that x is handed out as the slot itself
STEPS = 6
VALUES = np.repeat(np.arange(LENGTH, dtype=np.float32), WIDTH).reshape(LENGTH, WIDTH)
OPTIONS = {"batch_size": BATCH, "shuffle": "global"}


def arrays(workers, **options):
    return AsyncLoader(ArraySource({"x": VALUES, "y": np.arange(LENGTH)}), OPTIONS | {"workers": workers}, **options)


def files(workers, h5):
    pytest.importorskip("pyarrow", reason="pip install 'lit-async-data[manifest]'")
    folder = Path(h5(y=[0])).parent
    for number, array in enumerate(VALUES):
        np.save(folder / f"{number}.npy", array)
    (folder / "t.jsonl").write_text("".join(f'{{"x": "{number}.npy", "y": {number}}}\n' for number in range(LENGTH)))
    source = ManifestSource(folder / "t.jsonl", {"x": "x", "y": "y"}, check_files="none")
    return AsyncLoader(source, OPTIONS | {"workers": workers})


def hdf5(workers, h5, *, packed, kind="thread"):
    data = {"data": VALUES, "chunks": (3, WIDTH), "compression": "gzip"} if packed else VALUES
    source = HDF5Source(h5(x=data, y=np.arange(LENGTH)), fields={"x": "x", "y": "y"})
    options = {"shuffle": "chunk", "shuffle_chunks": 2} if packed else {}
    return AsyncLoader(source, OPTIONS | options | {"workers": workers, "worker_kind": kind})


def half(batch):
    batch["x"] /= 2
    return batch | {"x": batch["x"] * 2}


KINDS = {
    "in the caller's thread": lambda h5: arrays(0),
    "one worker": lambda h5: arrays(1),
    "two workers": lambda h5: arrays(2),
    "nothing ahead": lambda h5: arrays(1, device_depth=0),
    "a transform in place": lambda h5: arrays(1, device_transform=half),
    "HDF5, two workers": lambda h5: hdf5(2, h5, packed=False),
    "gzip in the caller's thread": lambda h5: hdf5(0, h5, packed=True),
    "gzip, two workers": lambda h5: hdf5(2, h5, packed=True),
    "gzip, a reader process": lambda h5: hdf5(1, h5, packed=True, kind="process"),
    "files in the caller's thread": lambda h5: files(0, h5),
    "files, two workers": lambda h5: files(2, h5),
    "a cold disk, in the caller's thread": lambda h5: files(0, h5),
    "a cold disk, one worker": lambda h5: files(1, h5),
    "a device, copies late": lambda h5: arrays(1),
    "a device, kernels late": lambda h5: arrays(2),
    "a device, a transform": lambda h5: arrays(1, device_transform=copy.copy),
    "a device, several batches in a slot, copies late": lambda h5: hdf5(2, h5, packed=False),
    "a device, several batches in a slot, kernels late": lambda h5: hdf5(1, h5, packed=True),
}


@pytest.fixture(autouse=True)
def interrupts_in_finalisers_are_dropped(monkeypatch):
    """As Python does, with the warnings of what they left open. pytest keeps them, and so passes in their frames."""
    others, dropped = sys.unraisablehook, (KeyboardInterrupt, ResourceWarning)
    monkeypatch.setattr(sys, "unraisablehook", lambda each: None if each.exc_type in dropped else others(each))


@pytest.fixture
def loader(request, monkeypatch, h5):
    kind = request.param
    if "cold disk" in kind:
        fetched = table_files.fetched
        monkeypatch.setattr(table_files, "fetched", lambda path, most, root: (fetched(path, most, root)[0], True))
        monkeypatch.setattr(table_files, "filled", lambda *_: False)
        monkeypatch.setattr(table_files, "THREADS", 2)
    if "device" in kind:
        streams = FakeStreams("compute" if "kernels" in kind else "side")
        pretend(monkeypatch, lambda device: streams)
    with KINDS[kind](h5) as made:
        assert made.footprint.layout.batches > 1 or "several" not in kind
        made.settle = streams.synchronize if "device" in kind else lambda: None
        yield made
    made.source.close()
    if isinstance(made.source, ManifestSource):
        ahead = made.source._fields.prefetcher
        assert (ahead._reserved, ahead._coming) == (set(), {})


# Files and processes that an interrupt took from the program end when they are freed; Python warns of that.
PROCESSES = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
QUICK_KINDS = [kind for kind in KINDS if "process" not in kind]


@pytest.mark.parametrize(
    ("loader", "interrupts", "seed"),
    [
        *(pytest.param(kind, 12, 0, marks=PROCESSES if "process" in kind else []) for kind in KINDS),
        *(pytest.param(kind, 100, seed, marks=pytest.mark.long) for kind in QUICK_KINDS for seed in range(5)),
    ],
    indirect=["loader"],
)
def test_every_batch_comes_once_whatever_is_interrupted(loader, interrupts, seed):
    """Epoch after epoch with interrupts at random places, then one and a half in peace; every batch is checked."""
    drawn = random.Random(seed)
    with interrupted(None) as passed:
        next(loader)
    first = len(passed)
    at, left, kept, batches = 1, interrupts, [], loader
    while left or at < 3 * STEPS:
        # Every third comes soon after another: into what clears up behind that.
        after = (drawn.randrange(2 * first) if drawn.random() < 0.7 else drawn.randrange(60)) if left else None
        try:
            with interrupted(after):
                if at % STEPS == 0:
                    batches = iter(loader)
                batch = next(batches)
        except KeyboardInterrupt:
            left -= 1
            continue
        loader.settle()
        kept = [*kept[-3:], (batch, loader._wiring.schedule.plan(at // STEPS).batch(at % STEPS))]
        for held, wanted in kept:
            assert held["y"].tolist() == wanted.tolist()
            assert torch.equal(held["x"], torch.from_numpy(VALUES[wanted]))
        at += 1


@pytest.mark.parametrize(("workers", "steps"), [(0, 2), (1, 6)])
def test_a_pass_that_an_interrupt_kept_from_its_first_batch_gives_way(workers, steps):
    """Though the traceback of the interrupt keeps it, as in a notebook."""
    kept, options = [], {"batch_size": 4, "workers": workers, "shuffle": False}
    with AsyncLoader(ArraySource({"y": np.arange(4 * steps)}), options) as loader, contextlib.suppress(StopIteration):
        while True:
            kept.append(iter(loader))
            try:
                with interrupted(len(kept) - 1):
                    next(kept[-1])
                break
            except KeyboardInterrupt:
                assert [batch["y"][0].item() for batch in loader] == [4 * step for step in range(steps)]
                assert loader.state_dict()["epoch"] == len(kept) - 1
    assert len(kept) > 20


class Numbers:
    def __iter__(self):
        return iter([torch.full((WIDTH,), number) for number in range(STEPS)])


@pytest.fixture(params=["host", "host, nothing ahead", "device, copies late", "device, kernels late"])
def wrapped(request, monkeypatch):
    streams = FakeStreams("compute" if "kernels" in request.param else "side")
    if "device" in request.param:
        pretend(monkeypatch, lambda device: streams)

    def on(loader):
        made = prefetched(loader, 0 if "nothing" in request.param else 2, device="cpu")
        made.settle = streams.synchronize
        return made

    return on


@pytest.mark.parametrize(
    ("interrupts", "seed"), [(25, 0), *(pytest.param(150, seed, marks=pytest.mark.long) for seed in range(5))]
)
def test_a_pass_over_somebody_elses_loader_is_whole_or_says_that_it_is_not(wrapped, interrupts, seed):
    drawn, whole, kept, left = random.Random(seed), 0, [], interrupts
    with wrapped(Numbers()) as loader:
        batches, seen = iter(loader), 0
        while left or whole < 2:
            again, what = False, drawn.randrange(8)
            try:
                with interrupted(drawn.randrange(drawn.choice((60, 400, 1200))) if left else None):
                    if what == 0:  # what a callback or a notebook may ask for between two batches
                        loader._prefetch()
                    elif what == 1 and loader.device_depth:
                        loader.device_depth = drawn.choice((1, 2, 3))
                    elif what == 2 and left:
                        again = True
                        loader.stop()
                        batches = iter(loader)
                    batch = next(batches)
            except KeyboardInterrupt:
                left -= 1
            except StopIteration:
                assert seen == STEPS
                whole += 1
                again = True
            except ClosedError as error:
                assert f"ended this pass after {seen} batches" in str(error)  # noqa: PT017
                again = True
            else:
                loader.settle()
                seen = 0 if again else seen
                kept = [*kept[-3:], (batch, seen)]
                for held, number in kept:
                    assert held.unique().tolist() == [number]
                seen, again = seen + 1, False
            if again:  # also where it is not certain which pass the loader is in
                batches, seen = iter(loader), 0
