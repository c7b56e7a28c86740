"""The hazards of `benchmarks/waiting/on_device/hazards.py` on a simulated device: each shows only without its guard."""

import numpy as np
import pytest
import torch
from waiting.on_device.fake_streams import FakeStreams, raw
from waiting.on_device.hazards import HAZARDS, OTHER, mixed


class Pretended:
    """A rig of `FakeStreams`, whose slow stream is held back from the beginning."""

    width = 20_000
    simulated = True

    def __init__(self, slow):
        self.slow = slow
        self.lacking, self.factor = None, 1

    def streams(self, device):
        self._streams = mixed(self.lacking, FakeStreams)(self.slow)
        return self._streams

    def hold(self):
        self._streams.held = True

    def read(self, tensor):
        content, dtype, rows, seen = raw(tensor), typed(tensor), len(tensor), []

        def kernel():
            values = content().view(dtype).reshape(rows, -1)
            seen.append(np.stack([values.min(1), values.max(1)]))

        self._streams.launch("step", kernel)
        return lambda: seen[0]

    def overwritten(self, like):
        made = self._streams.empty(tuple(like.shape), torch.int32)
        content = raw(made)
        self._streams.launch("step", lambda: content().view(np.int32).fill(OTHER))
        return made

    def transform(self, batch):
        return {name: self.floats(tensor) for name, tensor in batch.items()}

    def floats(self, tensor):
        made = self._streams.empty(tuple(tensor.shape), torch.float32)
        to, of, dtype = raw(made), raw(tensor), typed(tensor)
        self._streams.launch(
            "transform", lambda: np.copyto(to().view(np.float32), of().view(dtype) * np.float32(self.factor))
        )
        return made

    def set_factor(self, factor):
        self._streams.launch("step", lambda: setattr(self, "factor", factor))

    def on_side(self):
        return self._streams.on_side()

    def finish(self):
        self._streams.synchronize()


def typed(tensor):
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)
def test_a_hazard_comes_true_without_its_guard_only(hazard, guarded):
    assert hazard.shows(Pretended(hazard.slow), guarded=guarded) is not guarded
