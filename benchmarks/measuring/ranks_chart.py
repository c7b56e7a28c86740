"""A chart of how often each chunk is decoded, by the number of ranks."""

from __future__ import annotations

import importlib
from typing import Any

from measuring.chart import INK, OURS, QUIET

TICKS = (1, 2, 4, 8, 16, 32, 64, 128)


def plotted(rows: list[dict[str, Any]], file: str) -> None:
    """A point per number of ranks, for the default width of a group and for a multiple of the ranks.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, panel = pyplot.subplots(figsize=(9.5, 3.6), layout="constrained")
    ranks = [row["ranks"] for row in rows]
    width = rows[0]["default"]["width"]
    default, multiple = ([row[name]["decoded"] for row in rows] for name in ("default", "multiple"))
    panel.scatter(ranks, default, s=14, color=QUIET, zorder=2, label=f"shuffle_chunks={width}, the default")
    panel.scatter(
        ranks,
        multiple,
        s=14,
        color=OURS,
        zorder=3,
        label=f"shuffle_chunks: the next multiple of the ranks from {width}",
    )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(TICKS, [str(tick) for tick in TICKS])
    panel.set_yticks(TICKS[:-1], [str(tick) for tick in TICKS[:-1]])
    panel.set_xlabel("ranks", fontsize=9, color=QUIET)
    title = "How often a chunk of 64 samples is decoded in an epoch: ranks / gcd(ranks, shuffle_chunks), at most 64"
    panel.set_title(title, loc="left", fontsize=10, color=INK)
    panel.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left")
    panel.tick_params(colors=QUIET, labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
