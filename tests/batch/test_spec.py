"""The strides of channels-last fields, the spec of several sources, and the size of slots."""

import numpy as np
import pytest
import torch

from lit_async_data.batch.spec import ALIGNMENT, SMALL_BYTES, BatchLayout, BatchSpec, FieldSpec, longest_of


@pytest.mark.parametrize(
    ("stored", "channel", "strides"),
    [
        ((28, 30, 1), 2, (840, 840, 30, 1)),  # one channel: as channels first
        ((1, 1, 3), 2, (3, 1, 1, 1)),  # and one pixel
        ((5, 28, 30, 1), 3, (4200, 4200, 840, 30, 1)),
        ((1, 3, 30), 1, (90, 30, 30, 1)),
        ((28, 30, 3), 2, (2520, 1, 90, 3)),
        ((1, 30, 3), 2, (90, 1, 90, 3)),
    ],
)
@pytest.mark.parametrize("kind", [np, torch])
def test_axes_of_length_1_get_the_strides_that_torch_gives_them(stored, channel, strides, kind):
    shape = (stored[channel], *stored[:channel], *stored[channel + 1 :])
    values = np.arange(4 * np.prod(stored), dtype=np.float32).reshape(4, *stored)
    given = values if kind is np else torch.from_numpy(values)
    found = FieldSpec(shape, np.dtype("f4"), channel).delivered(given)
    assert np.array_equal(found, np.moveaxis(values, channel + 1, 1))
    assert np.shares_memory(found, values)
    assert torch.as_tensor(found).stride() == strides


def test_only_the_length_of_samples_of_variable_length_is_the_longest_of_several_specs():
    def spec(length, width):
        fields = {"x": FieldSpec((length, 2), np.dtype("f4"), ragged=True), "y": FieldSpec((width,), np.dtype("f4"))}
        return BatchSpec(fields, as_mapping=True)

    found = longest_of([spec(5, 3), spec(7, 4)])
    assert (found["x"].shape, found["y"].shape) == ((7, 2), (3,))


@pytest.mark.parametrize("capacity", [1, 2, SMALL_BYTES // 800, SMALL_BYTES // 800 + 1])
def test_a_slot_has_room_for_the_samples_of_a_batch(capacity):
    layout = BatchLayout(BatchSpec({"x": FieldSpec((100,), np.dtype("f8"))}, as_mapping=True), capacity)
    assert layout.nbytes == -(-capacity * 800 // ALIGNMENT) * ALIGNMENT
    assert layout.small == (("x",) if capacity * 800 <= SMALL_BYTES else ())
