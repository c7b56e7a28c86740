"""Checks the first files of a table before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from lit_async_data.errors import FormatError
from lit_async_data.sources.contract.fingerprints import probes
from lit_async_data.sources.manifest.fields.fields import FileField
from lit_async_data.sources.manifest.fields.rows import Rows

Check = Literal["first", "none"]
# Files whose shapes are compared if the decoder does not make all shapes equal.
SHAPE_FILES = 32
# Most rows that a message names.
_NAMED = 5


def check_paths(how: Check, fields: Mapping[str, FileField], rows: Rows) -> None:
    """Check files, as the user chose; see ``check_files`` of `ManifestSource`."""
    if how == "none":
        return
    for key, field in fields.items():
        if not field.decoder.fits_all:
            _check_shapes(key, field, rows)
    for field in fields.values():
        field.read(np.zeros(1, np.int64), np.empty((1, *field.spec.stored_shape), field.spec.dtype), None)


def _check_shapes(key: str, field: FileField, rows: Rows) -> None:
    shapes = {sample: field.shape_of(sample) for sample in probes(len(rows), most=SHAPE_FILES).tolist()}
    others = [sample for sample in shapes if shapes[sample] != shapes[0]]
    if others:
        paths = field.paths.of(np.array([0, *others[:_NAMED]]))
        named = "; ".join(
            f"{'×'.join(map(str, shapes[sample])) or 'a single value'} in {rows.where(sample)} ({path})"
            for sample, path in zip([0, *others], paths, strict=False)
        )
        more = f"; … ({len(others)} of {len(shapes)} checked)" if len(others) > _NAMED else ""
        raise FormatError(
            f"{key}: files have different shapes: {named}{more}; {field.decoder.advice}",
            file=paths[1],
            row=rows.place(others[0])[1],
            sample_id=others[0],
        )
