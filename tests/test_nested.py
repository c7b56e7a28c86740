"""Any form of batch: what is taken out of it and put back leaves it as it was."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.nested import Place, flatten, rebuilt


class Leaf:
    pass


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
    pass


def default_dict(items):
    made = collections.defaultdict(list)
    made.update(items)
    return made


def is_leaf(value):
    return isinstance(value, Leaf)


ARRAY = np.arange(3)
THINGS = st.one_of(
    st.builds(Leaf),
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
    st.sampled_from([ARRAY, Leaf, range(3), array.array("d", [1.0]), Text("text"), {1, 2}, object(), torch.Size([2])]),
)
KEYS = st.one_of(st.text(max_size=2), st.integers(), st.tuples(st.integers()))


def containers(things):
    dicts = st.dictionaries(KEYS, things, max_size=3)
    lists = st.lists(things, max_size=3)
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
        st.builds(Pair, things, things),
        st.builds(Sample, things, things),
        st.builds(Frozen, things),
        st.builds(Slotted, things),
    )


BATCHES = st.recursive(THINGS, containers, max_leaves=12)


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
def test_what_is_taken_out_and_put_back_is_the_same(batch):
    leaves, skeleton = flatten(batch, is_leaf)
    assert set(leaves.values()) == set(leaves_of(batch))
    assert leaves_of(skeleton) == []
    assert_same(rebuilt(skeleton, leaves), batch)


@given(BATCHES)
def test_neither_batch_nor_skeleton_is_changed(batch):
    met = leaves_of(batch)
    leaves, skeleton = flatten(batch, is_leaf)
    others = {place: Leaf() for place in leaves}
    made = rebuilt(skeleton, others)
    assert leaves_of(made) == [others[place] for leaf in met for place in leaves if leaves[place] is leaf]
    assert leaves_of(batch) == met
    assert_same(rebuilt(skeleton, leaves), batch)


def test_leaves_are_named_by_their_places():
    batch = ([Leaf(), {"boxes": Leaf(), 3: "text"}], Pair(Leaf(), Sample(Leaf())))
    assert list(flatten(batch, is_leaf)[0]) == [
        "batch[0][0]",
        "batch[0][1]['boxes']",
        "batch[1][0]",
        "batch[1][1].image",
    ]


def test_a_batch_may_be_a_leaf():
    leaf = Leaf()
    leaves, skeleton = flatten(leaf, is_leaf)
    assert leaves == {"batch": leaf}
    assert skeleton == Place("batch")
    assert rebuilt(skeleton, {"batch": 7}) == 7


def test_the_same_leaf_twice_stays_one():
    leaf = Leaf()
    leaves, skeleton = flatten({"a": leaf, "b": [leaf, Leaf()]}, is_leaf)
    assert list(leaves) == ["batch['a']", "batch['b'][1]"]
    made = rebuilt(skeleton, {"batch['a']": "one", "batch['b'][1]": "other"})
    assert made == {"a": "one", "b": ["one", "other"]}


@pytest.mark.parametrize("container", [[1, "x", ARRAY], {"a": ARRAY}, Pair(1, ()), Sample(None), torch.Size([1, 2])])
def test_a_container_without_leaves_is_the_very_same(container):
    leaves, skeleton = flatten({"a": container, "b": Leaf()}, is_leaf)
    assert rebuilt(skeleton, leaves)["a"] is container


def test_containers_are_leaves_if_the_caller_says_so():
    packed = Pair(Leaf(), Leaf())
    leaves, _ = flatten([packed, Leaf()], lambda value: isinstance(value, Pair | Leaf))
    assert len(leaves) == 2
    assert leaves["batch[0]"] is packed


def test_what_a_class_of_its_own_holds_beside_stays():
    class Annotated(dict):
        note = None

    batch = Annotated(x=Leaf())
    batch.note = "mine"
    made = rebuilt(*reversed(flatten(batch, is_leaf)))
    assert type(made) is Annotated
    assert made.note == "mine"
    assert made is not batch


def test_results_of_torch_with_names_are_rebuilt():
    found = torch.max(torch.tensor([[1, 3], [2, 0]]), dim=1)
    leaves, skeleton = flatten(found, lambda value: isinstance(value, torch.Tensor))
    made = rebuilt(skeleton, leaves)
    assert type(made) is type(found)
    assert made.indices is found.indices


def test_as_deep_as_python_goes():
    batch = leaf = Leaf()
    for _ in range(100):
        batch = [batch]
    leaves, skeleton = flatten(copy.copy(batch), is_leaf)
    assert list(leaves.values()) == [leaf]
    assert_same(rebuilt(skeleton, leaves), batch)
