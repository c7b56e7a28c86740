"""What keeps an object from being pickled is named by its attributes."""

import functools
import threading

import numpy as np
import pytest

from lit_async_data.sources.contract.pickling import why_not_pickled


class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    def call(self, value):
        return value


class Parts:
    def __init__(self, *parts):
        self.parts = parts


class Refuses:
    def __getstate__(self):
        raise RuntimeError("never")


class Slots:
    __slots__ = ("inner", "number")

    def __init__(self):
        self.number, self.inner = 1, Locked()


class WithoutLock(Locked):
    def __getstate__(self):
        return {}


def closure():
    lock = threading.Lock()
    return lambda value: (lock, value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Locked(), "lock"),
        (Locked().call, "__self__.lock"),
        (Parts(1, Locked()), "parts[1].lock"),
        (Parts({"a": Locked()}), "parts[0]['a'].lock"),
        (Slots(), "inner.lock"),
        (closure(), "lock"),
        (functools.partial(print, 1, end=Locked()), "end.lock"),
        (functools.partial(Locked().call), "func.__self__.lock"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_attribute_that_prevents_it_is_named(value, path):
    why = why_not_pickled(value)
    assert why == f"cannot be pickled (TypeError: cannot pickle '_thread.lock' object), because of its {path}"


def test_an_object_that_refuses_is_quoted():
    assert why_not_pickled(Refuses()) == "cannot be pickled (RuntimeError: never)"
    assert why_not_pickled(threading.Lock()) == "cannot be pickled (TypeError: cannot pickle '_thread.lock' object)"


def test_an_object_that_holds_itself_is_no_endless_search():
    value = Parts(threading.Lock())
    value.parts = [value, *value.parts]
    assert why_not_pickled(value).startswith("cannot be pickled")


@pytest.mark.parametrize("value", [WithoutLock(), lambda value: value, Parts(np.zeros(3)), print], ids=range(4))
def test_what_can_be_pickled_has_no_reason(value):
    assert why_not_pickled(value) == ""
