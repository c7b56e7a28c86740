"""Lightning's counters are read and moved in one place."""

import types

import pytest

from lit_async_data.lightning import counters

Fake = types.SimpleNamespace


def trainer_at(ready, processed, *, is_last=False):
    now = Fake(ready=ready, started=ready, processed=processed, completed=processed)
    loop = Fake(batch_progress=Fake(current=now, is_last_batch=is_last))
    return Fake(num_training_batches=10, fit_loop=Fake(epoch_loop=loop))


@pytest.mark.parametrize(
    ("ready", "processed", "is_last", "over"), [(6, 6, True, True), (6, 5, True, False), (6, 6, False, False)]
)
def test_an_epoch_is_over_once_its_last_batch_was_trained_on(ready, processed, is_last, over):
    trainer = trainer_at(ready, processed, is_last=is_last)
    assert (counters.trained(trainer), counters.is_over(trainer)) == (processed, over)


def test_all_counters_move_by_the_same_number():
    trainer = trainer_at(4, 3)
    counters.set_left(trainer, 2, is_last=False)
    assert [getattr(counters.batches(trainer), name) for name in counters.COUNTERS] == [9, 9, 8, 8]
    assert not counters.is_last(trainer)


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
    counters.check_workers(bare, None)
