"""Where memory of a device may lie in a batch: it is found and noted, or the object that hides it is named."""

import collections
import dataclasses
import datetime as dt
import enum
import functools
import pathlib
import types

import pytest
import torch

from lit_async_data.engine.device import queues
from lit_async_data.engine.device.queues import note_all


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Plain:
    def __init__(self, value):
        self.value = value

    def method(self):
        pass


class Moving(Plain):
    """Moves itself."""

    def to(self, device):
        return self


class Attributed(torch.Tensor):
    """A tensor with attributes."""


class Dict(dict):
    """A mapping with attributes."""


class Numbers(collections.UserDict):
    """A mapping of somebody else's, which moves itself."""

    def to(self, device):
        return self


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Sample:
    value: object
    number: int = 3
    name: str | None = None


class Ring:
    """Objects that refer to each other."""

    def __init__(self, value):
        self.other = Plain([self, value])


def attributed(kind, value):
    made = kind()
    made.value = value
    return made


def closed_over(value):
    return lambda: value


WRAPPINGS = [
    Slots,
    Plain,
    Moving,
    Ring,
    Sample,
    closed_over,
    functools.partial(functools.partial, print),
    lambda value: Plain(value).method,
    lambda value: {value},
    lambda value: collections.deque([value]),
    lambda value: Numbers(x=value),
    lambda value: attributed(Dict, value),
    lambda value: attributed(lambda: torch.zeros(1).as_subclass(Attributed), value),
    lambda value: types.MappingProxyType({"x": value}),
    lambda value: torch.nn.utils.rnn.pack_sequence([value, value])._replace(unsorted_indices=value),
]


@pytest.mark.parametrize("outer", WRAPPINGS)
@pytest.mark.parametrize("inner", [Slots, Sample, lambda value: [value, pathlib.Path("x")]])
def test_tensors_are_found_in_whatever_object_they_lie(inner, outer):
    one, other, noted = torch.ones(2), torch.zeros(2), []
    batch = [{"x": outer(Plain(inner(one)) if outer is not WRAPPINGS[-1] else one), "y": other, "z": [other]}]
    assert note_all(batch, lambda value: noted.append(value) or True) is None
    assert sum(value is one for value in noted) == sum(value is other for value in noted) == 1


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (lambda: torch.eye(3).to_sparse(), 2),
        (lambda: torch.eye(3).to_sparse_csr(), 3),
        (lambda: torch.eye(4).to_sparse_bsc((2, 2)), 3),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), 2),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse).*:UserWarning")
def test_tensors_that_torch_notes_nothing_of_are_noted_in_their_parts(made, parts):
    tensor, noted = made(), []

    def note(value):
        plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested
        noted.append(value) if plain else None
        return plain

    assert note_all(tensor, note) is None
    assert len([value for value in noted if value.numel()]) == parts


@pytest.mark.parametrize(
    "value",
    [
        None,
        3.5,
        pathlib.Path("x"),
        torch.float32,
        torch.device("cpu"),
        torch.Size([3]),
        torch.Generator(),
        {1, 2},
        Colour.RED,
        dt.datetime.now(dt.UTC),
        Sample(3),
        Sample(Sample("text")),
        Plain(None),
        object(),
        print,
        closed_over(3),
        Numbers(x=[3]),
        range(3),
        bytearray(3),
        int,
        torch,
    ],
)
def test_values_without_memory_hide_none(value):
    for batch in (value, {"x": torch.zeros(1), "y": [value]}, Sample(value)):
        assert note_all(batch, lambda tensor: True) is None


def test_objects_that_hide_memory_are_named(monkeypatch):
    monkeypatch.setattr(queues, "HARMLESS", set())  # as of any other type in C
    for value, kind in [(Moving(3), Moving), (Plain(dt.timedelta(1)), dt.timedelta), ([Moving({})], Moving)]:
        assert note_all({"x": torch.zeros(1), "y": value}, lambda tensor: True) is kind
    assert note_all(torch.zeros(1), lambda tensor: False) is torch.Tensor
    failing = types.SimpleNamespace(record_stream=None, inside=torch.zeros(1))
    assert note_all(failing, lambda value: isinstance(value, torch.Tensor)) is None


def test_an_object_that_refers_to_very_much_counts_as_one_that_hides_memory(monkeypatch):
    monkeypatch.setattr(queues, "MOST", 10)
    chain = functools.reduce(lambda inside, _: Plain(inside), range(20), torch.zeros(1))
    assert note_all({"x": chain}, lambda tensor: True) is not None
