"""Lightning's counters are read and moved in one place."""

import types

from lit_async_data.lightning import counters

Fake = types.SimpleNamespace


def test_a_lightning_without_a_private_name_has_none_of_it():
    bare = Fake(fit_loop=Fake(), state=Fake(fn="fit", stage=None))
    found = [*counters.loaders_of(bare.fit_loop), *counters.iterators_of(bare.fit_loop)]
    assert [*found, *counters.unread_states(bare), *counters.loaded_checkpoint(bare)] == []
    counters.pass_states_on(bare)
