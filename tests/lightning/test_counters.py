"""Lightning's counters are read and moved in one place."""

import types

import pytest

from lit_async_data.lightning import counters

Fake = types.SimpleNamespace


@pytest.mark.parametrize(
    ("ready", "processed", "is_last", "over"), [(6, 6, True, True), (6, 5, True, False), (6, 6, False, False)]
)
def test_an_epoch_is_over_once_its_last_batch_was_trained_on(ready, processed, is_last, over):
    progress = Fake(current=Fake(ready=ready, processed=processed), is_last_batch=is_last)
    trainer = Fake(fit_loop=Fake(epoch_loop=Fake(batch_progress=progress)))
    assert (counters.trained(trainer), counters.is_over(trainer)) == (processed, over)


@pytest.mark.parametrize(
    ("last", "processed", "completed", "expected"),
    [
        (False, 2, 2, (1, 1)),
        (False, 2, 1, (1, 1)),  # not counted as completed yet
        (False, 1, 1, (1, 1)),  # opened before
        (True, 2, 2, (2, 2)),  # it ended with its last batch
    ],
)
def test_an_epoch_that_was_cut_is_opened_again_once(last, processed, completed, expected):
    of = {"ready": 2, "processed": processed, "completed": completed}
    loops = {
        "epoch_progress": {"current": dict(of), "total": dict(of)},
        "epoch_loop.batch_progress": {"current": {"processed": 3}, "is_last_batch": last},
    }
    counters.reopen_epoch(loops)
    for found in loops["epoch_progress"].values():
        assert (found["processed"], found["completed"]) == expected


def test_a_lightning_without_a_private_name_has_none_of_it():
    bare = Fake(fit_loop=Fake(), state=Fake(fn="fit", stage=None))
    found = [*counters.loaders_of(bare.fit_loop), *counters.iterators_of(bare.fit_loop)]
    assert [*found, *counters.unread_states(bare), *counters.loaded_checkpoint(bare)] == []
    counters.pass_states_on(bare)
