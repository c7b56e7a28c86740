"""`pyarrow`, an optional dependency: columns as single arrays of few types, and as numpy arrays."""

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

# Most bytes of text that int32 offsets can address.
_MAX_INT32_TEXT = 2**31 - 1


def arrow(module: str = "") -> Any:
    """Import `pyarrow` or one of its modules.

    Args:
        module: Such as ``"csv"``; empty for the package itself.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"table: pyarrow is missing ({error}); install it by pip install 'lit-async-data[manifest]'"
        ) from error


def is_text(kind: Any) -> bool:
    """Whether a type is text, but not categorical text."""
    types = arrow("types")
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_categorical(kind: Any) -> bool:
    """Whether a type is categorical text: a dictionary type whose values are text."""
    return bool(arrow("types").is_dictionary(kind)) and is_text(kind.value_type)


def is_list(kind: Any) -> bool:
    """Whether a type is a list type."""
    types = arrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number(value: Any) -> bool:
    """Whether a value is a number, or text that can be read as a number."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_single_array(column: Any) -> Any:
    """Combine the chunks of a column into one array: text, categorical text, lists or plain values.

    Returns:
        An ``Array`` with the same rows. A single chunk is returned without a copy if its type allows.
    """
    types, library = arrow("types"), arrow()
    kind = column.type
    if isinstance(kind, library.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        return as_single_array(library.chunked_array(storage, kind.storage_type))
    if types.is_run_end_encoded(kind):
        decoded = [arrow("compute").run_end_decode(chunk) for chunk in column.chunks]
        return as_single_array(library.chunked_array(decoded, kind.value_type))
    if types.is_dictionary(kind):
        return _single_dictionary(column)
    if is_list(kind) and types.is_dictionary(kind.value_type):
        return _lists_of_categories(column)
    if is_text(kind) and (types.is_string_view(kind) or column.nbytes >= _MAX_INT32_TEXT):
        column = column.cast(library.large_string())
    if is_list(kind) and not types.is_fixed_size_list(kind):
        value = library.large_string() if is_text(kind.value_type) else kind.value_type
        column = column.cast(library.large_list(value))
    return _concatenated(column)


def _lists_of_categories(column: Any) -> Any:
    """Lists of text; of categorical text if the categories are ordered."""
    library, kind = arrow(), column.type.value_type
    lengths = [values_of(arrow("compute").list_value_length(chunk)) for chunk in column.chunks]
    texts = as_single_array(library.chunked_array([chunk.flatten() for chunk in column.chunks], kind))
    if is_categorical(texts.type) and not texts.type.ordered:
        texts = texts.dictionary_decode()
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    return library.LargeListArray.from_arrays(offsets, texts, mask=_concatenated(column.is_null()))


def _single_dictionary(column: Any) -> Any:
    library = arrow()
    kind = column.type
    plain = not is_text(kind.value_type) or any(chunk.dictionary.null_count for chunk in column.chunks)
    if plain:
        # A null in the dictionary would count as a category.
        decoded = [chunk.dictionary_decode() for chunk in column.chunks]
        return as_single_array(library.chunked_array(decoded, kind.value_type))
    order = _common_order([chunk.dictionary.to_pylist() for chunk in column.chunks]) if kind.ordered else None
    ordered, chunks = order is not None, []
    if ordered:  # first, since unifying keeps the order of the first dictionary
        chunks.append(library.DictionaryArray.from_arrays(library.array([], library.int32()), order, ordered=True))
    for chunk in column.chunks:
        entries, codes = chunk.dictionary.cast(library.large_string()), chunk.indices.cast(library.int32())
        chunks.append(library.DictionaryArray.from_arrays(codes, entries, ordered=ordered))
    return _concatenated(library.chunked_array(chunks).unify_dictionaries())


def _common_order(orders: Sequence[Sequence[str]]) -> Any:
    """The longest of several category orders if all others are contained in it in the same order; else None."""
    longest = max(orders, key=len, default=[])
    places = {name: place for place, name in enumerate(longest)}
    for order in orders:
        positions = [places.get(name, -1) for name in order]
        if positions and (min(positions) < 0 or any(b <= a for a, b in itertools.pairwise(positions))):
            return None
    return arrow().array(longest, arrow().large_string())


def is_ordered(kind: Any) -> bool:
    """Whether a type is ordered categorical text, or lists of it."""
    return is_ordered(kind.value_type) if is_list(kind) else is_categorical(kind) and bool(kind.ordered)


def is_text_list(kind: Any) -> bool:
    """Whether a type is a list of text, as `as_single_array` returns it."""
    return is_list(kind) and (is_text(kind.value_type) or is_categorical(kind.value_type))


def _concatenated(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return arrow().concat_arrays(column.chunks)


def values_of(array: Any, fill: float = 0) -> npt.NDArray[Any]:
    """Numbers as a numpy array, without a detour through floats for nulls.

    Avoids `to_numpy` and Arrow scalars: each imports pandas if installed, which takes 0.17 seconds at the first batch.

    Args:
        array: Whole numbers or floats.
        fill: Replaces nulls.

    Returns:
        Shape (len(array),). Without nulls it shares the memory of ``array`` and must not be written to.
    """
    if not array.null_count:
        values: npt.NDArray[Any] = np.from_dlpack(array)
        return values
    missing = booleans_of(array.is_null())
    without_nulls = arrow().Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], 0, array.offset)
    values = np.from_dlpack(without_nulls).copy()
    values[missing] = fill
    return values


def booleans_of(array: Any) -> npt.NDArray[np.bool_]:
    """Booleans as a numpy array, nulls as False; see `values_of`."""
    return values_of(array.cast(arrow().uint8())).view(np.bool_)


def first_true_row(array: Any) -> int:
    """The first row that is true; -1 if there is none."""
    values = booleans_of(array)
    row = int(values.argmax()) if values.size else 0
    return row if values.size and values[row] else -1


def arrow_integers(rows: Indices) -> Any:
    """int64 values as an Arrow array that shares their memory."""
    library = arrow()
    return library.Array.from_buffers(library.int64(), len(rows), [None, library.py_buffer(np.ascontiguousarray(rows))])


def arrow_strings(texts: Sequence[str]) -> Any:
    """A few texts as an Arrow array, without importing pandas; see `values_of`."""
    library, stored = arrow(), [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, stored)], dtype=np.int32)
    return library.StringArray.from_buffers(len(stored), library.py_buffer(ends), library.py_buffer(b"".join(stored)))


def split_folders(array: Any) -> tuple[Indices, list[str]]:
    """The folder number of each path, and the folders. Only compares text."""
    texts = array.dictionary_decode() if is_categorical(array.type) else array
    encoded = arrow("compute").replace_substring_regex(texts, r"/*[^/]*$", "").dictionary_encode()
    return values_of(encoded.indices).astype(np.int64), list(encoded.dictionary.to_pylist())


def numpy_values(array: Any) -> npt.NDArray[Any]:
    """The values of a column in numpy: numbers, or an object array in which rows of equal text share one object."""
    if is_text(array.type):
        array = array.dictionary_encode()
    if not is_categorical(array.type):
        numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return numbers
    values = np.array([*array.dictionary.to_pylist(), None], object)
    codes = arrow("compute").fill_null(array.indices, len(values) - 1)
    shared: npt.NDArray[Any] = values[codes.to_numpy()]
    return shared


def first_bad_row(array: Any, is_bad: Callable[[Any], bool]) -> int:
    """Find the first bad row by bisection.

    Args:
        array: An array with at least one bad row.
        is_bad: Tells whether a slice of the array has a bad row.
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
    """The first row whose text is not UTF-8 or has a NUL byte, and what is wrong with it; None if there is none."""
    kind = array.type
    if not _holds_text(kind):
        return None
    for is_bad, what in ((_is_not_utf8, "text that is not UTF-8"), (_has_nul, "a NUL byte")):
        if is_bad(array):
            return first_bad_row(array, is_bad), what
    return None


def _holds_text(kind: Any) -> bool:
    return is_text(kind) or is_categorical(kind) or (is_list(kind) and _holds_text(kind.value_type))


def _entries(array: Any) -> Any:
    """The texts of an array, without texts outside of it that share its buffers."""
    if is_list(array.type):
        return _entries(array.flatten())
    return array.dictionary.take(array.unique().indices.drop_null()) if is_categorical(array.type) else array


def _is_not_utf8(array: Any) -> bool:
    try:
        _entries(array).validate(full=True)
    except arrow().ArrowInvalid:
        return True
    return False


def _has_nul(array: Any) -> bool:
    entries = _entries(array)
    data = entries.buffers()[2]
    # The buffer may be larger than the array, so a NUL byte in it is searched again in the array.
    if data is None or re.search(b"\0", memoryview(data)) is None:
        return False
    return bool(arrow("compute").any(arrow("compute").match_substring(entries, "\0")).as_py())
