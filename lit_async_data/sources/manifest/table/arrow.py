"""`pyarrow`, which may be missing, and what columns of it are here: one array each, of few kinds of types."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices

# Bytes of text whose places int32 can hold.
_SMALL_TEXT = 2**31 - 1


def arrow(module: str = "") -> Any:
    """`pyarrow` or one of its modules.

    Args:
        module: Such as ``"csv"``; empty for the package itself.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"table: reading tables needs pyarrow ({error}): pip install 'lit-async-data[manifest]'"
        ) from error


def is_text(kind: Any) -> bool:
    """Whether a type is that of text, but not of a dictionary of it."""
    types = arrow("types")
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_coded(kind: Any) -> bool:
    """Whether a type is a dictionary of text."""
    return bool(arrow("types").is_dictionary(kind)) and is_text(kind.value_type)


def is_list(kind: Any) -> bool:
    """Whether a type is one of lists."""
    types = arrow("types")
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def is_number(value: Any) -> bool:
    """Whether a value is a number, or text that reads as one."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_one(column: Any) -> Any:
    """A column as one array: text, text in a dictionary, lists or plain values.

    Args:
        column: A ``ChunkedArray`` of any type.

    Returns:
        An ``Array`` of as many rows. Memory is shared where there is one chunk only.
    """
    types, library = arrow("types"), arrow()
    kind = column.type
    if isinstance(kind, library.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        return as_one(library.chunked_array(storage, kind.storage_type))
    if types.is_run_end_encoded(kind):
        decoded = [arrow("compute").run_end_decode(chunk) for chunk in column.chunks]
        return as_one(library.chunked_array(decoded, kind.value_type))
    if types.is_dictionary(kind):
        return _one_dictionary(column)
    if is_list(kind) and types.is_dictionary(kind.value_type):
        return _lists_of_categories(column)
    if is_text(kind) and (types.is_string_view(kind) or column.nbytes >= _SMALL_TEXT):
        column = column.cast(library.large_string())
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return as_one(library.chunked_array([_listed(chunk) for chunk in column.chunks]))
    if is_list(kind) and not types.is_fixed_size_list(kind):
        column = column.cast(library.large_list(_plain(kind.value_type)))
    return _joined(column)


def _listed(views: Any) -> Any:
    """Lists in order from views, which pyarrow 26 casts wrongly where there are nulls in a slice."""
    lengths = values_of(arrow("compute").list_value_length(views))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return arrow().LargeListArray.from_arrays(offsets, views.flatten(), mask=views.is_null())


def _lists_of_categories(column: Any) -> Any:
    """Lists of text; of a dictionary of it where the order of its entries counts."""
    library, kind = arrow(), column.type.value_type
    lengths = [values_of(arrow("compute").list_value_length(chunk)) for chunk in column.chunks]
    texts = as_one(library.chunked_array([chunk.flatten() for chunk in column.chunks], kind))
    if is_coded(texts.type) and not texts.type.ordered:
        texts = texts.dictionary_decode()
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    return library.LargeListArray.from_arrays(offsets, texts, mask=_joined(column.is_null()))


def _one_dictionary(column: Any) -> Any:
    library = arrow()
    kind = column.type
    plain = not is_text(kind.value_type) or any(chunk.dictionary.null_count for chunk in column.chunks)
    if plain:
        # An entry of a dictionary that is no value would count as one.
        decoded = [chunk.dictionary_decode() for chunk in column.chunks]
        return as_one(library.chunked_array(decoded, kind.value_type))
    order = _one_order([chunk.dictionary.to_pylist() for chunk in column.chunks]) if kind.ordered else None
    ordered, chunks = order is not None, []
    if ordered:  # first, since entries are joined in the order of the chunks
        chunks.append(library.DictionaryArray.from_arrays(library.array([], library.int32()), order, ordered=True))
    for chunk in column.chunks:
        entries, codes = chunk.dictionary.cast(library.large_string()), chunk.indices.cast(library.int32())
        chunks.append(library.DictionaryArray.from_arrays(codes, entries, ordered=ordered))
    return _joined(library.chunked_array(chunks).unify_dictionaries())


def _one_order(orders: Sequence[Sequence[str]]) -> Any:
    """The longest of several orders of categories, if all others are parts of it; else None."""
    longest = max(orders, key=len, default=[])
    places = {name: place for place, name in enumerate(longest)}
    for order in orders:
        found = [places.get(name, -1) for name in order]
        if found and (min(found) < 0 or any(later <= before for before, later in itertools.pairwise(found))):
            return None
    return arrow().array(longest, arrow().large_string())


def is_ordered(kind: Any) -> bool:
    """Whether a type is a dictionary of text whose entries have an order of their own, or one of lists of such."""
    return is_ordered(kind.value_type) if is_list(kind) else is_coded(kind) and bool(kind.ordered)


def lists_text(kind: Any) -> bool:
    """Whether a type is one of lists of text, as `as_one` returns them."""
    return is_list(kind) and (is_text(kind.value_type) or is_coded(kind.value_type))


def _plain(kind: Any) -> Any:
    """The type of a list's values, such that they can be joined."""
    library = arrow()
    return library.large_string() if is_text(kind) else kind


def _joined(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return arrow().concat_arrays(column.chunks)


def values_of(array: Any, nothing: float = 0) -> npt.NDArray[Any]:
    """Numbers as numpy has them; never through floats, as nulls would go.

    Not `to_numpy`, nor a scalar of Arrow: each imports pandas, where that is installed, which takes 0.17
    seconds at the first batch.

    Args:
        array: Of whole numbers or floats.
        nothing: Stands where there is no value.

    Returns:
        Shape (len(array),); where nothing is missing, the memory of the array, not to be written to.
    """
    if not array.null_count:
        values: npt.NDArray[Any] = np.from_dlpack(array)
        return values
    missing = truth_of(array.is_null())
    there = arrow().Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], 0, array.offset)
    values = np.from_dlpack(there).copy()
    values[missing] = nothing
    return values


def truth_of(array: Any) -> npt.NDArray[np.bool_]:
    """Truths as numpy has them, nulls as False; as `values_of`."""
    return values_of(array.cast(arrow().uint8())).view(np.bool_)


def first_true(array: Any) -> int:
    """The first row that is true; -1 if there is none."""
    found = truth_of(array)
    row = int(found.argmax()) if found.size else 0
    return row if found.size and found[row] else -1


def numbered(rows: Indices) -> Any:
    """Whole numbers as an array of Arrow, which shares their memory."""
    library = arrow()
    return library.Array.from_buffers(library.int64(), len(rows), [None, library.py_buffer(np.ascontiguousarray(rows))])


def texts_of(texts: Sequence[str]) -> Any:
    """A few texts as an array of Arrow; as `values_of`."""
    library, stored = arrow(), [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, stored)], dtype=np.int32)
    return library.StringArray.from_buffers(len(stored), library.py_buffer(ends), library.py_buffer(b"".join(stored)))


def folders_of(array: Any) -> tuple[Indices, list[str]]:
    """A number for the folder of each path, and the folders, by the text alone.

    Args:
        array: Of text.
    """
    texts = array.dictionary_decode() if is_coded(array.type) else array
    encoded = arrow("compute").replace_substring_regex(texts, r"/*[^/]*$", "").dictionary_encode()
    return values_of(encoded.indices).astype(np.int64), list(encoded.dictionary.to_pylist())


def plain_of(array: Any) -> npt.NDArray[Any]:
    """The values of a column as numpy has them: numbers, or objects that rows of equal text share."""
    if is_text(array.type):
        array = array.dictionary_encode()
    if not is_coded(array.type):
        numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return numbers
    values = np.array([*array.dictionary.to_pylist(), None], object)
    codes = arrow("compute").fill_null(array.indices, len(values) - 1)
    shared: npt.NDArray[Any] = values[codes.to_numpy()]
    return shared


def first_row(array: Any, is_bad: Callable[[Any], bool]) -> int:
    """The first row that is bad, by halving.

    Args:
        array: In which some row is.
        is_bad: Says of a part of it whether it holds a bad row.
    """
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if is_bad(array.slice(low, middle - low)):
            high = middle
        else:
            low = middle
    return low


def text_fault(array: Any) -> tuple[int, str] | None:
    """The first row whose text is no UTF-8 or holds a NUL byte, and which of these.

    Args:
        array: As from `as_one`; without text, nothing is wrong with it.
    """
    kind = array.type
    if not _holds_text(kind):
        return None
    for is_bad, what in ((_is_not_utf8, "text that is not UTF-8"), (_has_nul, "a NUL byte")):
        if is_bad(array):
            return first_row(array, is_bad), what
    return None


def _holds_text(kind: Any) -> bool:
    return is_text(kind) or is_coded(kind) or (is_list(kind) and _holds_text(kind.value_type))


def _entries(array: Any) -> Any:
    """The texts in an array, and none that lie beside them in memory."""
    if is_list(array.type):
        return _entries(array.flatten())
    return array.dictionary.take(array.unique().indices.drop_null()) if is_coded(array.type) else array


def _is_not_utf8(array: Any) -> bool:
    try:
        _entries(array).validate(full=True)
    except arrow().ArrowInvalid:
        return True
    return False


def _has_nul(array: Any) -> bool:
    entries = _entries(array)
    data = entries.buffers()[2]
    # The buffer may hold more than the array; so what is found there is looked for again.
    if data is None or re.search(b"\0", memoryview(data)) is None:
        return False
    return bool(arrow("compute").any(arrow("compute").match_substring(entries, "\0")).as_py())
