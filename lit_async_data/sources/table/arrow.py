"""`pyarrow`, an optional dependency: columns as single arrays of few types, and as numpy arrays."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices

# Most bytes of text that int32 offsets can address.
_MAX_INT32_TEXT = 2**31 - 1


def arrow(module: str = "") -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ConfigError(f"pyarrow is missing ({error}); install it by pip install pyarrow", "table") from error


def is_text(kind: Any) -> bool:
    types = arrow("types")
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_categorical(kind: Any) -> bool:
    return bool(arrow("types").is_dictionary(kind)) and is_text(kind.value_type)


def is_list(kind: Any) -> bool:
    types = arrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_single_array(column: Any) -> Any:
    """Combine the chunks of a column into one array: text, categorical text, lists or plain values.

    Decimals become int64 if they have no decimal places and all fit, else the nearest float64.
    """
    types, library = arrow("types"), arrow()
    kind = column.type
    if isinstance(kind, library.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        return as_single_array(library.chunked_array(storage, kind.storage_type))
    if types.is_decimal(kind):
        with contextlib.suppress(library.ArrowInvalid):
            return _concatenated(column.cast(library.int64()) if kind.scale == 0 else _floats(column))
        return _concatenated(_floats(column))
    if types.is_dictionary(kind):
        return _single_dictionary(column)
    if is_list(kind) and types.is_dictionary(kind.value_type):
        return _lists_of_categories(column)
    if is_text(kind) and (types.is_string_view(kind) or column.nbytes >= _MAX_INT32_TEXT):
        column = column.cast(library.large_string())
    if is_list(kind) and not types.is_fixed_size_list(kind):
        value = library.large_string() if is_text(kind.value_type) else kind.value_type
        if types.is_decimal(value):
            value, column = library.float64(), column.cast(library.large_list(library.string()))
        column = column.cast(library.large_list(value))
    return _concatenated(column)


def _floats(column: Any) -> Any:
    """Decimals as floats. Arrow's own cast rounds twice: it makes 1.15 of two places 1.1500000000000001."""
    return column.cast(arrow().string()).cast(arrow().float64())


def _lists_of_categories(column: Any) -> Any:
    """Lists of text; of categorical text if the categories are ordered."""
    kind = column.type.value_type
    texts = as_single_array(arrow().chunked_array([chunk.flatten() for chunk in column.chunks], kind))
    if is_categorical(texts.type) and not texts.type.ordered:
        texts = texts.dictionary_decode()
    lengths = np.concatenate([list_lengths(chunk) for chunk in column.chunks])
    return lists_of(texts, lengths, _concatenated(column.is_null()))


def _single_dictionary(column: Any) -> Any:
    """Categories of text stay categories; other dictionaries become plain values."""
    library, kind, text = arrow(), column.type.value_type, arrow().large_string()
    if not is_text(kind):
        return as_single_array(library.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], kind))
    texts = [chunk.dictionary.cast(text).take(chunk.indices) for chunk in column.chunks]
    plain = _concatenated(library.chunked_array(texts, text))
    if len(orders := orders_of(column)) != 1:
        return plain.dictionary_encode()
    order = library.array(orders[0], text)
    return library.DictionaryArray.from_arrays(arrow("compute").index_in(plain, order), order, ordered=True)


def orders_of(column: Any) -> list[list[str]]:
    """The longest order of the categories in a chunk of a column; and one that contradicts it, if there is one."""
    if not (is_categorical(column.type) and column.type.ordered):
        return []
    orders = [chunk.dictionary.to_pylist() for chunk in column.chunks]
    longest: list[str] = max(orders, key=len, default=[])
    return [longest, *(order for order in orders if order != [name for name in longest if name in order])][:2]


def is_ordered(kind: Any) -> bool:
    return is_ordered(kind.value_type) if is_list(kind) else is_categorical(kind) and bool(kind.ordered)


def is_text_list(kind: Any) -> bool:
    return is_list(kind) and (is_text(kind.value_type) or is_categorical(kind.value_type))


def list_lengths(array: Any) -> Indices:
    return values_of(arrow("compute").list_value_length(array)).astype(np.int64)


def lists_of(values: Any, lengths: Indices, missing: Any) -> Any:
    """Lists of given lengths from their values one after the other; null where ``missing`` is true."""
    return arrow().LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), values, mask=missing)


def _concatenated(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return arrow().concat_arrays(column.chunks)


def values_of(array: Any, fill: float = 0) -> npt.NDArray[Any]:
    """Whole numbers or floats as a numpy array, with nulls replaced. Do not write to it: it can share memory.

    Avoids `to_numpy` and Arrow scalars: each imports pandas if installed, which takes 0.17 seconds at the first batch.
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
