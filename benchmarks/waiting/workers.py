"""Python code per sample in reader processes, compared with the worker processes of torch's DataLoader.

    python benchmarks/waiting/workers.py [--quick] [--json FILE] [--folder DIR] [slots | images | loop]

* slots: batches of 38.5 MB with a transform of no work: bytes per second, and CPU seconds per GB.
* loop: steps of a loop that launches many kernels, kept beside a transform in pure Python.
* images: JPEGs, decoded, and augmented in numpy: images per second, and per CPU second.

All contenders call the same transform, and take turns. Figures are medians over the rounds. CPU time is that of all
processes. In `slots` and `images` the loop reads one byte of each page of a batch; in `loop` it leaves batches alone. A
spawned worker of a DataLoader imports torch and this program. SPDL takes part in `images` if it is installed
(benchmarks/readers/requirements.txt).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from loading.hdf5 import Run
from measuring.program import Figures, Goal, argument_parser, run_parts

from waiting.processes import gil, rates

TIMES_BYTES, TIMES_CPU = 3.0, 0.4
KEPT = 0.95

PARTS: dict[str, Callable[[Run], Figures]] = {
    "slots": rates.slots,
    "loop": gil.loop,
    "images": rates.images,
}


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    """Against the best DataLoader with as many processes."""
    rows = figures.get("slots", [])
    for mine in (row for row in rows if row["ours"]):
        theirs = [row for row in rows if not row["ours"] and row["workers"] == mine["workers"]]
        times = mine["gb_per_s"] / max(row["gb_per_s"] for row in theirs)
        cpu = mine["cpu_s_per_gb"] / min(row["cpu_s_per_gb"] for row in theirs)
        yield Goal(f"38.5 MB, {mine['contender']}, times the best DataLoader", times, TIMES_BYTES, TIMES_BYTES)
        label = f"38.5 MB, {mine['contender']}, CPU of the best DataLoader"
        yield Goal(label, cpu, TIMES_CPU, TIMES_CPU, at_most=True)
    for row in figures.get("loop", []):
        if row["ours"] and "thread" not in row["contender"]:
            yield Goal(f"{row['contender']}, of the steps", row["steps"], KEPT, KEPT)


def main() -> None:
    torch.set_num_threads(1)
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "h5py"))


if __name__ == "__main__":
    main()
