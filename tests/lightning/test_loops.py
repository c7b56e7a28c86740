"""Which loaders a Trainer's loops have, whose iterators come first, and how many batches it takes."""

import math
import types
import weakref

import pytest
from support.lightning.trainer import CountingSource, Run

from lit_async_data import AsyncLoader
from lit_async_data.errors import AsyncDataError
from lit_async_data.lightning import loops

Loop = types.SimpleNamespace


def loader_of():
    return AsyncLoader(CountingSource(width=1), {"batch_size": 4})


def test_loaders_are_found_in_lists_and_mappings():
    one, other = loader_of(), loader_of()
    nested = {"a": [one, "theirs"], "b": (other,)}
    assert loops.loaders_in(nested) == [one, "theirs", other]
    assert loops.driven_loaders(nested) == [one, other]
    assert [loops.is_only(nested), loops.is_only([{"a": one}]), loops.is_only(one)] == [False, True, True]


def test_the_iterators_of_a_loop_come_before_those_of_users():
    loader, other, own = loader_of(), loader_of(), object()
    combined = Loop(flattened=[loader], _iterator=Loop(iterators=[own]))
    fit = Loop(_combined_loader=combined, epoch_loop=Loop(val_loop=Loop()))
    run = Run(state=Loop(fn="fit", status="running"), fit_loop=fit)
    for each in (loader, other):
        loops.drive(each, weakref.ref(run))
    priority, of_other = (each._wiring.priority for each in (loader, other))
    assert (priority(own), priority(object()), of_other(own)) == (loops.TRAINING, loops.USERS, None)
    run.state.status = "finished"
    assert priority(own) is None


@pytest.mark.parametrize(
    ("status", "sanity", "number", "wanted"),
    [
        ("running", False, 0, (3, 3)),
        ("running", True, 0, (2, 3)),
        ("running", False, 1, (None, None)),  # without a limit
        ("running", True, 1, (1, None)),
        ("running", False, 2, (None, None)),  # of no loop
        ("finished", False, 0, (None, None)),
    ],
)
def test_the_trainer_says_how_many_batches_it_will_take(status, sanity, number, wanted):
    limits = {"num_val_batches": [3, math.inf], "num_sanity_val_batches": [2, 1]}
    run = Run(state=Loop(status=status), sanity_checking=sanity, **limits)
    reference = weakref.ref(run)
    assert loops.steps_wanted(reference, "val", number) == wanted
    del run
    assert loops.steps_wanted(reference, "val", number) == (None, None)


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")])
def test_the_other_ranks_get_what_rank_0_finds_or_an_error(error):
    heard, found = [], []

    def broadcast(value):
        heard.append(value)
        return heard[0]

    def work():
        if error is not None:
            raise error
        return [7]

    for rank in (0, 1):
        run = Run(is_global_zero=rank == 0, strategy=Loop(broadcast=broadcast))
        try:
            found.append(loops.on_rank_zero(run, work, "statistics"))
        except (OSError, AsyncDataError) as raised:
            found.append(str(raised))
    here, there = "the disk is gone", "statistics: rank 0 failed: OSError: the disk is gone"
    assert (len(heard), found) == (2, [[7], [7]] if error is None else [here, there])
