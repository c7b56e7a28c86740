"""Fields of text over all parts: one list of names for all, and the samples that have texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lit_async_data.errors import FormatError, SourceError
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.hdf5.parts.part import StoredPart, of_group
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.texts import named, unknown_text
from lit_async_data.sources.table.labels import Labels, in_order
from lit_async_data.sources.table.text import no_classes, note_names, trim

# Rows that a message names.
NAMED = 5


def found_names(part: StoredPart) -> dict[str, tuple[str, ...]]:
    """What the numbers of fields of text stand for, where the user did not say."""
    fields = part.fields.items()
    return {key: names_of(field) for key, field in fields if field.text and not field.text.classes}


def names_of(field: StoredField) -> tuple[str, ...]:
    return field.spec.texts or field.spec.classes


def named_alike(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts, in which a number stands for the same text."""
    found = [found_names(part) for part in parts]
    common = {key: in_order(name for each in found for name in each.get(key, ())) for key in found[0]}
    for key, names in common.items():
        field, kind = parts[0].fields[key], getattr(parts[0].fields[key].text, "kind", None)
        if kind is None and (what := no_classes(names)):
            what = f"{field.stored}: {what}, or write kind='class' if these are the names of classes"
            raise FormatError(what, file=parts[0].path, dataset=field.values.name)
        if kind != "text":
            note_names(str(field.stored), names)
            common[key] = in_order(map(trim, names))
    return [renamed(part, common) for part in parts]


def renamed(part: StoredPart, names: Mapping[str, Sequence[str]], cure: str = "") -> StoredPart:
    """A part with text numbered by other names. Those of the user stay."""
    others = {key: tuple(names[key]) for key, own in found_names(part).items() if tuple(names.get(key, own)) != own}
    fields = {key: _renamed(part, part.fields[key], wanted, cure) for key, wanted in others.items()}
    return dataclasses.replace(part, fields={**part.fields, **fields})


def _renamed(part: StoredPart, field: StoredField, names: tuple[str, ...], cure: str) -> StoredField:
    def unknown(row: int, text: str) -> SourceError:
        return of_group(unknown_text(field.values, row, text, names, cure), part.names)

    kept = Labels(field.values.kept, field.spec.classes, texts=field.spec.texts).of_classes(names, unknown).values
    stored = dataclasses.replace(field.values, kept=kept)
    return dataclasses.replace(field, spec=named(field.spec, field.text, names), stored=stored)


def with_values(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts without the samples that lack a text or a row of the table; an error where text must not be empty."""
    return with_samples(list(map(_with_values, parts)))


def with_samples(parts: Sequence[StoredPart]) -> list[StoredPart]:
    left = [part for part in parts if part.anchors.count]
    if not left:
        raise FormatError(f"{parts[0]}: no sample is left that has a value of each field, and a row of the table")
    return left


def _with_values(part: StoredPart) -> StoredPart:
    if part.table_rows is not None and (part.table_rows < 0).any():
        part = part.at(part.anchors.rows(np.flatnonzero(part.rows_of_table() >= 0)))
    fields = [(key, each) for key, each in part.fields.items() if each.text and each.text.null != "ignore"]
    for key, field in fields:
        missing = field.values.kept == IGNORED
        missing[part.lacking.get(key, [])] = False
        if not missing.any():
            continue
        rows = part.anchors.rows(np.arange(part.anchors.count))
        own = field.window_rows(field.own(rows))
        lacks = missing[own if len(missing) > 1 else np.zeros_like(own)]
        if lacks.any() and field.text and field.text.null == "error":
            every = np.unique(own[lacks]).tolist()
            which = "row" if len(every) == 1 else "rows"
            listed = ", ".join(map(str, every[:NAMED])) + (f", … ({len(every)} in all)" if len(every) > NAMED else "")
            what = f"no text in {which} {listed}; write it, or set null='ignore' (−100) or null='drop'"
            where = {"file": part.path, "dataset": field.values.name, "row": every[0]}
            place = field.stored if part.names is None else field.values.at(every[0])
            raise of_group(FormatError(f"{place}: {what}", **where), part.names)
        part = part.at(rows[~lacks.any(axis=1)])
    return part
