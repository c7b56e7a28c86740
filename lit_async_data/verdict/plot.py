"""`Plot`: waiting, stages and queue fill over the steps, as a picture."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

from lit_async_data.errors import ConfigError
from lit_async_data.host.stages import StageTimes

# Points that are kept; when there are more, every second one is dropped.
MOST = 2048
COLOURS = {"read": "#1f6feb", "decode": "#bf3989", "transform": "#9a6700", "copy": "#1a7f37"}


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
        seconds = tuple(max(getattr(since, name).seconds, 0.0) for name in COLOURS)
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
        axes = figure.subplots(3, 1, sharex=True)
        steps = [point.step for point in self.points]
        axes[0].stackplot(
            steps,
            [1e3 * point.busy_s for point in self.points],
            [1e3 * point.waited_s for point in self.points],
            labels=["step", "waiting for data"],
            colors=["#c9d1d9", "#cf222e"],
            step="pre",
        )
        axes[0].set_ylabel("milliseconds of the loop")
        for number, (name, colour) in enumerate(COLOURS.items()):
            values = [1e3 * point.stages[number] for point in self.points]
            if any(values):
                axes[1].step(steps, values, label=name, color=colour, linewidth=1)
        axes[1].set_ylabel("milliseconds of workers")
        axes[2].step(steps, [point.fill for point in self.points], color="#57606a", linewidth=1)
        axes[2].set_ylabel("batches ready")
        axes[2].set_ylim(bottom=0)
        axes[2].set_xlabel("training step")
        tops = [point.busy_s + point.waited_s for point in self.points], [max(point.stages) for point in self.points]
        for panel, values in zip(axes[:2], tops, strict=True):
            panel.set_ylim(0, max(1e3 * _usual(values), 1e-3))
            if panel.get_legend_handles_labels()[0]:
                panel.legend(loc="upper right", frameon=False, fontsize=8)
        for panel in axes:
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(self.path, dpi=120)


def _usual(values: list[float]) -> float:
    """Room for nearly all values: first batches take so long that nothing else would be seen."""
    return 1.3 * sorted(values)[int(0.98 * (len(values) - 1))]


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
        tuple(mean(lambda point, at=at: point.stages[at]) for at in range(len(COLOURS))),
    )
