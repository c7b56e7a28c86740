"""What reader processes read, by their notes in shared memory: for messages, and when one has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lit_async_data.engine.pipeline.pipeline import Reading, place_of
from lit_async_data.engine.processes.messages import Task
from lit_async_data.engine.processes.shared_slots import Note
from lit_async_data.engine.supervisor import hindered
from lit_async_data.errors import WorkerError
from lit_async_data.sources.contract.source import Source


def readings(source: Source, number: int, pid: int, tasks: Sequence[Task], noted: Sequence[Note]) -> list[Reading]:
    """What the threads of a process read; or that none does, though it may have tasks."""
    who = f"reader process {pid}{hindered(pid)}"
    if not noted:
        key, where = (tasks[0].key, {"worker": number}) if tasks else (None, {})
        return [Reading(f"{who} reads nothing, and has {len(tasks)} tasks", key, where=where)]
    found = []
    for note in noted:
        verb, stage = ("transforms", "transform") if note.transforms else ("reads", "read")
        words = f"{who} {verb} {_named(source, [note])}, for {time.monotonic() - note.since:.1f} s"
        where = place_of(source, note.samples)[1] | {"stage": stage, "worker": number}
        found.append(Reading(words, note.key, note.since, where))
    return found


def explained(error: WorkerError, source: Source, number: int, noted: Sequence[Note]) -> WorkerError:
    """The error with what was being read: any of these samples may be the cause."""
    verb, stage = ("transformed", "transform") if noted and noted[0].transforms else ("read", "read")
    reading = f", while it {verb} {_named(source, noted)}" if noted else ""
    where: dict[str, Any] = place_of(source, noted[0].samples)[1] if len(noted) == 1 else {}
    found = WorkerError(f"{error}{reading}", stage=stage, worker=number, **where)
    for (epoch, _), count, samples, *_ in noted:
        if count > 3:
            first = f"the first {len(samples)} " if count > len(samples) else ""
            numbers = source.ids(samples).tolist()
            found.add_note(f"samples of epoch {epoch} that were being read: {first}{numbers}")
    found.__cause__ = error.__cause__
    return found


def _named(source: Source, noted: Sequence[Note]) -> str:
    found = []
    for (epoch, _), count, samples, *_ in noted:
        ids, more = source.ids(samples[:3]), f", … ({count} in all)" if count > 3 else ""
        numbers = f"sample{'s' * (count > 1)} {', '.join(map(str, ids))}{more}"
        first = "the first is " if count > 1 else ""
        found.append(f"{numbers} of epoch {epoch} ({first}{place_of(source, samples)[0]})")
    return ", ".join(found)
