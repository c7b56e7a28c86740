"""The report of a finished pack: what was written, and how to read it."""

from __future__ import annotations

import dataclasses
from typing import Any

from lit_async_data.tools.inspect.report.suggestion import Call, Suggestion
from lit_async_data.tools.pack.packing import Packed
from lit_async_data.tools.pack.planning.plan import PARTS, PackedField, Plan
from lit_async_data.tools.pack.progress import duration
from lit_async_data.tools.terminal import sized


def report(packed: Packed, path: str) -> str:
    """The lines to print.

    Args:
        packed: What was written.
        path: The file, as the user calls it.
    """
    plan = packed.plan
    sizes = f"{sized(packed.nbytes)} ({sized(packed.decoded)} decoded)"
    lines = [f"{path}: {packed.samples:,} samples, {sizes}, every value compared, in {duration(packed.seconds)}"]
    width = max(len(field.key) for field in plan.fields)
    lines += [f"  {field.key:<{width}}  {field}; {_storage(field, plan)}" for field in plan.fields]
    program = Suggestion("", {"all": reading(plan, path)}).python().splitlines()
    return "\n".join([*lines, "Read it with", *(f"  {line}" for line in program), ""])


def _storage(field: PackedField, plan: Plan) -> str:
    if not field.chunk:
        return "contiguous"
    rows = "one sample" if field.chunk == 1 else f"{field.chunk} samples"
    return f"{rows} per chunk, {'shuffle and ' if field.shuffle else ''}{plan.codec}"


def reading(plan: Plan, path: str) -> Call:
    """What reads a packed file."""
    given = {field.key: dataclasses.replace(field.field, mask_and_scale=field.packed) for field in plan.fields}
    fields = {key: field if field.classes or field.mask_and_scale else key for key, field in given.items()}
    layouts = {field.key: field.layout for field in plan.fields if field.layout is not None}
    options: dict[str, Any] = {"layout": layouts} if layouts else {}
    if plan.sections[0].group:
        options["group"] = f"{PARTS}/*"
    return Call("HDF5Source", path, fields, options)
