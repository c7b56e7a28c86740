"""A loader that reads around bad samples does so in the same way whatever reads them, on any number of ranks."""

import errno
import itertools
import json

import numpy as np
import pytest
from support.failures import raising
from support.plans import plan_of
from support.sources import reader_sources as acts

from lit_async_data import AsyncLoader, StorageLayout
from lit_async_data.engine.pipeline.sample_reader import AroundBadSamples, SampleReader, is_of_a_sample
from lit_async_data.errors import ChangedError, ConfigError, CorruptError, MissingError, SourceError, TransformError
from lit_async_data.order.chunk_order import ChunkRun

BAD = {3, 17, 18, 19, 40, 77, 99}
CHUNKS = StorageLayout((ChunkRun(100, 4),), compressed=True, reading="decoded")
SHARED = StorageLayout((ChunkRun(100, 4),), compressed=True, reading="python")


def loader_of(on_error, layout=None, *, ranks=(0, 1), bad=BAD, hooks=None, **options):
    options = {"batch_size": 6, "seed": 5, "max_bad": 1.0, "on_error": on_error, "return_indices": True, **options}
    options = {"shuffle": True, **options}
    return AsyncLoader(acts.Damaged(bad, layout), options, rank=ranks[0], world_size=ranks[1], **(hooks or {}))


def epochs(loader, count=2):
    with loader:
        return [[batch["index"].tolist() for batch in loader] for _ in range(count)]


def planned(epoch, shuffle, runs=(), rank=0, ranks=1):
    plan = plan_of(
        length=100, batch_size=6, shuffle=shuffle, seed=5, epoch=epoch, rank=rank, world_size=ranks, runs=runs
    )
    return [plan.batch(step).tolist() for step in range(len(plan))]


READERS = [
    pytest.param({"workers": 0}, {}, id="caller"),
    pytest.param({"workers": 2}, {}, id="threads"),
    pytest.param({"workers": 1, "worker_kind": "process"}, {}, id="process", marks=pytest.mark.processes),
    pytest.param({"workers": 3, "worker_kind": "process"}, {}, id="shares", marks=pytest.mark.processes),
    pytest.param(
        {"workers": 2, "worker_kind": "process"},
        {"batch_transform": acts.counted},
        id="shares and a batch_transform",
        marks=pytest.mark.processes,
    ),
]


# Processes leave samples out in the stored order, and have others stand in in that of chunks.
MET = [
    pytest.param(on_error, shuffle, *reader.values, id=f"{on_error}-{shuffle}-{reader.id}", marks=reader.marks)
    for on_error in ("skip", "substitute")
    for shuffle in ("none", "global", "chunk")
    for reader in READERS
    if not reader.marks or (on_error, shuffle) in {("skip", "none"), ("substitute", "chunk")}
]


@pytest.mark.parametrize(("on_error", "shuffle", "options", "hooks"), MET)
def test_all_readers_read_around_the_same_samples(on_error, shuffle, options, hooks):
    layout = SHARED if options.get("workers", 0) > 1 and "worker_kind" in options else CHUNKS
    found = epochs(loader_of(on_error, layout, shuffle=shuffle, hooks=hooks, **options))
    for epoch, batches in enumerate(found):
        plan = planned(epoch if shuffle != "none" else 0, shuffle, CHUNKS.runs)
        assert len(batches) == len(plan)
        for batch, samples in zip(batches, plan, strict=True):
            good = [sample for sample in samples if sample not in BAD]
            if on_error == "skip":
                assert batch == good
            else:
                kept = [one for one, sample in zip(batch, samples, strict=True) if sample not in BAD]
                assert kept == good
                assert not BAD & set(batch)
    assert found == epochs(loader_of(on_error, CHUNKS, shuffle=shuffle, workers=0))


@pytest.mark.parametrize("shuffle", ["none", "global", "chunk"])
def test_a_substitute_is_of_the_same_group_and_the_same_on_other_ranks(shuffle):
    def of(ranks):
        options = {"shuffle": shuffle, "shuffle_chunks": 5, "batch_size": 12 // ranks}
        return [epochs(loader_of("substitute", CHUNKS, ranks=(rank, ranks), **options), 1)[0] for rank in range(ranks)]

    def dealt(per_rank):
        steps = itertools.zip_longest(*per_rank)
        return [list(itertools.chain(*itertools.zip_longest(*step))) for step in steps]

    (alone,), three = of(1), dealt(of(3))
    assert [sample for batch in three for sample in batch if sample is not None] == list(itertools.chain(*alone))
    if shuffle == "chunk":
        plan = plan_of(length=100, batch_size=12, shuffle="chunk", seed=5, epoch=0, runs=CHUNKS.runs, shuffle_chunks=5)
        places = {sample: place for place, sample in enumerate(plan.deck.samples(np.arange(100)).tolist())}
        for place, sample in enumerate(itertools.chain(*alone)):
            assert places[sample] // 20 == place // 20


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_group_that_is_all_bad_has_a_substitute_of_another(on_error):
    options = {"shuffle": "chunk", "shuffle_chunks": 1, "batch_size": 4, "workers": 1}
    (found,) = epochs(loader_of(on_error, CHUNKS, bad=range(8, 12), **options), 1)
    assert sorted(map(len, found)) == [4 if on_error == "substitute" else 1, *[4] * 24]
    assert not set(itertools.chain(*found)) & set(range(8, 12))


@pytest.mark.parametrize("shuffle", ["none", "global"])
def test_a_resume_goes_on_with_the_same_substitutes_and_reads_no_bad_sample_again(shuffle):
    whole = epochs(loader_of("substitute", shuffle=shuffle))[1]
    with loader_of("substitute", shuffle=shuffle) as loader:
        loader.set_epoch(1)
        first = [next(loader)["index"].tolist() for _ in range(9)]
        state = json.loads(json.dumps(loader.state_dict()))
    assert set(state["bad_samples"]) == BAD & set(itertools.chain(*planned(1, shuffle)[:9]))
    with loader_of("substitute", shuffle=shuffle) as loader:
        loader.load_state_dict(state)
        assert first + [batch["index"].tolist() for batch in loader] == whole
        assert loader._wiring.quarantine.known >= set(state["bad_samples"])


@pytest.mark.parametrize("hook", ["sample_transform", "batch_transform"])
def test_hooks_are_tried_with_samples_that_are_not_bad(hook):
    with loader_of("skip", shuffle="none", bad={0, *range(2, 20, 2)}, hooks={hook: lambda given: given}) as loader:
        assert next(loader)["index"].tolist() == [1, 3, 5]
    loader = loader_of("skip", bad=range(100), hooks={hook: lambda given: given})
    with loader, pytest.raises(CorruptError, match="sample 0 is damaged"):
        next(loader)


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_longer_sample_stands_in_for_a_bucket_that_is_all_bad(on_error):
    lengths = {"batch_by": np.where(np.arange(100) < 9, 0, 5), "buckets": [1, 5]}
    (found,) = epochs(loader_of(on_error, bad=range(9), shuffle="global", **lengths), 1)
    assert sorted(map(len, found)) == [1, 1, 1, *[6] * 15]
    assert {*itertools.chain(*found)} == {*range(9, 100)}


def test_a_pass_that_ends_or_is_given_up_has_a_line(caplog):
    with loader_of("skip", shuffle="none") as loader:
        list(loader)
        assert "epoch 0 of Damaged was read around 7 bad" in caplog.messages[-1]
        loader.next()
    loader.close()
    assert sum("was read around 1 bad" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("path", ["a folder", "/dev/full"])  # no end of the latter can be read
def test_a_list_that_cannot_be_written_stops_nothing(path, tmp_path, caplog):
    (tmp_path / "a folder").mkdir()
    found = epochs(loader_of("skip", shuffle="none", quarantine=tmp_path / path), 1)[0]
    assert sum(map(len, found)) == 100 - len(BAD)
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1
    assert "lists them" not in caplog.text


def test_more_bad_samples_than_allowed_end_the_run_at_their_batch():
    with loader_of("skip", shuffle="none", max_bad=4) as loader:
        assert len(list(itertools.islice(loader, sorted(BAD)[4] // 6))) == 6
        with pytest.raises(SourceError, match=r"max_bad: .* are allowed"):
            next(loader)


@pytest.mark.parametrize(("options", "hooks"), READERS)
def test_a_transform_that_fails_on_a_sample_makes_it_bad_in_that_epoch_only(options, hooks):
    def fails(sample, rng):
        if sample["y"] == 33 and rng.random() < 0.5:
            raise ValueError("33 is too much")
        return sample

    layout = SHARED if "worker_kind" in options else None
    with loader_of(
        "skip", layout, shuffle="none", bad=(), hooks={"sample_transform": fails, **hooks}, **options
    ) as loader:
        found = [[(batch["index"].tolist(), batch["y"].tolist()) for batch in loader] for _ in range(8)]
        assert all(index == values for epoch in found for index, values in epoch)
        assert {100 - sum(len(values) for _, values in epoch) for epoch in found} == {0, 1}
        assert not loader._wiring.quarantine.known


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize(
    "options",
    [reader.values[0] for reader in READERS[:2]] + [pytest.param(READERS[2].values[0], marks=pytest.mark.processes)],
)
def test_a_damaged_part_of_a_sample_costs_it_the_epochs_that_draw_the_part(on_error, options):
    def loader():
        wanted = {"batch_size": 6, "seed": 5, "max_bad": 1.0, "on_error": on_error, "return_indices": True, **options}
        return AsyncLoader(acts.DamagedParts((), StorageLayout(reading="python", random=True)), wanted)

    with loader() as whole:
        found = [[batch["index"].tolist() for batch in whole] for _ in range(12)]
        assert not whole._wiring.quarantine.known
        state = whole.state_dict()
    own = [{sample for batch in epoch for sample in batch} for epoch in found]
    assert all(60 < len(each) < 95 for each in own)
    assert len(set.union(*own[-4:])) > 97
    with loader() as resumed:  # without the memory of a run
        resumed.load_state_dict(state | {"epoch": 11, "position": 0})
        assert [batch["index"].tolist() for batch in resumed] == found[11]


def test_a_substitute_draws_other_random_numbers_than_in_its_own_place():
    around = AroundBadSamples(SampleReader(acts.Damaged({3}), return_indices=False, seed=0), "substitute")
    plan = plan_of(length=100, batch_size=6, shuffle="none", epoch=0)
    keyed, bad = around.choice(plan, 0)
    assert keyed.samples.tolist() == [0, 1, 2, plan.deck.substitute(3, 0), 4, 5]
    assert keyed.numbers.tolist() == [0, 1, 2, -4, 4, 5]
    assert [(each.position, each.sample) for each in bad] == [(3, 3)]


def test_what_is_no_fault_of_a_sample_is_raised():
    sector, stale = OSError(errno.EIO, "one sector"), OSError(errno.ESTALE, "stale")
    faults = [CorruptError("bad"), MissingError("gone"), TransformError("fails"), ValueError("of a dataset"), sector]
    assert [error for error in faults if not is_of_a_sample(error)] == []
    caused = CorruptError("no file")
    caused.__cause__ = stale
    others = [ChangedError("replaced"), ConfigError("wrong"), OSError(errno.EMFILE, "too many"), caused]
    assert [error for error in (*others, MemoryError(), KeyboardInterrupt()) if is_of_a_sample(error)] == []


def test_a_transform_that_needs_the_whole_batch_and_fails_is_an_error():
    hooks = {"batch_transform": raising(ValueError("no batch"))}
    with loader_of("skip", bad=(), workers=1, hooks=hooks) as loader, pytest.raises(TransformError, match="no batch"):
        next(loader)


@pytest.mark.parametrize(("options", "hooks"), [READERS[0], READERS[2]])
def test_a_source_of_which_nothing_can_be_read_is_an_error_that_lists_what_was_tried(options, hooks):
    loader = loader_of("substitute", bad=range(100), hooks=hooks, **options)
    with loader, pytest.raises(SourceError, match=r"none of 64 samples .* bad are 64, 94, 10, .* in all") as caught:
        next(loader)
    assert len({error.sample_id for error in caught.value.errors}) == len(caught.value.errors) == 52


def test_in_evaluation_nothing_stands_in_for_a_bad_sample():
    with loader_of("substitute", shuffle=False) as loader:
        loader.evaluation = True
        assert loader.options.on_error == "skip"
        assert [sample for batch in loader for sample in batch["index"].tolist()] == [
            sample for sample in range(100) if sample not in BAD
        ]
