"""Which values identify the data of a source, and that others give another digest."""

import numpy as np
import pytest

from lit_async_data.sources.contract.pickling import PROBES, digest, probes


@pytest.mark.parametrize(("length", "most", "step"), [(3, 5, 1), (5, 5, 1), (11, 6, 2), (10**12 + 1, 5, 10**12 // 4)])
def test_probes_are_evenly_spaced_with_both_ends(length, most, step):
    assert probes(length, most).tolist() == list(range(0, length, step))


def test_other_texts_values_types_and_shapes_give_other_digests():
    values, last = np.arange(2 * PROBES), np.arange(2 * PROBES)
    last[-1] = 0
    pieces = [(values,), (last,), (values.astype("u8"),), (values[:, None],), ("ab",), ("a", "b"), (["a", "b"],)]
    assert len({digest(*each) for each in pieces}) == len(pieces)
    assert digest(values[::-1][::-1], iter(["\ud800"])) == digest(values.copy(), ["\ud800"])
