"""Copies of small arrays: nothing that is kept changes, and memory is used again."""

import numpy as np
import pytest

from lit_async_data.batch.spec import SMALL_BYTES
from lit_async_data.engine.device.slot_feed import BLOCK, MOST_BLOCKS, SmallCopies


def numbered(number, count=100, dtype=np.int64):
    return np.full(count, number, dtype)


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64, np.complex128])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7)])
def test_a_copy_has_the_values_and_type_of_the_array(shape, dtype):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    copy = SmallCopies().of(array)
    assert copy.dtype == array.dtype
    assert copy.shape == array.shape
    assert (copy == array).all()
    assert copy.flags.writeable
    assert not np.shares_memory(copy, array)


@pytest.mark.parametrize("step", [1, 2])
def test_a_view_that_skips_is_copied(step):
    array = np.arange(24).reshape(4, 6)[:, ::step]
    copy = SmallCopies().of(array)
    assert (copy == array).all()
    assert copy.flags.c_contiguous


@pytest.mark.parametrize("count", [1, 100, 3000, SMALL_BYTES // 8, SMALL_BYTES // 8 + 1])
def test_copies_that_are_kept_never_change(count):
    copies = SmallCopies()
    kept = [copies.of(numbered(number, count)) for number in range(300)]
    for number, copy in enumerate(kept):
        assert (copy == number).all()
        copy[...] = -1  # the user writes to it
    assert all((copy == -1).all() for copy in kept)


def test_copies_beyond_the_blocks_are_ordinary_ones():
    copies = SmallCopies()
    kept = [copies.of(numbered(number, SMALL_BYTES // 8)) for number in range(2 * MOST_BLOCKS + 3)]
    assert len(copies._blocks) == MOST_BLOCKS
    assert sum(copy.base is None for copy in kept) == 3
    assert all((copy == number).all() for number, copy in enumerate(kept))


def test_a_block_is_used_again_when_the_last_view_of_its_copies_is_gone():
    copies = SmallCopies()
    count = BLOCK // 8 // 2
    first = copies.of(numbered(1, count))
    view = first[3:5]
    where = address(first)
    del first
    others = [copies.of(numbered(2, count)) for _ in range(3)]
    assert view.tolist() == [1, 1]
    assert where not in [address(other) for other in others]
    del view, others
    again = [copies.of(numbered(3, count)) for _ in range(4)]
    assert where in [address(other) for other in again]
    assert len(copies._blocks) == 2


def test_a_loop_that_keeps_nothing_needs_one_block():
    copies = SmallCopies()
    for number in range(1000):
        assert (copies.of(numbered(number)) == number).all()
    assert len(copies._blocks) == 1
