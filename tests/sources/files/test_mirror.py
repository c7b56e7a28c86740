"""A mirror has the bytes of its object or says that it lacks them, whoever else writes it."""

import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
from support.files.mirrors import DATA, SIZE, get, opened

from lit_async_data.sources.files import mirror as mirror_module
from lit_async_data.sources.files.mirror import BLOCK, Ring, runs


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, SIZE - 1), st.integers(1, 3 * BLOCK)), max_size=12),
    st.sets(st.integers(0, 7), max_size=3),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_whatever_is_not_missing_is_right_in_two_processes_and_after_a_crash(tmp_path_factory, steps, lost):
    folder = tmp_path_factory.mktemp("mirror")
    mirrors = [opened(folder), opened(folder)]
    for which, begin, length in steps:
        begins, ends = np.array([begin]), np.array([min(begin + length, SIZE)])
        for first, last in runs(mirrors[which].missing(begins, ends), 0, 2):
            mirrors[which].store(first * BLOCK, get(first * BLOCK, min(last * BLOCK, SIZE)))
        for mirror in mirrors:
            assert not len(mirror.missing(begins, ends))
            assert np.array_equal(mirror.map[begins[0] : ends[0]], DATA[begins[0] : ends[0]])
    with open(folder / "x.data", "r+b") as file:  # the CRCs are on the disk, and these bytes never got there
        for block in lost:
            file.seek(block * BLOCK)
            file.write(bytes(min(BLOCK, SIZE - block * BLOCK)))
    later = opened(folder)
    missing = set(later.missing(np.array([0]), np.array([SIZE])).tolist())
    assert lost <= missing
    for block in set(range(8)) - missing:
        assert np.array_equal(later.map[block * BLOCK :][:BLOCK], DATA[block * BLOCK :][:BLOCK])
    assert later.holds(0, SIZE) == (not missing)


def test_a_block_that_comes_again_is_not_freed_while_it_is_written(tmp_path, monkeypatch):
    mirror, pwrite = opened(tmp_path, ring=Ring(2**30)), os.pwrite
    mirror.store(0, get(0, 2 * BLOCK))
    mirror.drop(slice(0, 2))

    def interrupted(descriptor, data, at):
        written = pwrite(descriptor, data, at)
        mirror.free(slice(0, 2))
        return written

    with monkeypatch.context() as patch:
        patch.setattr(mirror_module.os, "pwrite", interrupted)
        mirror.store(0, get(0, BLOCK))
    assert np.array_equal(mirror.map[:BLOCK], DATA[:BLOCK])
    assert not mirror.map[BLOCK : 2 * BLOCK].any()


@hypothesis.given(st.sets(st.integers(0, 40)), st.integers(0, 3), st.integers(1, 6))
def test_runs_hold_all_blocks_no_wide_gaps_and_not_too_many(blocks, gap, most):
    found = runs(np.array(sorted(blocks), np.int64), gap, most)
    held = [block for run in found for block in range(*run)]
    assert blocks <= set(held)
    assert len(held) == len(set(held))
    assert held == sorted(held)
    assert all(end - begin <= most for begin, end in found)
    assert all(min(abs(block - other) for other in blocks) <= gap for block in held)
