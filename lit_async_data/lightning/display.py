"""The output of training: lines before it, the queues in the progress bar, and a verdict after each epoch."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from lit_async_data.batch.transforms import Normalize, ToFloat
from lit_async_data.engine.hooks import Hook
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.resources import decoded_again, readable
from lit_async_data.engine.stats import LEAST_S, LEAST_STEPS, Loader, LoaderStats, Verdict, Wait, Watch
from lit_async_data.lightning.loops import driven_loaders, pl, rank_zero_only
from lit_async_data.options import Balanced
from lit_async_data.sources.composed.composed import MixtureSource
from lit_async_data.sources.contract.source import Remote, described

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # shown whatever the level of the root logger, as Lightning's lines are


def quiet(level: int = logging.INFO) -> bool:
    """Whether the logger ``lit_async_data`` has a higher level; NOTSET, the default, is below all levels."""
    return logging.getLogger("lit_async_data").level > level


@rank_zero_only
def print_line(line: str, level: int = logging.INFO) -> None:
    """Log a line on rank 0, unless it is empty or `quiet` holds.

    If the program has set up no logging, the line goes to stderr, as Lightning's lines do. On a terminal, a tqdm bar is
    drawn again below the line.
    """
    if line and not quiet(level):
        with contextlib.ExitStack() as stack:
            if not log.hasHandlers():
                log.addHandler(handler := logging.StreamHandler())
                stack.callback(log.removeHandler, handler)  # the program may set up logging later
            if getattr(sys.stderr, "isatty", bool)():
                stack.enter_context(tqdm.external_write_mode(file=sys.stderr))
            log.log(level, "%s", line)


def with_fill(get_metrics: Any, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """What a progress bar of Lightning shows, and the fill of the training queues: ``data=host 4/4 device 2/2``."""
    metrics: dict[str, Any] = get_metrics(trainer, pl_module)
    loaders = driven_loaders(trainer.train_dataloader) if trainer.state.fn == "fit" else []
    return metrics | {"data": ", ".join(loader.fill for loader in loaders)} if loaders else metrics


STAGES = {"val": "validation", "test": "test", "predict": "prediction"}

# A sentence is repeated only if its share has changed by at least this since the last time.
NOTICEABLE = 0.1


class EpochWaits:
    def __init__(self, stats: Sequence[LoaderStats] = ()) -> None:
        self.summary = Wait()
        self._before, self._ended_s, self._fill_sum = stats, 0.0, 0  # the end of the last step
        self._batches = [each.batches for each in stats]

    def step(self, stats: Sequence[LoaderStats], now_s: float, busy_s: float, *, first: bool) -> None:
        batches, self._batches = self._batches, [each.batches for each in stats]
        # Lightning does not ask all of several loaders in each step.
        waited_s = sum(each.last_wait_s for each, seen in zip(stats, batches, strict=False) if each.batches > seen)
        if self._ended_s:
            busy_s = now_s - self._ended_s - waited_s
        self._ended_s = now_s
        self.summary += Wait(1, 0.0 if first else waited_s, waited_s if first else 0.0, busy_s)
        self._fill_sum += sum(each.queue_fill for each in stats)

    def pause(self) -> None:
        self._ended_s = 0.0

    def end(self, stats: Sequence[LoaderStats]) -> dict[str, float]:
        """The means of the epoch. Adds the waits of the device, which are known late, to the summary."""
        pairs = zip(self._before, stats, strict=False)
        waits = [now.device.since(before.device) for before, now in pairs if now.device is not None]
        waited = sum(waits, Wait())
        self.summary = summary = self.summary + Wait(device_s=waited.waited_s if waits else None)
        if not stats or not summary.steps:
            return {}
        wait_ms = 1e3 * summary.wait_s / max(summary.steps - 1, 1)
        return {
            "data/read_mb_s": stats[0].read.minus(self._before[0].read).mb_per_s,
            "data/wait_ms": wait_ms,
            "data/device_wait_ms": 1e3 * waited.wait_s / max(waits[0].steps, 1) if waits else wait_ms,
            "data/epoch_gap_ms": 1e3 * summary.gap_s,
            "data/queue_fill": self._fill_sum / summary.steps,
        }


class Verdicts:
    def __init__(self) -> None:
        self.evaluated: dict[str, Wait] = {}  # waits over all runs of each evaluation loop, by stage
        self._watches: dict[str, Watch] = {}
        self.hooks = ""  # of the batch transfer that the user overrides
        self._said: dict[tuple[str, str, str], float] = {}  # the last share of each stage, cause and hint

    def begin(self, stage: str, loaders: Sequence[Loader]) -> None:
        self._watches[stage] = Watch(loaders)

    def release(self) -> None:
        self._watches.clear()

    def epoch(self, trainer: pl.Trainer, device: torch.device, who: str, wall_s: float) -> str:
        """The line after an epoch of training; empty if it would say nothing new.

        With several ranks, all ranks call this, and the line names the slowest.
        """
        found = self._watches["train"].verdict(wall_s)
        if trainer.world_size > 1:
            # Every rank is here: Lightning's own reductions at the end of an epoch need that as well. Each rank adds
            # its share to zeros, since Lightning's own gathering prints a warning about torch.
            shares = torch.zeros(trainer.world_size, device=device)
            shares[trainer.global_rank] = found.share
            shares = trainer.strategy.reduce(shares, reduce_op="sum")
            slowest = int(shares.argmax())
            found = trainer.strategy.broadcast(found, slowest)
            who += f" on rank {slowest}, the slowest of {len(shares)},"
        line = self._new("train", found, who)
        return f"epoch {trainer.current_epoch}: {line}" if line else ""

    def end(self, trainer: Any, stage: str) -> str:
        """The line after an evaluation loop; empty if it would say nothing new."""
        watch = self._watches.pop(stage, None)
        if watch is None or not (found := watch.verdict()).waited.steps or trainer.sanity_checking:
            return ""
        self.evaluated[stage] = self.evaluated.get(stage, Wait()) + found.waited
        if trainer.state.fn == "fit" and found.cause == "loop":
            return ""
        return self._new(stage, found, STAGES[stage])

    def _new(self, stage: str, found: Verdict, who: str) -> str:
        """A sentence; empty after a short loop, and if it repeats the last sentence of this stage."""
        sentence, waited = (stage, found.cause, found.hint), found.waited
        known = abs(found.share - self._said.get(sentence, math.inf)) < NOTICEABLE
        if waited.total_s < LEAST_S or waited.steps < LEAST_STEPS or known:
            return ""
        self._said[sentence] = found.share
        prefix = "loader." if stage == "train" else f"data.{stage}_loader."
        return found.sentence(who, f"{waited.total_s:.1f} s", prefix, self.hooks)


def summary_lines(loader: AsyncLoader) -> list[str]:
    """Three lines: samples and fields; batch, steps and the cost of the shuffle; workers and memory."""
    source, options, footprint = loader.source, loader.options, loader.footprint
    most, step = "at most " if options.batch_by is not None else "", options.batch_size * loader.world_size
    ranks = f" × {loader.world_size} ranks = {step}" if loader.world_size > 1 else ""
    drawing, depth = "", f", queue depth {options.queue_depth}" if footprint.workers.threads else ""
    if options.drawn:
        by = f"balanced {options.weights.field}" if isinstance(options.weights, Balanced) else "weights"
        drawing = f"{loader.order.length:,} samples drawn by {by}, "
    if isinstance(source, MixtureSource):
        drawing = f"{source.described(loader.order.decks.counts)}, "
    schedule = loader._wiring.schedule
    if schedule.shuffled or loader.order.decks.shuffle != "none":  # something depends on the seed
        drawing += f"seed {schedule.seed}, "
    return [
        described(source, source.name, loader.spec) + _on_device(loader),
        f"batch {most}{options.batch_size}{ranks}, {len(loader):,} steps, {drawing}shuffle {_shuffle(loader)}",
        f"{footprint.workers}{depth}: {footprint.budget}",
        *_network(source.chunks.remote),
    ]


def _on_device(loader: AsyncLoader) -> str:
    if (given := loader._recipe.device_transform) is None:
        return ""
    function: Any = Hook(given, "").function
    line = f"; device_transform {getattr(function, '__qualname__', type(function).__name__)}"
    if isinstance(function, ToFloat | Normalize):
        fields = ", ".join(map(str, function.fields or list(loader.spec)[:1]))
        line += f" makes {fields} {str(function.dtype).removeprefix('torch.')}"
    return line


def _network(remote: Remote | None) -> list[str]:
    if remote is None:
        return []
    fetched = f"{readable(remote.nbytes)} by " if remote.nbytes else ""
    keeps = "keeps them" if remote.room is None else "has no room for all of them"
    room = f"{remote.folder} {keeps}" if remote.folder else "cache=FOLDER would keep them for the next epoch"
    return [f"network: {fetched}about {remote.requests:,} requests in an epoch; {room}"]


def _shuffle(loader: AsyncLoader) -> str:
    order, source, amplification = loader.order, loader.source, loader.footprint.amplification
    decks = order.decks
    if decks.buckets is not None:
        bounds = decks.buckets.bounds
        return f"{decks.shuffle}, batches by length, padded to one of {len(bounds)} lengths up to {bounds[-1]:,}"
    if decks.shuffle == "none" or isinstance(source, MixtureSource):
        return decks.shuffle
    if (chunks := order.deck.chunk_order) is not None:
        own = chunks.width // math.gcd(chunks.width, order.world_size)  # the chunks of a group that a rank reads
        groups = math.ceil(order.batch_size * order.world_size / (chunks.width * chunks.rows))
        several, each = min(groups * own, order.batch_size, chunks.chunks), source.chunks.chunks_per_run
        what = "volumes" if source.chunks.amplification else "chunks"
        which = f"{several:,} of {chunks.chunks:,} {what if each == 1 else f'stretches of up to {each} chunks'}"
        return f"chunk: a batch draws from about {which}{_decoding_cost(loader)}"
    of = source.chunks
    kept = amplification == 1 and (not of.alone or of.alone > of.amplification)  # alone, patches would decode more
    if of.rows == 1:
        blocks = "; shuffle=chunk fetches them in blocks" if of.remote and of.runs else ""
        return f"global: every sample is read alone{blocks}"
    return f"global: {'each chunk is decoded once and kept' if kept else decoded_again(amplification, of)}"


def _decoding_cost(loader: AsyncLoader) -> str:
    chunks, held = loader.source.chunks, loader.footprint.budget.decoded
    if not held:
        return ""
    which = "every chunk" if chunks.largest else "every chunk of the largest field"
    if chunks.amplification:
        wasted = f"about {chunks.amplification:.1f} bytes are decoded for each one that patches use"
        return f"; {wasted}; the decoded chunks of volumes take {readable(held)}"
    often = "once" if loader.footprint.amplification == 1 else f"{loader.footprint.amplification:.1f} times"
    return f"; {which} is decoded {often} per epoch; decoded chunks take {readable(held)}"
