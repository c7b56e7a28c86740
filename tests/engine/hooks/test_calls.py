"""Host hooks get random numbers, and numbers of samples, that depend on nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sources.hooked_loaders import STEPS, WANTED, copied, drawing, hooked, read, source
from support.sources.hooks import LENGTH, Rows, aged, older

from lit_async_data import AsyncLoader, SubsetSource
from lit_async_data.engine.hooks.calls import BATCH_HOOK_KEYS, SAMPLE_HOOK_KEYS, KeyedGenerator
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


def test_numbers_go_by_seed_epoch_and_sample():
    """So they are the same for all batch sizes and ranks."""

    def rng_of(*words):
        return np.random.Generator(np.random.Philox(key=derived_key(*words)))

    def raw(sample, rng):
        return {"drawn": rng.integers(2**62)}

    def whole(batch, rng):
        return {**batch, "batch": rng.integers(2**62, size=len(batch["drawn"]))}

    options = {"batch_size": 4, "shuffle": True, "seed": 5, "return_indices": True}
    for rank in range(2):
        loader = AsyncLoader(source(), options, rank=rank, world_size=2, sample_transform=raw, batch_transform=whole)
        found = read(loader)
        for number, batch in enumerate(found):
            epoch, ids = number // (len(found) // 2), batch["index"].tolist()
            for value, each in zip(batch["drawn"].tolist(), ids, strict=True):
                assert value == rng_of(derived_key(5, epoch, SAMPLE_HOOK_KEYS), each).integers(2**62)
            assert batch["batch"][0] == rng_of(5, epoch, BATCH_HOOK_KEYS, ids[0]).integers(2**62)
        drawn = np.concatenate([batch["drawn"] for batch in found])
        assert len(np.unique(drawn)) == len(drawn)


def test_samples_of_a_subset_go_by_their_numbers_in_the_whole():
    whole = {int(i): int(d) for batch in WANTED[:STEPS] for i, d in zip(batch["index"], batch["drawn"], strict=True)}
    for batch in read(drawing(SubsetSource(source(), range(11, LENGTH))), epochs=1):
        assert [whole[i] for i in batch["index"].tolist()] == batch["drawn"].tolist()


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
    for name in ("sample", "batch"):
        with (
            hooked(**{name: lambda values: values | {"index": values["index"] + 1}}, return_indices=True) as loader,
            pytest.raises(
                TransformError, match=rf"^{name}_transform: returned another 'index' for .*under another key"
            ),
        ):
            next(loader)
    with pytest.raises(ConfigError, match=r"^return_indices: the source has a field 'index' of its own"):
        hooked(ArraySource({"index": np.arange(4)}), sample=lambda sample: {"y": 1}, return_indices=True)
    with hooked(sample=lambda sample: {"index": 1}) as loader:
        assert next(loader)["index"].tolist() == [1, 1, 1, 1]
