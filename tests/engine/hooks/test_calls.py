"""Host hooks get random numbers, and numbers of samples, that depend on nothing else."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sources.hooked_loaders import copied, drawing, hooked, read, source
from support.sources.hooks import LENGTH, Rows, aged, explode, older

from lit_async_data import AsyncLoader, SubsetSource
from lit_async_data.engine.hooks import BATCH_HOOK_KEYS, SAMPLE_HOOK_KEYS, KeyedGenerator
from lit_async_data.errors import ConfigError, TransformError
from lit_async_data.order.permutation import derived_key
from lit_async_data.testing import ArraySource


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 3)), min_size=1, max_size=5))
def test_a_key_gives_the_numbers_of_a_new_generator_whatever_was_drawn_before(calls):
    generator = KeyedGenerator()
    for key, draws in calls:
        ours, new = generator.at(key), np.random.Generator(np.random.Philox(key=key))
        for rng in (ours, new):
            rng.integers(0, 9, draws, dtype=np.int8)  # leaves half a word behind
        assert ours.random(5).tolist() == new.random(5).tolist()
        assert ours.standard_normal() == new.standard_normal()
        assert ours.binomial(10, 0.3) == new.binomial(10, 0.3)


def test_a_generator_has_no_children_whose_numbers_would_depend_on_earlier_calls():
    with pytest.raises(TypeError):
        KeyedGenerator().at(3).spawn(1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("of", [source(), SubsetSource(source(), range(11, LENGTH))], ids=len)
def test_numbers_go_by_seed_epoch_and_sample(of, rank):
    """So they are the same for all batch sizes and ranks, and for parts of a source."""

    def rng_of(*words):
        return np.random.Generator(np.random.Philox(key=derived_key(*words)))

    def raw(sample, rng):
        return {"drawn": rng.integers(2**62)}

    def whole(batch, rng):
        return {**batch, "batch": rng.integers(2**62, size=len(batch["drawn"]))}

    options = {"batch_size": 4, "shuffle": True, "seed": 5, "return_indices": True}
    found = read(AsyncLoader(of, options, rank=rank, world_size=2, sample_transform=raw, batch_transform=whole))
    for number, batch in enumerate(found):
        epoch, ids = number // (len(found) // 2), batch["index"].tolist()
        for value, each in zip(batch["drawn"].tolist(), ids, strict=True):
            assert value == rng_of(derived_key(5, epoch, SAMPLE_HOOK_KEYS), each).integers(2**62)
        assert batch["batch"][0] == rng_of(5, epoch, BATCH_HOOK_KEYS, ids[0]).integers(2**62)
    drawn = np.concatenate([batch["drawn"] for batch in found])
    assert len(np.unique(drawn)) == len(drawn)


def test_there_are_no_random_numbers_where_the_options_say_so():
    for batch in read(drawing(augment=False)):
        assert set(batch["drawn"].tolist() + batch["batch"].tolist()) == {-1}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "workers", "as_tuple"),
    [("thread", 1, False), ("thread", 1, True), ("process", 1, True), ("process", 2, False)],
)
def test_hooks_get_the_numbers_of_samples_in_the_whole_source(kind, workers, as_tuple):
    taken = np.arange(LENGTH - 1, 4, -2)
    of = SubsetSource(Rows({"y": np.arange(LENGTH)}, as_tuple=as_tuple), taken)
    with drawing(of, sample=aged, batch=older, worker_kind=kind, workers=workers) as loader:
        keys = [*loader.spec]
        assert keys == ["y", "age", "older", "index"]
        batches = [dict(zip(keys, batch, strict=True)) if as_tuple else copied(batch) for batch in loader]
    index = torch.cat([batch["index"] for batch in batches])
    assert sorted(index.tolist()) == sorted(taken.tolist())
    for key, wanted in {"y": index, "age": 10 * index, "older": 10 * index + 1}.items():
        assert torch.equal(torch.cat([batch[key] for batch in batches]), wanted)


def test_without_return_indices_hooks_get_no_numbers():
    seen = []
    with drawing(sample=lambda sample: seen.append("index" in sample), batch=None, return_indices=False) as loader:
        next(loader)
    assert set(seen) == {False}


def test_the_key_of_indices_is_reserved():
    returned, in_place = (lambda values: values | {"index": 7}), (lambda values: values.update(index=7))
    for name, hook in itertools.product(("sample", "batch"), (returned, in_place)):
        said = rf"^{name}_transform: returned another 'index' for .*under another key"
        with hooked(**{name: hook}, return_indices=True) as loader, pytest.raises(TransformError, match=said):
            next(loader)
    with pytest.raises(ConfigError, match=r"^return_indices: the source has a field 'index' of its own"):
        hooked(ArraySource({"index": np.arange(4)}), sample=lambda sample: {"y": 1}, return_indices=True)
    with hooked(sample=lambda sample: {"index": 1}) as loader:
        assert next(loader)["index"].tolist() == [1, 1, 1, 1]


BFLOAT, META = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, device="meta")


@pytest.mark.parametrize(
    ("kind", "result", "message"),
    [
        ("sample", explode, r"failed on sample 9 \(row 9 of ArraySource\): ZeroDivisionError: no light"),
        ("sample", lambda s: {**s, "x": s["x"][:, 1:]}, r"'x' of .* \(3, 9, 8\), but \(3, 10, 8\) .* crop or"),
        ("sample", lambda s: {**s, "x": s["x"] / 2}, r"'x' of sample 9 .* float64, but uint8 .* .astype\('uint8'\)"),
        ("sample", lambda s: {"x": s["x"]}, r"returned the keys x for sample 9 \(.*\), but x, y for .* same keys"),
        ("sample", list, r"returned a list for sample 9 \(row 9 of ArraySource\); return a dict"),
        ("batch", explode, r"failed on the batch of samples 8, 9, 10, … \(4 in all\) \(the first is row 8 .*: Zero"),
        ("batch", lambda b: {**b, "x": b["x"][:, :1]}, r"'x' of .* has shape \(1, 10, 8\), but \(3, 10, 8\) for"),
        ("batch", lambda b: {**b, "x": b["x"][:3]}, r"'x' .* has shape \(3, 3, 10, 8\), but .* each of the 4"),
        ("batch", lambda b: {**b, "y": b["y"] * 0.5}, r"'y' .* has dtype float64, but int64 for the first"),
        ("batch", lambda b: {"y": b["y"]}, r"returned the keys y for the batch .*, but x, y for the first sample"),
    ],
)
def test_a_wrong_result_is_the_error_of_its_batch_alone(kind, result, message):
    def hook(values):
        return result(values) if 9 in np.atleast_1d(values["y"]) else values

    with hooked(**{kind: hook}, workers=2) as loader:
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(TransformError, match=f"^{kind}_transform: .*{message}") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [12, 13, 14, 15]
    error, first = caught.value, 9 if kind == "sample" else 8
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", first, first, "ArraySource")
    assert error.__notes__ == ["in batch 2 of epoch 0, samples 8, 9, 10, … (4 in all)"]
    assert isinstance(error.__cause__, ZeroDivisionError) is (result is explode)


@pytest.mark.parametrize(
    ("kind", "hook", "message"),
    [
        ("sample", lambda s: [s], r"returned a list for sample 0 \(row 0 of ArraySource\); return a dict with an"),
        ("sample", lambda s: {}, r"returned no field for sample 0 \(row 0 of ArraySource\); return at least one"),
        ("sample", lambda s: {"x": "text"}, r"'x' of sample 0 \(.*\) is a str, .*; return an array or a number"),
        ("sample", lambda s: {"x": None}, r"'x' of sample 0 \(.*\) is a NoneType, .*; return"),
        ("sample", lambda s: {"x": np.array(["a"])}, "'x' of .* is an array of <U1, which no tensor can hold; ret"),
        ("sample", lambda s: {"x": np.ma.array([1])}, r"'x' .* a MaskedArray, .*; return numpy.asarray\(…\) of it"),
        ("sample", lambda s: {"x": 2**70}, "'x' of .* which does not fit into int64; return it as a float"),
        ("sample", lambda s: {"x": BFLOAT}, "'x' of .* is a tensor of torch.bfloat16, .* return a dense tensor"),
        ("sample", lambda s: {"x": META}, "'x' of .* is a tensor on meta; return it on the CPU"),
        ("sample", lambda s: {3: 1}, r"the key 3 in the result for sample 0 \(.*\) is not text; name each field by"),
        ("sample", explode, r"failed on sample 0 \(row 0 of ArraySource\): ZeroDivisionError: no light"),
        ("batch", lambda b: b["y"], r"returned a ndarray for the batch of samples 0, 1 \(the first is row 0 .*\); ret"),
        ("batch", lambda b: {"x": b["x"].mean()}, r"'x' of the batch .* has shape \(\), but the first axis must"),
        ("batch", lambda b: {"x": b["x"][:1]}, r"'x' .* \(1, 3, 10, 8\), but .* one row for each of the 2 samples"),
        ("batch", explode, r"failed on the batch of samples 0, 1 \(the first is row 0 .*\): ZeroDivisionError"),
    ],
)
def test_a_result_that_fits_no_batch_is_an_error_that_says_what_to_return(kind, hook, message):
    failed = pytest.raises(TransformError, match=f"^{kind}_transform: .*{message}")
    with hooked(**{kind: hook}) as loader, failed as caught:
        next(loader)
    error = caught.value
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", 0, 0, "ArraySource")
    assert "to learn the fields of a batch" in error.__notes__[0]
