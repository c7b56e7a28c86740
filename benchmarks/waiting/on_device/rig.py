"""A CUDA device of which one stream can be held back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lit_async_data.engine.device.streams import Streams
from waiting.on_device.hazards import BATCH, HAZARDS, OTHER, Batch, Extremes, Which, mixed


class Gpu:
    """A CUDA device that holds a stream back with a kernel that only sleeps.

    Args:
        slow: The stream.
        hold_s: Seconds to hold it back: much longer than reading a few batches takes.
    """

    #: 16 MiB a batch: above 10 MiB torch's allocator gives each tensor a block of its own.
    width = 2**20
    simulated = False

    def __init__(self, slow: Which, hold_s: float = 0.3) -> None:
        self.lacking: type | None = None
        self._slow = slow
        self._cycles = round(hold_s * cycles_per_second())
        self._streams: Streams | None = None
        self._factor = torch.ones((), device="cuda")
        # Otherwise the allocator would reuse blocks of other runs before those that this run frees.
        torch.cuda.empty_cache()
        self._warm_up()

    def streams(self, device: torch.device) -> Streams:
        self._streams = mixed(self.lacking, Streams)(device)
        return self._streams

    def hold(self) -> None:
        assert self._streams is not None
        self._streams.held = True  # type: ignore[attr-defined]
        with contextlib.ExitStack() as stack:
            if self._slow == "side":
                stack.enter_context(self.on_side())
            sleep(self._cycles)

    def read(self, tensor: torch.Tensor) -> Extremes:
        # Small results come from the allocator's other pool, so they take no memory of a batch.
        rows = tensor.flatten(1)
        least, most = rows.amin(1), rows.amax(1)
        return lambda: torch.stack([least, most]).cpu().numpy()

    def overwritten(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=torch.int32, device="cuda").fill_(OTHER)

    def transform(self, batch: Batch) -> Batch:
        return {name: tensor * self._factor for name, tensor in batch.items()}  # float32

    def set_factor(self, factor: float) -> None:
        self._factor.fill_(factor)

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        assert self._streams is not None
        return self._streams.on_side()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def _warm_up(self) -> None:
        """Load the kernels: the first use of a kernel may wait for the device."""
        small = torch.zeros((BATCH, self.width), dtype=torch.int32, device="cuda")
        for tensor in (small.fill_(OTHER), small * self._factor.fill_(1)):
            self.read(tensor)()
        del small, tensor
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def sleep(cycles: int) -> None:
    """Keep the current stream busy for a number of ticks of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types for it


def timed_event() -> torch.Event:
    """A timed event recorded on the current stream."""
    event = torch.Event(device="cuda", enable_timing=True)
    event.record()
    return event


def cycles_per_second() -> float:
    """Ticks of the device's clock in a second."""
    ticks = 5 * 10**7
    sleep(ticks // 50)
    begin = timed_event()
    sleep(ticks)
    end = timed_event()
    end.synchronize()
    return 1000 * ticks / begin.elapsed_time(end)


def verdicts(quick: bool) -> Iterator[dict[str, Any]]:
    """For each hazard, the runs with wrong values, with its guard and without it."""
    for hazard in HAZARDS:
        turns = 1 if quick else 3
        shown = {
            guarded: sum(hazard.shows(Gpu(hazard.slow), guarded=guarded) for _ in range(turns))
            for guarded in (True, False)
        }
        yield {"hazard": hazard.name, "turns": turns, "wrong": shown[True], "mutant_wrong": shown[False]}
