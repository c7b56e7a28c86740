"""Draws when batches are read, copied and trained on, with ``device_depth=0`` and with ``device_depth=2``.

The device is simulated: streams that run beside the program, and copies and steps that take a given time. Run with the
path of a picture: ``python -m waiting.on_device.timeline ../docs/measured/overlap.png``. Needs matplotlib.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lit_async_data import AsyncLoader
from lit_async_data.testing import ArraySource
from waiting.on_device.fake_streams import raw
from waiting.on_device.simulated import SMALL, SimulatedDevice, replaced_streams

INK, QUIET = "#1f2328", "#8b949e"
COLOURS = {"read": "#8c959f", "copy": "#54aeff", "step": "#1f6feb"}
ROWS = {"read": "reader thread", "copy": "side stream", "step": "compute stream"}
READ_S, COPY_S, STEP_S = 0.030, 0.020, 0.050
BATCH, WIDTH, STEPS, WARM_UP = 4, 20_000, 20, 3


class Recorder:
    """Collects (row, batch, begin, end) in seconds."""

    def __init__(self) -> None:
        self.bars: list[tuple[str, int, float, float]] = []

    @contextlib.contextmanager
    def bar(self, row: str, batch: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.bars.append((row, batch, begin, time.perf_counter()))


class Numbered(ArraySource):
    """Samples whose values are their numbers; a batch takes `READ_S` to read."""

    def __init__(self, recorder: Recorder) -> None:
        numbers = np.arange(BATCH * (STEPS + WARM_UP), dtype=np.float32)
        super().__init__({"x": np.repeat(numbers[:, None], WIDTH, axis=1)})
        self._recorder = recorder

    def read_into(self, samples: Any, out: Any) -> None:
        with self._recorder.bar("read", int(samples[0]) // BATCH):
            time.sleep(READ_S)
            super().read_into(samples, out)


class Recorded(SimulatedDevice):
    """A simulated device that records its copies."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(COPY_S)
        self._recorder = recorder

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        to, of = raw(destination), raw(source)

        def copied() -> None:
            if destination.nbytes <= SMALL:
                np.copyto(to(), of())
                return
            with self._recorder.bar("copy", int(of().view(np.float32).flat[0]) // BATCH):
                time.sleep(COPY_S)
                np.copyto(to(), of())

        self.launch("copy", copied)


def recorded(depth: int) -> list[tuple[str, int, float, float]]:
    """The bars of some steps, after a warm-up."""
    recorder = Recorder()
    device = Recorded(recorder)
    with contextlib.closing(device), replaced_streams(lambda _: device, simulated=True):
        options = {"batch_size": BATCH, "workers": 1, "worker_kind": "thread", "shuffle": False}
        with AsyncLoader(Numbered(recorder), options, device="cpu", device_depth=depth) as loader:
            for step, batch in enumerate(loader):
                content = raw(batch["x"])

                def kernel(step: int = step, content: Any = content) -> None:
                    with recorder.bar("step", step):
                        time.sleep(STEP_S)
                        assert int(content().view(np.float32).flat[0]) // BATCH == step

                device.launch("step", kernel)
            device.synchronize()
    return recorder.bars


def drawn(panel: Any, bars: list[tuple[str, int, float, float]], title: str) -> float:
    """One panel; returns the seconds per step."""
    begin = min(bar[2] for bar in bars if bar[0] == "step" and bar[1] == WARM_UP)
    steps = sorted(bar for bar in bars if bar[0] == "step")
    per_step = (steps[-1][2] - begin) / (steps[-1][1] - WARM_UP)
    for row, batch, first, end in bars:
        panel.barh(list(ROWS)[::-1].index(row), 1e3 * (end - first), left=1e3 * (first - begin), height=0.62,
                   color=COLOURS[row], edgecolor="white", linewidth=1.2)  # fmt: skip
        middle = 1e3 * ((first + end) / 2 - begin)
        if -20 < middle < 400:
            panel.annotate(str(batch), (middle, list(ROWS)[::-1].index(row)), ha="center", va="center", color="white",
                           fontsize=8)  # fmt: skip
    panel.set_yticks(range(3), list(ROWS.values())[::-1], fontsize=9, color=INK)
    panel.set_xlim(-25, 400)
    panel.set_title(f"{title}: {1e3 * per_step:.0f} ms per step", loc="left", fontsize=10, color=INK)
    panel.tick_params(axis="x", colors=QUIET, labelsize=8)
    panel.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    return per_step


def main(path: str) -> None:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(2, 1, figsize=(9.5, 3.9), sharex=True, layout="constrained")
    titles = {0: "before: each batch is read and copied when it is asked for", 2: "after: lit_async_data"}
    for panel, (depth, title) in zip(panels, titles.items(), strict=True):
        drawn(panel, recorded(depth), title)
    panels[-1].set_xlabel(
        f"milliseconds; reads of {1e3 * READ_S:.0f} ms, copies of {1e3 * COPY_S:.0f} ms, steps of {1e3 * STEP_S:.0f} "
        "ms on a simulated device; the numbers are batches",
        fontsize=8,
        color=QUIET,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main(sys.argv[1])
