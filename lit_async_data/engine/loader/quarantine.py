"""`Quarantine`: counts and lists the samples that a loader has read around, and says when there are too many."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable

import numpy as np

from lit_async_data.engine.pipeline.bad_samples import BadSample, ReadAround
from lit_async_data.errors import SourceError, TransformError, few
from lit_async_data.order.plan import EpochPlan
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.local_files.bad_lists import bad_sample

log = logging.getLogger(__name__)


class Quarantine:
    """The bad samples that a loader has met. One thread at a time."""

    def __init__(self, source: Source, most: float, path: str | os.PathLike[str] | None) -> None:
        self._source, self._most = source, most
        # The file to which each bad sample is appended once, as a line of JSON; None to write none.
        self.path = None if path is None else os.fspath(path)
        self.known: set[int] = set()  # the numbers of the samples that cannot be read
        self._listed: set[int] = set()
        self._writes = True
        # Of the present pass: its epoch, its bad samples by number, its batches that were read around them by step.
        self._epoch = -1
        self._bad: dict[int, BadSample] = {}
        self._around: dict[int, ReadAround] = {}

    def remember(self, samples: Iterable[int]) -> None:
        """Add samples that an earlier run has found bad and listed."""
        self.known.update(samples)
        self._listed.update(samples)

    def begin(self, epoch: int) -> None:
        """A pass begins: count anew."""
        self.tell()
        self._epoch, self._bad, self._around = epoch, {}, {}

    @property
    def count(self) -> int:
        """Bad samples of the present pass so far, on this rank."""
        return len(self._bad)

    def samples(self, step: int) -> tuple[int, ...] | None:
        """The samples that a batch of the present pass had; None for those of its plan."""
        return None if step not in self._around else self._around[step].samples

    def handed_out(self, step: int, plan: EpochPlan, around: ReadAround) -> None:
        """Count the bad samples of a batch that is handed out now.

        Raises:
            SourceError: The pass has had more bad samples than ``max_bad`` allows.
        """
        self._around[step] = around
        self._bad.update((bad.sample, bad) for bad in around.bad)
        self._list(around.bad)
        of_rank = -(-plan.length // plan.world_size)
        most = self._most if isinstance(self._most, int) else max(int(self._most * of_rank), 1)
        if len(self._bad) > most:
            raise SourceError(
                f"max_bad: {self._described()} in epoch {self._epoch}, and at most {most} are allowed; the last: "
                f"{around.bad[-1].error}; mend the data, leave these samples out (exclude), or raise max_bad",
                errors=[bad.error for bad in self._bad.values() if isinstance(bad.error, SourceError)],
            )

    def tell(self) -> None:
        """Warn once of the bad samples of the pass, which has ended, or is given up."""
        if self._bad and self._epoch >= 0:
            listed = "" if self.path is None or not self._writes else f"; {self.path} lists them"
            log.warning(
                "epoch %d of %s was read around %s%s", self._epoch, self._source.name, self._described(), listed
            )
            self._epoch = -1

    def _described(self) -> str:
        numbers = self._source.ids(np.array(list(self._bad), np.int64)).tolist()
        return f"{len(numbers)} bad sample{'s' * (len(numbers) > 1)} ({few(numbers)})"

    def _list(self, bad: Iterable[BadSample]) -> None:
        new = {each.sample: each for each in bad if each.sample not in self._listed}
        self._listed.update(new)
        self.known.update(sample for sample, each in new.items() if not isinstance(each.error, TransformError))
        if not new or self.path is None or not self._writes:
            return
        numbers = self._source.ids(np.array(list(new), np.int64)).tolist()
        rows = [bad_sample(self._source, at, each.error) for at, each in zip(numbers, new.values(), strict=True)]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            there = set[str]()
            if os.path.isfile(self.path):  # what other loaders have listed
                with open(self.path, encoding="utf-8", errors="backslashreplace") as file:
                    there.update(file)
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(line for line in lines if line not in there)
        except OSError as error:
            log.warning("quarantine: %s cannot be written: %s; bad samples are only counted", self.path, error.strerror)
            self._writes = False
