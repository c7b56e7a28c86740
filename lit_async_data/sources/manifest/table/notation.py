"""`check_notation`: refuses text that is numbers or booleans in another notation, before it becomes classes."""

from __future__ import annotations

import re
from typing import Any

from lit_async_data.sources.manifest.table.arrow import is_categorical, is_list
from lit_async_data.sources.manifest.table.numeric import MISSING
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, listed

_DIGITS = r"[+\-\u2212]?(\d+([.,]\d*)?|[.,]\d+)([eE][+\-]?\d+)?"
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
# What people write where there is no number. Whole numbers beside one of them may be classes.
_NO_NUMBER = frozenset({"?", "-", "--", ".", "na", "n/a", "nan", "none", "null", "unknown", "missing"})
# A decimal comma, the minus sign of typesetters, per cent; groups of thousands; a vector with or without brackets.
_OTHER = re.compile(
    rf"{_DIGITS}\s*%?|[+\-\u2212]?\d{{1,3}}([.,' \u00a0\u202f]\d{{3}})+([.,]\d+)?"
    rf"|{_DIGITS}([ \t,;]+{_DIGITS})+|[\[(]\s*({_DIGITS}([\s,;]+{_DIGITS})*)?[\s,;]*[\])]",
    re.ASCII,
)
_MEANINGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off"), False),
}
# Text with more distinct values is refused in any case.
_MOST = 2**16


def check_notation(array: Any, column: str, origin: RowOrigin) -> None:
    """Check that text is not numbers, vectors or booleans in disguise. Dates, ``1-2`` and ``1.2.3`` are none.

    Args:
        array: Text, categorical text, or lists of them.
        column: Name of the column.
        origin: Origin of the rows.

    Raises:
        ManifestError: Each cell is a number, and some are written with decimal commas, groups of thousands or as a
            vector; or they are fractions beside marks such as "?"; or each cell is a boolean, and some are spelled
            differently. Shows cells, and what to do.
    """
    entries = array.flatten() if is_list(array.type) else array
    if is_categorical(entries.type):
        entries = entries.dictionary_decode()
    distinct = entries.unique().drop_null()
    if len(distinct) > _MOST:
        return
    texts = [text for text in map(str.strip, distinct.to_pylist()) if text not in MISSING]
    other = [text for text in texts if not _PLAIN.fullmatch(text)]
    numbers = [text for text in texts if _PLAIN.fullmatch(text)]
    meanings = {_MEANINGS.get(text.casefold()) for text in texts}
    if other and all(map(_OTHER.fullmatch, texts)):
        shown, what = (
            other,
            "numbers; write them with a decimal point and without groups, and a vector as several columns",
        )
    elif not all(map(_WHOLE.fullmatch, numbers)) and all(text.casefold() in _NO_NUMBER for text in other):
        shown, what = other + numbers, "numbers; give them as numbers, and leave a cell empty that has none"
    elif None not in meanings and len(texts) > len(meanings):
        shown, what = texts, "true and false in several spellings; write each in one"
    else:
        return
    raise origin.error(
        f"{listed(shown[:5])} look like {what}, or set kind: class if these are the names of classes", column=column
    )
