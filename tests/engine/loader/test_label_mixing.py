"""How well labels are mixed is measured on a few batches of the order itself."""

import numpy as np
import pytest

from lit_async_data import StorageLayout
from lit_async_data.engine.loader.label_mixing import label_evenness
from lit_async_data.order.plan import EpochPlan
from lit_async_data.testing import ArraySource

LENGTH = 4096
ARRAYS = {
    "kind": np.arange(LENGTH) * 8 // LENGTH,
    "known": np.arange(LENGTH).reshape(-1, 1) % 2 == 0,
    "id": np.arange(LENGTH),  # too many values
    "same": np.zeros(LENGTH, int),
    "vector": np.zeros((LENGTH, 2), int),
    "x": np.zeros(LENGTH),
}


def order(shuffle):
    return EpochPlan(length=LENGTH, batch_size=64, shuffle=shuffle, seed=0, epoch=0)


@pytest.mark.parametrize(("shuffle", "mixed"), [("none", 0), ("global", 1)])
@pytest.mark.parametrize("parts", [None, {"a": 2048, "b": 2048}])
def test_each_label_and_the_parts_have_an_evenness(shuffle, mixed, parts):
    found = dict(label_evenness(ArraySource(ARRAYS, parts=parts), order(shuffle)))
    wanted = {"kind": mixed, "known": 1} | ({"parts": mixed} if parts else {})
    assert list(found) == list(wanted)
    assert found == pytest.approx(wanted, abs=0.05)


def test_code_of_the_user_is_not_run_for_it():
    assert not list(label_evenness(ArraySource(ARRAYS, chunks=StorageLayout(reading="python")), order("none")))
