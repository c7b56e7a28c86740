"""Plans of an epoch, from all options of the order at once."""

import dataclasses

from lit_async_data.order.decks import Decks
from lit_async_data.order.plan import EpochPlan, LengthPlan

OF_DECKS = {field.name for field in dataclasses.fields(Decks)}


def plan_of(*, seed=0, **options):
    decks = Decks(seed=seed, **{name: value for name, value in options.items() if name in OF_DECKS})
    kind = EpochPlan if decks.buckets is None else LengthPlan
    return kind(decks=decks, **{name: value for name, value in options.items() if name not in OF_DECKS})
