"""`UserCode`: what of a loader is code of its user: whether it has changed, and draws that no run repeats."""

from __future__ import annotations

from collections.abc import Sequence

from lit_async_data.engine.hooks.callables import Function
from lit_async_data.engine.resources.workers import Workers
from lit_async_data.sources.contract.changes import Watch
from lit_async_data.sources.contract.source import Source

CHANGED = (
    "attributes of the source or of a transform were changed: what was read ahead is read again, now and whenever they "
    "change between two passes"
)


class UserCode:
    """The source of a loader, and its transforms, in so far as they are the user's. Refers to no loader."""

    def __init__(self, source: Source, *transforms: Function | None) -> None:
        self._source, self._transforms = source, transforms
        self._watch, self._changed, self._begun = Watch(), 0, -1

    def begin(self) -> None:
        """Note how everything is now: reading begins."""
        self._begun = self._changes()

    def has_changed(self) -> bool:
        """Whether attributes have changed since `begin`; raises an error if the samples are others."""
        return self._changes() != self._begun

    def _changes(self) -> int:
        self._changed += bool(self._watch.look(self._transforms))
        return self._source.count_changes() + self._changed

    def unrepeatable(self, workers: Workers, drawn: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
        """Warnings of draws in threads, from generators that the training loop draws from, too.

        Args:
            workers: What reads.
            drawn: Which hook drew from which generators; see `Outcome`.
        """
        found = [] if workers.seeds() else [*drawn]
        if workers.threads and not workers.seeds(self._source.chunks.reading):
            found.append((self._source.name, self._source.global_draws()))
        return [
            f"{where} drew random numbers from the global generator of {' and '.join(names)}: in a thread, results "
            "will change from run to run; set worker_kind=process, where they are seeded for each sample, or workers=0 "
            "(docs/data/transforms.md)"
            for where, names in found
            if names and workers.threads
        ]
