"""What a finished pack tells: what was written, and how to read it."""

from __future__ import annotations

from lit_async_data.tools.pack.packing import Packed
from lit_async_data.tools.pack.plan import PARTS, PackedField, Plan
from lit_async_data.tools.pack.progress import duration, size


def report(packed: Packed, path: str) -> str:
    """The lines to print.

    Args:
        packed: What was written.
        path: The file, as the user calls it.
    """
    plan = packed.plan
    sizes = f"{size(packed.nbytes)} ({size(packed.decoded)} decoded)"
    lines = [f"{path}: {packed.samples:,} samples, {sizes}, every value compared, in {duration(packed.seconds)}"]
    width = max(len(field.key) for field in plan.fields)
    lines += [f"  {field.key:<{width}}  {field}; {_storage(field, plan)}" for field in plan.fields]
    return "\n".join([*lines, "Read it with", f"  {reading(plan, path)}", ""])


def _storage(field: PackedField, plan: Plan) -> str:
    if not field.chunk:
        return "contiguous"
    rows = "one sample" if field.chunk == 1 else f"{field.chunk} samples"
    return f"{rows} per chunk, {'shuffle and ' if field.shuffle else ''}{plan.codec}"


def reading(plan: Plan, path: str) -> str:
    """The Python expression that reads a packed file."""
    fields = ", ".join(f'"{field.key}": {_field(field)}' for field in plan.fields)
    layouts = {field.key: field.layout for field in plan.fields if field.layout is not None}
    layout = ", layout={" + ", ".join(f'"{key}": "{text}"' for key, text in layouts.items()) + "}" if layouts else ""
    group = f', group="{PARTS}/*"' if plan.sections[0].group else ""
    return f'HDF5Source("{path}", fields={{{fields}}}{layout}{group})'


def _field(field: PackedField) -> str:
    options = field.field
    return f'"{field.key}"' if options.classes is None else f'Field("{field.key}", classes={list(options.classes)})'
