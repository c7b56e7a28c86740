"""The columns of a table by name: which are there, and which are wanted."""

from __future__ import annotations

import codecs
import difflib
import os
from collections import Counter
from collections.abc import Sequence

from lit_async_data.errors import ManifestError
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, named, shown

# How files begin that are no text.
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
# Names of columns that a message lists.
_LISTED = 20


class NoColumnError(ManifestError):
    """A table has no column of a name."""


def check_content(path: str, origin: RowOrigin, *, codec: str | None) -> None:
    """Check that a table of text is not something else that its first bytes tell of.

    Args:
        path: Of the file.
        origin: For messages.
        codec: Its encoding; None where it must be UTF-8.

    Raises:
        ManifestError: It is.
    """
    with open(path, "rb") as file:
        first = file.read(4)
    if first.startswith(_GZIP) and not path.endswith(".gz"):
        raise origin.error(f"is compressed by gzip; name it {named(os.path.basename(path))}.gz")
    if first == _ZIP:
        raise origin.error("is a ZIP archive, or a spreadsheet: unpack it, or give what pandas.read_excel makes of it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not (codec or "").startswith("utf-16"):
        option = "" if codec is None else "say encoding=utf-16, or "
        raise origin.error(f"its first line is not UTF-8, but UTF-16: {option}save the table as UTF-8")


def check_columns(present: Sequence[object], wanted: Sequence[str], origin: RowOrigin) -> None:
    """Check that each wanted column is there, and no name stands twice.

    Args:
        present: The names in the table, in its order. Empty ones, as spreadsheets leave them, may repeat.
        wanted: Names.
        origin: For messages.

    Raises:
        ManifestError: Otherwise; near names are suggested.
    """
    twice = [name for name, count in Counter(present).items() if count > 1 and name != ""]
    if twice:
        raise origin.error(f"has more than one column {shown(twice[0])}; each name may stand once")
    for name in wanted:
        if name not in present:
            texts = [each for each in present if isinstance(each, str)]
            near = difflib.get_close_matches(name.strip(), texts, 3, 0.6)
            hint = f"did you mean {' or '.join(map(shown, near))}?" if near else f"it has {_listed(present)}"
            said = origin.error(f"has no column {shown(name)}; {hint}")
            raise NoColumnError(str(said), file=said.file, dataset=name)


def _listed(names: Sequence[object]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(map(shown, names[:_LISTED])) or "none") + more
