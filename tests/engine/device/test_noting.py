"""Where memory of a device may lie in a batch: it is found and noted, or the object that hides it is named."""

import collections
import dataclasses
import datetime as dt
import enum
import pathlib

import numpy as np
import pytest
import torch

from lit_async_data.engine.device.queues import note_all


class Hiding:
    def __init__(self, value):
        self.value = value


class Attributed(torch.Tensor):
    """A tensor with attributes."""


class Dict(dict):
    """A mapping with attributes."""


class Numbers(collections.UserDict):
    def to(self, device):
        return self


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Sample:
    value: object
    number: int = 3
    name: str | None = None


def attributed(made, value):
    made.value = value
    return made


@pytest.mark.parametrize(
    "outer",
    [
        Sample,
        lambda value: {value},
        lambda value: {value: 3},
        lambda value: collections.deque([value]),
        lambda value: Numbers(x=value),
        lambda value: attributed(Dict(), [value]),
        lambda value: attributed(torch.zeros(1).as_subclass(Attributed), (value,)),
        lambda value: torch.nn.utils.rnn.pack_sequence([value, value])._replace(unsorted_indices=value),
    ],
)
def test_tensors_are_found_in_containers_and_in_their_attributes(outer):
    one, other, noted = torch.ones(2), torch.zeros(2), []
    batch = [{"x": outer(one), "y": other, "z": [other]}]
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


def test_values_without_memory_hide_none():
    values = [None, 3.5, pathlib.Path("x"), torch.float32, torch.device("cpu"), torch.Size([3]), torch.Generator()]
    values += [{1, 2}, Colour.RED, dt.datetime.now(dt.UTC), np.ones(3), range(3), bytearray(3), int, torch]
    for value in values:
        assert note_all({"x": torch.zeros(1), "y": [value], "z": Sample(value)}, lambda tensor: True) is None


def test_objects_that_hide_memory_are_named():
    for value in (Hiding(3), Hiding(torch.zeros(1)), [Sample(Hiding({}))]):
        assert note_all({"x": torch.zeros(1), "y": value}, lambda tensor: True) is Hiding
    assert note_all(torch.zeros(1), lambda tensor: False) is torch.Tensor
