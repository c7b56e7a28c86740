"""For tests: `ArraySource`, and `check_contract` for sources of your own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, BatchSpec, FieldSpec
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.source import Location, Part, Source, StorageLayout, check_range, fill


class ArraySource(Source):
    """A source of arrays in memory, with any storage layout that a test needs. Safe to read from several threads.

    Args:
        arrays: One array per batch key, samples on axis 0.
        parts: Names of the parts in order, and the number of samples of each: ``{"a.h5:/left": 10}``. None: one part.
        columns: Values by name, one per sample, that no batch contains.
        chunks: The storage layout to report. None: samples are read one by one, under a lock.

    Example:
        >>> source = ArraySource({"x": np.zeros((10, 3, 8, 8), "u1")}, parts={"a.h5": 2, "b.h5:/left": 8})
        >>> len(source), source.spec["x"].shape
        (10, (3, 8, 8))
        >>> source.locate([3])
        [Location(file='files/b.h5', group='/left', row=1)]
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        parts: Mapping[str, int] | None = None,
        columns: Mapping[str, npt.NDArray[Any]] | None = None,
        chunks: StorageLayout | None = None,
    ) -> None:
        self._arrays, self._columns, self._chunks = dict(arrays), dict(columns or {}), chunks or StorageLayout()
        fields = {key: FieldSpec(array.shape[1:], array.dtype) for key, array in arrays.items()}
        self._spec = BatchSpec(fields, as_mapping=True)
        named = [(name, *name.partition(":")[::2], samples) for name, samples in (parts or {}).items()]
        self._parts = tuple(Part(f"files/{file}", group or "/", name, samples) for name, file, group, samples in named)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    @property
    def chunks(self) -> StorageLayout:
        return self._chunks

    @property
    def parts(self) -> Sequence[Part]:
        return self._parts or super().parts

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy samples; see `Source.read_into`."""
        check_range(samples, self)
        for key, array in out.items():
            np.take(self._arrays[key], samples, axis=0, out=array, mode="clip")

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column given to the constructor, or an array; see `Source.column`."""
        return self._columns[name] if name in self._columns else super().column(name)


THREADS = 4
# Bytes before and after an array for `read_into`, which must not change them.
MARGIN = 64


def check_contract(source: Source, *, samples: int = 50) -> None:
    """Test that a source keeps the promises of `Source`. For the tests of your own sources.

    The test reads samples in many ways and compares the bytes: alone, in any order, repeated, field by field, into
    memory with other contents, from several threads, after `close`, from a pickled copy, and after reading ahead. It
    also checks what the source says of its chunks, parts and places. At the end it closes the source.

    Args:
        source: The source to test.
        samples: Number of samples to read, spread over the source.

    Raises:
        AssertionError: The source breaks a promise; the message names promise, sample and field.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> check_contract(ArraySource({"x": np.arange(12).reshape(4, 3), "y": np.arange(4)}))
    """
    assert isinstance(source, Source), f"{type(source).__name__} does not inherit from lit_async_data.Source"
    with _promise("__len__ returns a whole number"):
        length = len(source)
    assert length >= 1, f"__len__ returned {length}; a source has at least one sample"
    with _promise("spec and name are properties that raise nothing"):
        spec, name = source.spec, source.name
    assert not callable(spec), "spec is a method; write @property above it"
    assert isinstance(spec, BatchSpec), f"spec is {spec!r}, which is not a BatchSpec"
    assert spec.fields, "spec has no fields; name at least one"
    for key, field in spec.items():
        assert field.fits_tensor, f"spec: {key} has dtype {field.dtype!r}, which no tensor can have"
    assert source.spec == spec, "spec returned something else the second time"
    assert isinstance(name, str), f"name is {name!r}; it must be text"
    chosen = np.unique(np.linspace(0, length - 1, min(samples, length)).astype(np.int64))
    try:
        expected = _read(source, chosen)
        check = functools.partial(_check_read, source, chosen, expected)
        _check_reading(source, chosen, check)
        with _promise("locate, chunks, parts, places, fingerprint, ids and column describe all samples"):
            _check_description(source, chosen, expected)
        with _promise("read_random reads any samples"):
            _check_random(source, chosen)
        with _promise("reserve, fetch and decode are for any samples"):
            _check_reading_ahead(source, chosen, check)
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            generators = [np.random.default_rng(seed) for seed in range(THREADS)]
            list(pool.map(lambda each: _check_in_thread(each, len(chosen), check), generators))
        copy = _copy(source)
        assert (copy.spec, len(copy)) == (spec, length), "a pickled copy has another spec or length"
        _check_read(copy, chosen, expected, "from a pickled copy")
        with _promise("close can be called twice"):
            copy.close()
            source.close()
            source.close()
        check("after close")
    finally:
        with contextlib.suppress(Exception):
            source.close()


@contextlib.contextmanager
def _promise(promise: str) -> Iterator[None]:
    """Turns an error of the source into an `AssertionError` that names the broken promise."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{promise}; here it raised {type(error).__name__}: {error}") from error


def _copy(source: Source) -> Source:
    with _promise("a source can be pickled, without the connections and open files that it opens again"):
        copy: Source = pickle.loads(pickle.dumps(source))  # noqa: S301  # made here
    return copy


def _check_read(
    source: Source, chosen: Indices, expected: Mapping[str, Array], how: str, places: Any = slice(None), **reading: Any
) -> None:
    """Read the samples at these places of the chosen ones again."""
    found = _read(source, chosen[places], **reading)
    _compare(found, {key: expected[key][places] for key in found}, chosen[places], how)


def _check_reading(source: Source, chosen: Indices, check: Callable[..., None]) -> None:
    check("into memory that held other bytes", poison=0xFF)
    shuffled = np.random.default_rng(0).permutation(len(chosen))
    check("in mixed order with repetitions", np.concatenate([shuffled, shuffled[:3], shuffled[:1]]))
    for place in range(min(len(chosen), 5)):
        check("alone", slice(place, place + 1))
    for key in source.spec:
        check("one field at a time", keys=(key,))
    _read(source, chosen[:0])
    narrow = source.spec.narrowed()
    for key, field in narrow.items():
        if field.dtype != source.spec[key].dtype:
            out = narrow.empty(len(chosen), [key])
            _read_into(source, chosen, out)
            cast = {key: out[key].astype(source.spec[key].dtype)}
            _compare(cast, _read(source, chosen, keys=(key,)), chosen, f"as {field.dtype}, the narrow dtype")


def _check_description(source: Source, chosen: Indices, expected: Mapping[str, Array]) -> None:
    for wrong in (2**40, -1):
        with contextlib.suppress(IndexError):
            source.locate([wrong])
            raise AssertionError(f"locate accepted sample {wrong}; it must raise IndexError")
    for layout, what in ((source.chunks, "chunks"), (source.layout(), "layout()")):
        total = sum(run.samples for run in layout.runs)
        assert total in (0, len(source)), f"{what}.runs hold {total} samples of {len(source)}"
        if layout.order is not None:
            whole = np.array_equal(np.sort(layout.order), np.arange(len(source)))
            assert whole, f"{what}.order is not a permutation"
    total = sum(part.samples for part in source.parts)
    assert total == len(source), f"parts hold {total} samples of {len(source)}"
    first = source.fingerprint()
    plain = all(isinstance(key, str) and isinstance(value, int | str) for key, value in first.items())
    assert plain, f"fingerprint() is not a dict of names to numbers and text: {first}"
    again = _copy(source).fingerprint()
    assert again == first, f"fingerprint() of a copy is another one: {again}, not {first}"
    places = source.places()
    assert len(places.which) == len(places.rows) == len(source), "places() does not have one place per sample"
    locations = source.locate(source.ids(chosen))
    good = len(locations) == len(chosen) and all(isinstance(each, Location) for each in locations)
    assert good, "locate did not return one Location per sample"
    for key, field in source.spec.items():
        if not field.shape:
            column = source.column(key)
            assert column.shape == (len(source),), f"column({key!r}) has shape {column.shape}"
            _compare({key: column[chosen].astype(field.dtype)}, {key: expected[key]}, chosen, "as a column")


def _check_random(source: Source, chosen: Indices) -> None:
    keys: Words = np.random.default_rng(0).integers(0, 2**64, len(chosen), np.uint64)
    first, second = source.spec.empty(len(chosen)), source.spec.empty(len(chosen))
    fill(source, chosen, first, keys)
    fill(source, chosen[::-1].copy(), second, keys[::-1].copy())
    again = {key: array[::-1] for key, array in second.items()}
    _compare(again, first, chosen, "at random with the same keys")


def _check_reading_ahead(source: Source, chosen: Indices, check: Callable[..., None]) -> None:
    release = source.reserve(2, source.memory().cacheable)
    try:
        source.fetch(chosen)
        source.decode(chosen, None)
        source.decode(chosen[:1], (0, 1))
        check("after reading ahead")
    finally:
        release()
        release()


def _check_in_thread(generator: np.random.Generator, count: int, check: Callable[..., None]) -> None:
    for _ in range(10):
        check(f"from {THREADS} threads", generator.integers(0, count, count))


def _read(source: Source, samples: Indices, *, poison: int = 0, keys: tuple[str, ...] = ()) -> dict[str, Array]:
    """Reads into arrays between margins, and checks that the margins stay as they are."""
    blocks, out = {}, {}
    for key in keys or source.spec:
        field = source.spec[key]
        shape = (len(samples), *field.stored_shape)
        block = np.full(2 * MARGIN + int(np.prod(shape)) * field.dtype.itemsize, poison, np.uint8)
        blocks[key], out[key] = block, block[MARGIN : len(block) - MARGIN].view(field.dtype).reshape(shape)
    _read_into(source, samples, out)
    for key, block in blocks.items():
        outside = np.concatenate([block[:MARGIN], block[len(block) - MARGIN :]])
        assert (outside == poison).all(), f"read_into wrote outside the array of {key!r}"
    return out


def _read_into(source: Source, samples: Indices, out: Mapping[str, Array]) -> None:
    """After an error, reads the samples one by one to name the first bad one."""
    try:
        fill(source, samples, out)
    except Exception:
        for place, sample in enumerate(samples.tolist()):
            alone = slice(place, place + 1)
            with _promise(f"read_into reads sample {sample}"):
                fill(source, samples[alone], {key: array[alone] for key, array in out.items()})
        with _promise(f"read_into reads {len(samples)} samples together, not only each alone"):
            raise


def _compare(found: Mapping[str, Array], expected: Mapping[str, Array], samples: Indices, how: str) -> None:
    for key, right in expected.items():
        # As bytes: NaN equals NaN, and 0.0 differs from -0.0.
        mine, theirs = (
            np.ascontiguousarray(each).view(np.uint8).reshape(len(samples), -1) for each in (found[key], right)
        )
        differ = (mine != theirs).any(axis=1)
        if differ.any():
            place = int(differ.argmax())
            what = f"{key!r} of sample {samples[place]} differs if read {how}: {found[key][place]!r} instead of "
            what += f"{right[place]!r}; read_into must fill all of each array with the same values every time"
            raise AssertionError(what)
