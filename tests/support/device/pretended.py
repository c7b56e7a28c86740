"""The machines on which tests of a GPU run: one with a CUDA device, and one that pretends to be it.

On the second, the same tests run with the same sizes in every suite. What only a GPU shows they look at where `real`.
"""

import contextlib
import copy

import numpy as np
import pytest
import torch
from waiting.on_device import measures
from waiting.on_device.fake_streams import FakeStreams, raw
from waiting.on_device.hazards import OTHER, mixed

from lit_async_data.engine import resources
from lit_async_data.engine.device import streams

SKIPPED = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
#: The parameters of a fixture: whether there is a GPU. All tests that need one get their mark here.
MACHINES = [pytest.param(True, id="cuda", marks=[pytest.mark.gpu, SKIPPED]), pytest.param(False, id="pretended")]


class Machine:
    """Where a test runs.

    Attributes:
        real: Whether there is a GPU.
        late: Whether the streams of a pretended GPU run only what somebody waits for.
        traces: How often a pretended GPU was profiled to the end.
    """

    def __init__(self, *, real):
        self.real, self.late, self.traces = real, False, 0

    @property
    def device(self):
        return torch.device("cuda" if self.real else "cpu")

    def raises(self, error, match):
        """What a real GPU raises."""
        return pytest.raises(error, match=match) if self.real else contextlib.nullcontext()


class Event:
    """A timed event: each happens a millisecond after the one before."""

    def __init__(self, **options):
        pass

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 1.0


class Kernels:
    """As those of the measurements, in no time."""

    def __init__(self, seconds):
        pass

    def __call__(self, batch=None):
        if batch is not None:
            batch["x"].amax()


class OnTheCpu(torch.overrides.TorchFunctionMode):
    """Tensors that belong on a GPU are made on the CPU."""

    def __torch_function__(self, function, kinds, arguments=(), options=None):
        options = dict(options or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        arguments = ["cpu" if isinstance(each, str) and each == "cuda" else each for each in arguments]
        return function(*arguments, **options)


@contextlib.contextmanager
def machine(monkeypatch, *, real):
    """A machine, for the time of a test."""
    made = Machine(real=real)
    if real:
        yield made
        return
    opened = []

    class PretendedStreams(FakeStreams):
        def __init__(self, device):
            super().__init__("side")
            self.side.eager = self.compute().eager = not made.late
            opened.append(self)

    def synchronize(device=None):
        for each in opened:
            each.synchronize()

    @contextlib.contextmanager
    def traced(events):
        yield
        made.traces += 1

    monkeypatch.setattr(streams, "checked_device", lambda given: torch.device("cpu"))
    monkeypatch.setattr(streams, "has_streams", lambda device: True)
    monkeypatch.setattr(streams, "Streams", PretendedStreams)
    monkeypatch.setattr(resources, "allocated", lambda nbytes, *, pinned: np.zeros(nbytes, np.uint8))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStreams("compute").side)
    nothing = {"_sleep": None, "empty_cache": None, "memory_reserved": 0, "set_sync_debug_mode": None}
    for name, result in (nothing | {"current_device": 0}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(measures, "Kernels", Kernels)
    monkeypatch.setattr(measures, "traced", traced)
    monkeypatch.setattr(measures, "ToFloat", lambda *fields: copy.copy)  # which takes seconds on a CPU
    monkeypatch.setitem(measures.QUIET, "accelerator", "cpu")
    with OnTheCpu():
        yield made


class PretendedRig:
    """A rig of `FakeStreams` for hazards, whose slow stream is held back from the beginning.

    Args:
        slow: The stream.
        width: Values of a sample.
    """

    simulated = True

    def __init__(self, slow, width):
        self.slow, self.width = slow, width
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
