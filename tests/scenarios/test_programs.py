"""Anybody's DataLoaders under `DevicePrefetcher`, in the whole Trainer: what a program does with it, it does without.

Each program below is run as Lightning runs it, and again with the callback, on the CPU and on a pretended device whose
copies come late: batches, losses, weights and errors must be the same.

Programs that shuffle draw from torch's global generator, also in their steps. Where Lightning calls ``iter`` on a
DataLoader and throws it away, or on several before it reads any, the draws come in another
order, and there is no shuffle here.
"""

import contextlib
import gc
import weakref

import pytest
import torch
from support.lightning.programs import PROGRAMS, BrokenError, broken_at
from support.lightning.rows import WIDTH
from support.lightning.runs import WARNINGS, Run, outcome, without_callback
from support.lightning.trainer import pl, readers

from lit_async_data import DevicePrefetcher, prefetched

pytestmark = WARNINGS
WAYS = {"read in the loop": (0, False), "read by a thread, copied": (1, True)}
# Programs whose facts differ with workers: in a message, a number, or random draws.
WORKERS_TELL = "an error in a dataset", "a module reads", "dataloaders with options={'timeout'", "persistent workers"
# Each of these starts processes: a few show what all of them show in a long run.
FEW = ["loaders of a datamodule", "a dataset without a length options={}", "an error in a dataset", "early stopping"]
MATRIX = [
    pytest.param(name, way, marks=pytest.mark.long if WAYS[way][0] and not name.startswith(tuple(FEW)) else ())
    for name in PROGRAMS
    for way in WAYS
]


@pytest.mark.parametrize(("name", "way"), MATRIX)
def test_a_program_does_the_same_with_the_callback(name, way, request):
    workers, copied = WAYS[way]
    expected = without_callback(PROGRAMS[name], workers and name.startswith(WORKERS_TELL))
    if copied:
        request.getfixturevalue("pretended")
    found = outcome(PROGRAMS[name], workers, DevicePrefetcher())
    for what, value in expected.items():
        assert found[what] == value, what
    assert readers() == []


def test_the_program_really_copies(pretended):
    """Otherwise the tests above prove nothing."""
    outcome(PROGRAMS["loaders as arguments"], 1, DevicePrefetcher())
    copies = [sum(call == ("copy", "side") for call in streams.calls) for streams in pretended]
    assert len(copies) == 2, "one stream for each loader, for the whole fit"
    assert copies == [3 * 4, 3 * 2]  # three epochs; a batch travels in one block


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_keeps_loaders_or_batches_alive(fails, pretended):
    run = Run(1, "", [DevicePrefetcher()])
    if fails:
        broken_at(run, "train", 2)
    batches, loaders = [], []

    class Watching(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, number):
            batches.append(weakref.ref(batch["x"]))

    train, val = run.load(), run.val()
    loaders += [weakref.ref(train), weakref.ref(train.dataset), weakref.ref(val)]
    run.callbacks = [Watching(), *run.callbacks]
    with pytest.raises(BrokenError) if fails else contextlib.nullcontext():
        run.fit(train, val, max_epochs=2)
    callback = run.callbacks[-1]  # may live on, without the methods of the model that Lightning gives it
    for name in ("log", "log_dict"):
        vars(callback).pop(name, None)
    del train, val, run
    gc.collect()
    assert [ref() for ref in batches] == [None] * len(batches)
    assert [ref() for ref in loaders] == [None] * 3
    assert callback.waited.share >= 0


def test_no_more_batches_are_alive_than_were_asked_for(pretended):
    """Counted where they are made: each batch of the loader has one tensor."""
    alive, most = weakref.WeakSet(), []

    class Counted:
        def __iter__(self):
            for number in range(40):
                x = torch.full((2, WIDTH), float(number))
                alive.add(x)
                most.append(len(alive))
                yield {"x": x, "index": torch.full((2,), number)}

    run = Run(0, "", [DevicePrefetcher(2)])
    with prefetched(Counted(), device="cpu") as batches:
        run.fit(batches)
    assert max(most) <= 2 + 2 + 3  # on the host, on their way, and in three hands
