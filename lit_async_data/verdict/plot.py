"""`Plot`: waiting, stages and queue fill over the steps, as a picture."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lit_async_data.errors import ConfigError
from lit_async_data.host.metrics.stages import StageTimes

# Points that are kept; when there are more, every second one is dropped.
MOST = 2048
# Bars that are drawn at most: each is the mean of as many points as it takes.
COLUMNS = 360
STAGES = ("read", "decode", "transform", "copy")
COLOURS = {
    "step": "#c9d1d9",
    "waiting for data": "#cf222e",
    "read": "#1f6feb",
    "decode": "#bf3989",
    "transform": "#9a6700",
    "copy": "#1a7f37",
}


class _Point(NamedTuple):
    """Means over some steps.

    Attributes:
        step: The last of them.
        steps: How many there are.
        waited_s: Seconds that each waited.
        busy_s: Seconds that each took beside that.
        fill: Batches that were ready.
        stages: Seconds of each stage, per step.
    """

    step: int
    steps: int
    waited_s: float
    busy_s: float
    fill: float
    stages: tuple[float, ...]


class Plot:
    """Records steps, and draws them.

    Args:
        path: Of the picture; its suffix says the format, such as ``.png``.

    Raises:
        ConfigError: matplotlib is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ConfigError(
                "plot: matplotlib is missing; install it by pip install 'lit-async-data[plot]', or leave plot out"
            ) from error
        self.points: list[_Point] = []
        self._together = 1  # steps in a point
        self._open: list[_Point] = []
        self._steps = 0
        self._before = StageTimes()

    def add(self, waited_s: float, busy_s: float, fill: int, stages: StageTimes) -> None:
        """One more step.

        Args:
            waited_s: Seconds that it waited for data.
            busy_s: Seconds that it took beside that.
            fill: Batches that were ready when it asked.
            stages: All that the loader has done so far.
        """
        since, self._before = stages.since(self._before), stages
        seconds = tuple(max(getattr(since, name).seconds, 0.0) for name in STAGES)
        self._steps += 1
        self._open.append(_Point(self._steps, 1, waited_s, busy_s, float(fill), seconds))
        if len(self._open) == self._together:
            self.points.append(_mean(self._open))
            self._open = []
        if len(self.points) > MOST:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [_mean(list(pair)) for pair in pairs]
            self._together *= 2
            self._open = []

    def save(self) -> None:
        """Write the picture, if there is anything to show."""
        if not self.points:
            return
        figure: Any = importlib.import_module("matplotlib.figure").Figure((9, 7), layout="constrained")
        loop, workers, queue = figure.subplots(3, 1, sharex=True)
        together = -(-len(self.points) // COLUMNS)
        points = [_mean(self.points[first : first + together]) for first in range(0, len(self.points), together)]
        edges = [points[0].step - points[0].steps, *(point.step for point in points)]

        busy, waited = [1e3 * point.busy_s for point in points], [1e3 * point.waited_s for point in points]
        _bars(loop, "Loop", edges, {"step": busy, "waiting for data": waited})
        stages = {name: [1e3 * point.stages[at] for point in points] for at, name in enumerate(STAGES)}
        _bars(workers, "Workers, all together", edges, {name: each for name, each in stages.items() if any(each)})
        fill = [point.fill for point in points]
        queue.stairs(fill, edges, fill=True, color="#8c959f")
        queue.set_title("Queue", loc="left", fontsize=10)
        queue.set_ylabel("batches ready")
        queue.set_ylim(0, max(1.05 * max(fill), 1.0))
        queue.set_xlabel("training step")
        queue.set_xlim(edges[0], edges[-1])
        for axis in (queue.xaxis, queue.yaxis):
            axis.get_major_locator().set_params(integer=True)
        for panel in (loop, workers, queue):
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(self.path, dpi=120)


def _bars(panel: Any, title: str, edges: list[int], named: Mapping[str, list[float]]) -> None:
    """Draw milliseconds on top of each other."""
    top = [0.0] * (len(edges) - 1)
    for name, values in named.items():
        below, top = top, [under + value for under, value in zip(top, values, strict=True)]
        panel.stairs(top, edges, baseline=below, fill=True, label=name, color=COLOURS[name])
    # First batches take so long that nothing else would be seen.
    most, longest = 1.15 * sorted(top)[int(0.98 * (len(top) - 1))] or 1.0, max(top)
    panel.set_ylim(0, most)
    cut = f" (cut off: up to {longest:,.0f} ms)" if longest > most else ""
    panel.set_title(f"{title}{cut}", loc="left", fontsize=10)
    panel.set_ylabel("ms per step")
    if named:  # above the panel, where it hides nothing
        panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(named), frameon=False, fontsize=9)


def _mean(points: list[_Point]) -> _Point:
    steps = sum(point.steps for point in points)

    def mean(of: Any) -> float:
        return float(sum(point.steps * of(point) for point in points) / steps)

    return _Point(
        points[-1].step,
        steps,
        mean(lambda point: point.waited_s),
        mean(lambda point: point.busy_s),
        mean(lambda point: point.fill),
        tuple(mean(lambda point, at=at: point.stages[at]) for at in range(len(STAGES))),
    )
