"""`HostHooks`: the two hooks of a loader that run on the host."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Self

from lit_async_data.hooks.callables import Function, Hook, check_callable
from lit_async_data.hooks.calls import HookCalls
from lit_async_data.hooks.probe import outcome_of
from lit_async_data.hooks.transformation import Outcome, Transformation
from lit_async_data.sources.contract.pickling import why_not_pickled
from lit_async_data.sources.contract.source import Source


@dataclasses.dataclass(frozen=True)
class HostHooks:
    """The host hooks of a loader; false if there are none.

    Attributes:
        sample: ``sample_transform``.
        batch: ``batch_transform``.
        lock: Held by the thread that calls them. A copy has its own.
    """

    sample: Hook | None
    batch: Hook | None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __reduce__(self) -> Any:
        return type(self), (self.sample, self.batch)

    @classmethod
    def of(cls, sample_transform: Function | None, batch_transform: Function | None) -> Self:
        """Hooks from what a user gives.

        Raises:
            ConfigError: It cannot be called; the message begins with its name.
        """
        given = {"sample_transform": sample_transform, "batch_transform": batch_transform}
        for name, function in given.items():
            check_callable(name, function, CALLED_WITH[name])
        return cls(*(None if function is None else Hook(function, name) for name, function in given.items()))

    def __bool__(self) -> bool:
        return self.sample is not None or self.batch is not None

    @property
    def draws(self) -> bool:
        """Whether one of them takes random numbers."""
        return any(hook is not None and hook.draws for hook in (self.sample, self.batch))

    def outcome(self, source: Source, seed: int | None, *, indexed: bool) -> Outcome:
        """The fields that come out of them; calls them with the first samples of a source.

        Args:
            source: Where samples come from.
            seed: Of the loader; None if hooks get None in place of random numbers.
            indexed: Whether they get the numbers of samples.

        Raises:
            TransformError, SourceError: See `outcome_of`.
        """
        return outcome_of(HookCalls(source, self.sample, self.batch, seed, indexed=indexed))

    def transformation(
        self, source: Source, seed: int | None, outcome: Outcome, capacity: int, *, indexed: bool
    ) -> Transformation:
        """What calls them for each batch.

        Args:
            source: Where samples come from.
            seed: Of the loader; None if hooks get None in place of random numbers.
            outcome: What comes out of them.
            capacity: The most samples that are read together.
            indexed: Whether they get the numbers of samples.
        """
        calls = HookCalls(source, self.sample, self.batch, seed, indexed=indexed)
        return Transformation(calls, outcome, capacity, self.lock)

    @property
    def unpicklable(self) -> str:
        """Which hook cannot be pickled, and why; empty if both can."""
        for hook in (self.sample, self.batch):
            if hook is not None and (why := why_not_pickled(hook.function)):
                return f"{hook.where} {why}"
        return ""


# What each hook is called with, for messages.
CALLED_WITH = {"sample_transform": "a sample", "batch_transform": "a batch", "device_transform": "a batch"}
