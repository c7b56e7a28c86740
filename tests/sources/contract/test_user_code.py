"""A `Watch` sees what a user sets, however deep, and nothing where nothing was set."""

import functools
import pickle
import random
import threading
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lit_async_data import ConcatSource, DatasetSource, SubsetSource
from lit_async_data.sources.contract.user_code import READING, Watch, put_back, seed_generators, states
from lit_async_data.testing import ArraySource


@dataclass(slots=True)
class Slotted:
    strength: float = 0.0


class Holder:
    def __init__(self, **named):
        self.__dict__.update(named)

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return number

    def called(self, sample):
        return sample

    @functools.cached_property
    def size(self):
        return 4


class Extended(ArraySource):
    """A source of the user's on top of one of this package."""


def setting(name, value):
    return lambda given: setattr(given, name, value)


HELD, LONG = np.zeros(100), [0] * 100
CHANGES = {
    "a number": (setting("a", 1), "a"),
    "NaN for a number": (setting("a", float("nan")), "a"),
    "the same number as a float": (setting("a", 0.0), "a"),
    "a new attribute": (setting("other", None), "other"),
    "no attribute": (lambda given: delattr(given, "a"), "a"),
    "a large array": (setting("large", np.zeros(100)), "large"),
    "a long list": (setting("long", [1] * 100), "long"),
    "an item of a list": (lambda given: given.list.__setitem__(0, 2), "list"),
    "an item of a dict": (lambda given: given.dict.__setitem__("p", 0.5), "dict"),
    "the value of a small array": (lambda given: given.small.__setitem__(0, 5), "small"),
    "a small tensor": (lambda given: given.tensor.fill_(5), "tensor"),
    "a slot": (lambda given: setattr(given.slotted, "strength", 1.0), "slotted"),
    "an object in a list": (lambda given: setattr(given.list[1], "a", 1), "list"),
    "what a function encloses": (lambda given: setattr(given.function(), "a", 1), "function"),
    "a buffer of a module": (lambda given: given.module.running_mean.fill_(3), "module"),
}


def holder():
    inner = Holder(a=0)
    plain = {"a": 0, "text": "x", "nan": float("nan"), "large": HELD, "long": LONG, "dict": {"p": 0.1}}
    others = {"small": np.zeros(2), "tensor": torch.zeros(1), "slotted": Slotted(), "event": threading.Event()}
    return Holder(**plain, **others, list=[1, Holder(a=0)], function=lambda: inner, module=torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_once_and_named(kind):
    change, name = CHANGES[kind]
    given, watch = holder(), Watch()
    assert watch.look(given) == watch.look(given) == []
    change(given)
    assert name in {path[0] for path in watch.look(given, keep=False)}
    assert watch.look(given)
    assert watch.look(given) == []


@pytest.mark.parametrize(
    "same",
    [
        setting("text", str(b"x", "ascii")),
        setting("nan", float("nan")),
        lambda given: given.size,
        lambda given: given.large.__setitem__(0, 1),
        lambda given: setattr(given.module, "_last", 3),
        lambda given: given.list.append(Holder(a=0)),
        lambda given: given.list.extend(range(100)),
        lambda given: given.dict.update(cached=np.zeros(3)),
        lambda given: given.dict.clear(),
        lambda given: given.event.set(),
    ],
    ids=[
        *("equal text", "NaN again", "a cached property", "inside a large array", "what a module keeps"),
        *("a longer list", "a long list", "a fuller dict", "an empty dict", "an event"),
    ],
)
def test_what_is_equal_or_cannot_be_seen_is_no_change(same):
    given, watch = holder(), Watch()
    watch.look(given)
    same(given)
    assert watch.look(given) == []


WRAPPED = {
    "itself": lambda of: of,
    "a method": lambda of: of.called,
    "a partial": lambda of: functools.partial(of.called, 1),
    "a subset": lambda of: Subset(of, range(4)),
    "a chain": lambda of: ConcatDataset([Subset(of, range(4)), TensorDataset(torch.zeros(2))]),
    "a source": DatasetSource,
    "sources": lambda of: ConcatSource([DatasetSource(of), SubsetSource(DatasetSource(of), [1])]),
    "a class of the user": lambda of: vars(made := Extended({"x": np.zeros(3)})).update(of=of) or made,
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_an_attribute_is_seen_through_what_holds_the_object(kind):
    of, watch = Holder(a=0), Watch()
    held = WRAPPED[kind](of)
    watch.look(held)
    assert watch.look(held) == []
    of.a = 1
    assert watch.look(held)


def test_what_reading_changes_is_never_the_users():
    given, watch = holder(), Watch()
    watch.look(given)
    given.a = 1
    watch.has_been_read(given)
    given.a, given.text = 2, "y"
    assert watch.look(given) == [("text",)]


def test_a_watch_begins_anew_in_a_pickle():
    given, watch = holder(), Watch()
    watch.look(given)
    assert pickle.loads(pickle.dumps(watch)).look(given) == []
    assert watch.look(types.SimpleNamespace()) != []


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda: torch.rand(()), ["torch"]),
        (np.random.random, ["numpy"]),
        (random.random, ["random"]),
        (lambda: random.shuffle([torch.rand(()), 1]), ["torch", "random"]),
        (lambda: np.random.default_rng(0).random(), []),
    ],
)
def test_the_generators_that_were_drawn_from_are_named_and_put_back(draw, found):
    before = states()
    with put_back() as drawn:
        draw()
    assert drawn == found
    assert states() == before


def test_what_a_thread_reads_is_known_in_that_thread_and_forgotten_after_it_even_if_an_interrupt_had_left_some():
    READING.epoch, READING.key = 3, 4  # as an interrupt between two steps may leave it
    with READING.of(5, 1, alike=False):
        first, key = READING.keys(0, np.arange(3)), READING.key
        assert READING.epoch == 5
        assert len({*first, *READING.keys(1, np.arange(3))}) == 6
    assert (READING.epoch, READING.key) == (None, None)
    with READING.of(6, 1, alike=True):
        assert READING.epoch is None
        alike = READING.key
    with READING.of(7, 1, alike=True):
        assert READING.key == alike != key


def test_the_generators_have_other_numbers_for_other_keys_and_from_each_other():
    def numbers(key):
        with put_back():
            seed_generators(key)
            return round(random.random(), 6), round(np.random.random(), 6), round(float(torch.rand(())), 6)  # noqa: NPY002

    assert numbers(2**63 + 5) == numbers(2**63 + 5)
    found = {*numbers(5 * 2**32 + 5), *numbers(6 * 2**32 + 6), *numbers(5 * 2**32 + 6)}
    assert len(found) == 7  # numpy takes the upper half, torch the lower
