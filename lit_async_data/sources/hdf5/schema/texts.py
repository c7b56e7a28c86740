"""Text as numbers: of classes, or of texts that are none, such as ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.hdf5.schema.categories import did_you_mean, find_coded
from lit_async_data.sources.hdf5.schema.compound import find_member, member_of
from lit_async_data.sources.hdf5.schema.encoded import encoding
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset, image_format
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.table.text import INEXACT, MOST_CLASSES

CODES = np.dtype(np.int64)


def is_numbered(group: OpenGroup, name: str, field: Field) -> bool:
    """Whether a field is numbers of the text of a dataset, or of a member of it; encoded images are none.

    Categories are text if the user says so, else classes.
    """
    import h5py

    of, member = group.split(name)
    node = group.node(of)
    if isinstance(node, h5py.Group) and encoding(node) in ("categorical", "nullable"):
        values = group.node(f"/{name.strip('/')}/values")
        is_text = isinstance(values, h5py.Dataset) and h5py.check_string_dtype(values.dtype) is not None
        return is_text or field.kind == "text"
    if field.lookup is not None or not isinstance(node, h5py.Dataset):
        return False
    kind: Any = find_member(node, member, {"file": group.path, "dataset": of})[1]
    if not isinstance(kind, h5py.h5t.TypeStringID):
        return field.kind in ("class", "text") and isinstance(kind, h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID)
    return bool(member) or not image_format(node)


def inspect_texts(group: OpenGroup, name: str, field: Field, layout: str | None, where: str) -> StoredDataset:
    """A dataset of one text, or whole number, per row as numbers of text, which are kept in memory."""
    if layout is not None or field.column is not None or field.mask_and_scale:
        raise ConfigError("layout, column and mask_and_scale do not apply to text; leave them out", where)
    coded = find_coded(group, name)
    stored = group.inspect_dataset(group.split(coded.name)[0], in_heap=True)
    dataset, path = group.whole_member(f"/{coded.name.strip('/')}", "")
    values = member_of(dataset[...], path).reshape(-1)
    if coded.names or coded.mask is not None:
        values = coded.texts(values, group.path, "")
    codes, row = numbered(values, field, stored, where)
    return StoredDataset(
        group.path, name, codes.shape, CODES, 0, row, None, 1, filtered=False, external=stored.external, kept=codes
    )


def numbered(
    values: npt.NDArray[Any], field: Field, stored: StoredDataset, where: str
) -> tuple[npt.NDArray[np.int64], FieldSpec]:
    """A number for each text, and the field with what they stand for: the user's classes, or all texts.

    `IGNORED` stands for empty text, unless that is a class.
    """
    floats = field.kind == "text" and values.dtype.kind == "f"  # as MATLAB stores whole numbers
    if floats and (np.abs(values) < INEXACT).all() and (values % 1 == 0).all():
        values = values.astype(np.int64)
    if values.dtype.kind not in ("SOiu" if field.kind == "text" else "SO") or field.kind == "number":
        what = f"{stored} holds {values.dtype}, which is not {field.kind}"
        if where == "fields.(on)":
            raise ConfigError(f"{what}; ids are text or whole numbers, so name a dataset of these", "on")
        raise ConfigError(f"{what}; leave kind out", f"{where}.kind")
    numbers: dict[Any, int] = {}
    codes = np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()], np.int64)
    texts = [each.decode(errors="surrogateescape") if isinstance(each, bytes) else str(each) for each in numbers]
    names = tuple(field.classes or filter(None, texts))
    if not field.classes and field.kind != "text" and len(names) > MOST_CLASSES:
        raise ConfigError(
            f"{stored} holds {len(names)} distinct texts, which seem to be ids; write kind='text'", f"{where}.kind"
        )
    places = {name: number for number, name in enumerate(names)}
    found = np.array([places.get(text, -1 if text else IGNORED) for text in texts], np.int64)[codes]
    unknown = np.flatnonzero(found == -1)
    if unknown.size:
        row = int(unknown[0])
        raise unknown_text(stored, row, texts[codes[row]], names, f"{where}.classes names all of them")
    return found, named(FieldSpec((), CODES), field, names)


def named(spec: FieldSpec, field: Field | None, names: tuple[str, ...]) -> FieldSpec:
    """A field whose numbers stand for these names."""
    if field and field.kind == "text":
        return dataclasses.replace(spec, texts=names)
    return dataclasses.replace(spec, classes=names)


def unknown_text(stored: StoredDataset, row: int, text: str, names: tuple[str, ...], cure: str) -> FormatError:
    listed = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    what = f"{text!r} is not one of {listed}{did_you_mean(text, names)}; {cure}"
    return FormatError(f"{stored.at(row)}: {what}", file=stored.path, dataset=stored.name, row=row)
