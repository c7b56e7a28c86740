"""`pipeline_of`: the pipeline of a plan, filled by threads of this process or by reader processes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from lit_async_data.engine.pipeline.pipeline import Pipeline
from lit_async_data.engine.pipeline.thread_pipeline import Reading, ThreadPipeline
from lit_async_data.engine.processes.pipeline import ProcessPipeline
from lit_async_data.engine.processes.reader_process import ReaderProcesses
from lit_async_data.engine.processes.setup import ReaderSetup
from lit_async_data.engine.resources import memory
from lit_async_data.errors import MemoryBudgetError
from lit_async_data.options import LoaderOptions

if TYPE_CHECKING:
    import torch


def pipeline_of(
    setup: ReaderSetup, processes: ReaderProcesses, *, pin: torch.device | None, options: LoaderOptions
) -> Pipeline:
    """The pipeline of a plan, from which the device ``pin`` copies. Nothing starts before the first request."""
    plan = setup.plan
    if plan.workers.kind == "process":
        return _process_pipeline(setup, processes, pin=pin, options=options)
    pipeline = ThreadPipeline(
        Reading(setup.read, setup.ahead, setup.read.source, setup.around),
        setup.schedule,
        plan.room,
        functools.partial(memory.allocated, plan.layout.nbytes, pinned=pin is not None),
        workers=plan.workers.threads,
        timeout_s=options.timeout_s,
        tuner=plan.workers.tuner(),
    )
    pipeline.warn_after_s = options.warn_after_s
    return pipeline


def _process_pipeline(
    setup: ReaderSetup, processes: ReaderProcesses, *, pin: torch.device | None, options: LoaderOptions
) -> ProcessPipeline:
    register = None
    if pin is not None and pin.type == "cuda":  # torch pins memory that it did not allocate for CUDA only
        register = functools.partial(memory.register, device=pin)
    pipeline = ProcessPipeline(
        setup, setup.stored(), processes, pin=register, timeout_s=options.timeout_s, restarts=options.restarts
    )
    pipeline.warn_after_s = options.warn_after_s
    try:
        pipeline.reserve()
    except MemoryBudgetError:
        pipeline.close()
        raise
    return pipeline
