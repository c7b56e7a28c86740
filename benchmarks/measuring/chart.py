"""A bar chart of the warm figures."""

from __future__ import annotations

import importlib
from typing import Any

INK, QUIET, OURS, OTHERS = "#1f2328", "#8b949e", "#1f6feb", "#c9d1d9"


def plotted(rows: list[dict[str, Any]], machine: str, file: str) -> None:
    """One panel per layout, one bar per contender with the best number of workers, the limit as a line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    bars = {layout: fastest(rows, layout) for layout in layouts}
    columns = [layouts[0::2], layouts[1::2]]
    heights = [max(len(bars[name]) for name in pair) for pair in zip(*columns, strict=False)]
    if len(layouts) % 2:
        heights.append(len(bars[layouts[-1]]))
    figure, axes = pyplot.subplots(
        len(heights),
        2,
        figsize=(15, 0.24 * sum(heights) + 0.9 * len(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for panel, layout in zip(axes.flat, layouts, strict=False):
        drawn(panel, bars[layout])
    for panel in axes.flat[len(layouts) :]:
        panel.axis("off")
    figure.suptitle(f"Samples per second in random batches, warm page cache ({machine})", fontsize=11, color=INK)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def fastest(rows: list[dict[str, Any]], layout: str) -> list[dict[str, Any]]:
    """For each contender the row with the best number of workers, fastest first."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["layout"] == layout:
            known = best.setdefault(row["family"], row)
            if row["samples_per_s"] > known["samples_per_s"]:
                best[row["family"]] = row
    return sorted(best.values(), key=lambda row: -row["samples_per_s"])


def drawn(panel: Any, bars: list[dict[str, Any]]) -> None:
    rates = [row["samples_per_s"] for row in bars]
    limit = bars[0]["limit"]
    panel.barh(range(len(bars)), rates, color=[OURS if row["ours"] else OTHERS for row in bars], height=0.72)
    panel.set_yticks(range(len(bars)), [f"{row['family']} ({row['workers']})" for row in bars], fontsize=8, color=INK)
    for place, rate in enumerate(rates):
        panel.annotate(
            f"{rate:,.0f}",
            (rate, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    panel.axvline(limit, color=QUIET, linewidth=1, linestyle="--", zorder=1)
    panel.annotate(
        "limit, one thread", (limit, -0.6), (-3, 2), textcoords="offset points", ha="right", fontsize=7, color=QUIET
    )
    panel.set_xscale("log")
    panel.set_xlim(min(rates) / 3, max(*rates, limit) * 3)
    panel.set_ylim(len(bars) - 0.4, -1.2)
    panel.set_title(bars[0]["stored"], fontsize=9.5, loc="left", color=INK)
    panel.tick_params(axis="x", labelsize=7.5, colors=QUIET)
    panel.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
