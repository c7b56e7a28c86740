"""Batches of any form: taking the leaves out and putting them back restores the batch."""

import array
import collections
import collections.abc
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.batch.tree import flatten, leaves_in, rebuilt
from lit_async_data.errors import FormatError


class Leaf: ...


class Pair(NamedTuple):
    first: Any
    second: Any = "default"


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    boxes: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    mask: Any


class Text(str):
    __slots__ = ()


def default_dict(items):
    result = collections.defaultdict(list)
    result.update(items)
    return result


def is_leaf(value):
    return isinstance(value, Leaf)


ARRAY = np.arange(3)
VALUES = st.one_of(
    st.builds(Leaf),
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
    st.sampled_from([ARRAY, Leaf, range(3), array.array("d", [1.0]), Text("text"), {1, 2}, object(), torch.Size([2])]),
)
KEYS = st.one_of(st.text(max_size=2), st.integers(), st.tuples(st.integers()))


def containers(values):
    dicts = st.dictionaries(KEYS, values, max_size=3)
    lists = st.lists(values, max_size=3)
    return st.one_of(
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(default_dict),
        dicts.map(collections.UserDict),
        dicts.map(types.MappingProxyType),
        lists,
        lists.map(tuple),
        lists.map(collections.deque),
        lists.map(collections.UserList),
        st.builds(Pair, values, values),
        st.builds(Sample, values, values),
        st.builds(Frozen, values),
        st.builds(Slotted, values),
    )


BATCHES = st.recursive(VALUES, containers, max_leaves=12)


def parts(value):
    """The children of a container; None for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict | collections.UserDict | types.MappingProxyType):
        return dict(value)
    if isinstance(value, list | tuple | collections.deque | collections.UserList):
        return dict(enumerate(value))
    return None


def assert_same(one, other):
    assert type(one) is type(other)
    ours, theirs = parts(one), parts(other)
    if ours is None:
        assert one is other or one == other
        return
    assert list(ours) == list(theirs)
    for key in ours:
        assert_same(ours[key], theirs[key])
    if isinstance(one, collections.defaultdict):
        assert one.default_factory is other.default_factory


def leaves_of(value):
    children = parts(value)
    if children is None:
        return [value] if is_leaf(value) else []
    return [leaf for child in children.values() for leaf in leaves_of(child)]


@given(BATCHES)
def test_flatten_and_rebuilt_restore_the_batch_and_change_neither_it_nor_the_skeleton(batch):
    met = leaves_of(batch)
    leaves, skeleton = flatten(batch, is_leaf)
    assert set(leaves.values()) == set(met) == set(leaves_in(batch, is_leaf).values())
    assert leaves_of(skeleton) == []
    others = {place: Leaf() for place in leaves}
    result = rebuilt(skeleton, others)
    assert leaves_of(result) == [others[place] for leaf in met for place in leaves if leaves[place] is leaf]
    assert leaves_of(batch) == met
    assert_same(rebuilt(skeleton, leaves), batch)


def test_leaves_are_named_by_their_paths_and_one_that_is_there_twice_stays_one():
    twice = Leaf()
    batch = ([twice, {"boxes": Leaf(), 3: "text"}], Pair(Leaf(), Sample(twice)))
    leaves, skeleton = flatten(batch, is_leaf)
    assert list(leaves) == ["batch[0][0]", "batch[0][1]['boxes']", "batch[1][0]"]
    assert rebuilt(skeleton, {place: place for place in leaves})[1][1].image == "batch[0][0]"


def test_results_of_torch_with_names_are_rebuilt():
    found = torch.max(torch.tensor([[1, 3], [2, 0]]), dim=1)
    leaves, skeleton = flatten(found, lambda value: isinstance(value, torch.Tensor))
    result = rebuilt(skeleton, leaves)
    assert type(result) is type(found)
    assert result.indices is found.indices


class Spread(tuple):
    """Its ``__new__`` takes the elements one by one, as in many tuple classes."""

    __slots__ = ()

    def __new__(cls, *elements):
        return super().__new__(cls, elements)


class Noted(Spread): ...


class Annotated(dict): ...


@pytest.mark.parametrize("batch", [Annotated(x=Leaf()), Noted(Leaf(), Spread(Leaf()))], ids=["dict", "tuple"])
def test_class_and_attributes_are_kept_also_where_a_tuple_has_its_own_new(batch):
    batch.note = "mine"
    result = rebuilt(*reversed(flatten(batch, is_leaf)))
    assert type(result) is type(batch)
    assert (result, result.note) == (batch, "mine")
    assert result is not batch
    assert [type(each) for each in result] == [type(each) for each in batch]


class Odd(collections.abc.Sequence):
    """Its constructor does not take a list of elements."""

    def __init__(self, *elements):
        self.elements = elements

    def __getitem__(self, index):
        return self.elements[index]

    def __len__(self):
        return len(self.elements)


class OddMapping(collections.abc.Mapping):
    def __init__(self, name):
        self.content = {"x": Leaf(), "name": name}

    def __getitem__(self, key):
        return self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


@pytest.mark.parametrize("odd", [Odd(Leaf(), 2), OddMapping("text")])
def test_a_container_that_cannot_be_rebuilt_is_an_error_that_names_class_and_path(odd):
    kind = type(odd).__name__
    said = rf"^batch\['here'\] is a {kind}, which cannot be built.*Give {kind} a method"
    with pytest.raises(FormatError, match=said):
        flatten({"here": odd}, is_leaf)


def test_a_container_that_cannot_be_rebuilt_may_be_a_leaf_or_hold_none():
    odd = Odd(1, [2])
    assert flatten([odd, Leaf()], is_leaf)[1][0] is odd
    assert leaves_in([odd, leaf := Leaf()], is_leaf) == {"batch[1]": leaf}
    odd = Odd(Leaf())
    assert flatten(odd, lambda value: isinstance(value, Odd))[0] == {"batch": odd}
