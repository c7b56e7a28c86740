"""Lightning's counters are read and moved in one place."""

import types

import pytest

from lit_async_data.lightning import loops

Fake = types.SimpleNamespace


@pytest.mark.parametrize(
    ("ready", "processed", "is_last", "over"), [(6, 6, True, True), (6, 5, True, False), (6, 6, False, False)]
)
def test_an_epoch_is_over_once_its_last_batch_was_trained_on(ready, processed, is_last, over):
    progress = Fake(current=Fake(ready=ready, processed=processed), is_last_batch=is_last)
    trainer = Fake(fit_loop=Fake(epoch_loop=Fake(batch_progress=progress)))
    assert (loops.trained(trainer), loops.is_over(trainer)) == (processed, over)
