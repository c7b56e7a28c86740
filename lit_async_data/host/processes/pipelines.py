"""The pipeline of a loader: with reader threads here, or in a reader process."""

from __future__ import annotations

import functools
import math

from lit_async_data.errors import ConfigError, MemoryBudgetError
from lit_async_data.host.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.host.processes.pipeline import ProcessPipeline
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.resources import memory

# A source whose pickled arrays take more than this is copied to a reader process only on demand.
MOST_COPIED_BYTES = 2**28


class StaysHereError(ConfigError):
    """What is read cannot go to a reader process."""


def thread_pipeline(setup: ReaderSetup, *, pin: bool, timeout_s: float) -> ThreadPipeline:
    """A pipeline with reader threads in this process, or without, as the plan says.

    Args:
        setup: What to read.
        pin: Whether a GPU copies from its slots.
        timeout_s: Seconds to wait for a batch.
    """
    plan = setup.plan
    return ThreadPipeline(
        setup.read,
        setup.schedule,
        plan.layout,
        functools.partial(memory.allocated, plan.layout.nbytes, pinned=pin),
        workers=plan.workers.threads,
        slots=plan.budget.slots,
        most_slots=plan.budget.most_slots,
        timeout_s=timeout_s,
        after_read=setup.ahead,
        ids=setup.read.source.ids,
        tuner=plan.workers.tuner(),
    )


def process_pipeline(
    setup: ReaderSetup, process: ReaderProcess, *, on_demand: bool, pin: bool, timeout_s: float
) -> ProcessPipeline:
    """A pipeline in a reader process, which starts with the first request.

    Args:
        setup: What to read.
        process: The reader process.
        on_demand: Whether the user has asked for it, so that a source of any size is copied.
        pin: Whether a GPU copies from its slots.
        timeout_s: Seconds to wait for a batch.

    Raises:
        StaysHereError: The setup cannot be pickled, or is too large.
        MemoryBudgetError: The system has no room for the slots.
    """
    try:
        stored = setup.stored(math.inf if on_demand else MOST_COPIED_BYTES)
    except MemoryBudgetError:
        raise
    except ConfigError as error:
        raise StaysHereError(str(error)) from error.__cause__
    pipeline = ProcessPipeline(setup, stored, process, pin=memory.register if pin else None, timeout_s=timeout_s)
    try:
        pipeline.reserve()
    except MemoryBudgetError:
        pipeline.close()
        raise
    return pipeline
