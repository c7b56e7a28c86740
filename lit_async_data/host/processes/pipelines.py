"""The pipeline of a loader: with reader threads here, or in a reader process."""

from __future__ import annotations

import functools

from lit_async_data.errors import MemoryBudgetError
from lit_async_data.host.pipeline.pipeline import Pipeline
from lit_async_data.host.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.host.processes.pipeline import ProcessPipeline
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.resources import memory


def pipeline_of(setup: ReaderSetup, process: ReaderProcess, *, pin: bool, timeout_s: float) -> Pipeline:
    """The pipeline of a plan. Threads and processes start with the first request.

    Args:
        setup: What to read.
        process: The reader process, for a plan with one.
        pin: Whether a GPU copies from its slots.
        timeout_s: Seconds to wait for a batch.

    Raises:
        ConfigError: The setup cannot be pickled for a reader process.
        MemoryBudgetError: The system has no room for it there, or for the slots.
    """
    if setup.plan.workers.kind == "process":
        return _process_pipeline(setup, process, pin=pin, timeout_s=timeout_s)
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


def _process_pipeline(setup: ReaderSetup, process: ReaderProcess, *, pin: bool, timeout_s: float) -> ProcessPipeline:
    pipeline = ProcessPipeline(
        setup, setup.stored(), process, pin=memory.register if pin else None, timeout_s=timeout_s
    )
    try:
        pipeline.reserve()
    except MemoryBudgetError:
        pipeline.close()
        raise
    return pipeline
