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
from lit_async_data.engine.pipeline.sample_reader import is_of_a_sample
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


def planned(epoch, shuffle):
    epoch = epoch if shuffle != "none" else 0
    plan = plan_of(length=100, batch_size=6, shuffle=shuffle, seed=5, epoch=epoch, runs=CHUNKS.runs)
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
        for batch, samples in zip(batches, planned(epoch, shuffle), strict=True):
            good = [sample for sample in samples if sample not in BAD]
            if on_error == "skip":
                assert batch == good
            else:
                assert [one for one, sample in zip(batch, samples, strict=True) if sample not in BAD] == good
                assert not BAD & set(batch)
    assert found == epochs(loader_of(on_error, CHUNKS, shuffle=shuffle, workers=0))


@pytest.mark.parametrize("shuffle", ["none", "global", "chunk"])
def test_a_substitute_is_of_the_same_group_and_the_same_on_other_ranks(shuffle):
    options = {"shuffle": shuffle, "shuffle_chunks": 5}

    def of(ranks):
        loaders = [
            loader_of("substitute", CHUNKS, ranks=(rank, ranks), batch_size=12 // ranks, **options)
            for rank in range(ranks)
        ]
        steps = itertools.zip_longest(*(epochs(loader, 1)[0] for loader in loaders))
        turns = itertools.chain(*(itertools.zip_longest(*step) for step in steps))
        return [sample for sample in itertools.chain(*turns) if sample is not None]

    alone = of(1)
    assert of(3) == alone
    if shuffle == "chunk":
        plan = plan_of(length=100, batch_size=12, seed=5, epoch=0, runs=CHUNKS.runs, **options)
        places = {sample: place for place, sample in enumerate(plan.deck.samples(np.arange(100)).tolist())}
        assert all(places[sample] // 20 == place // 20 for place, sample in enumerate(alone))


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


@pytest.mark.parametrize("path", ["a folder", "/dev/full"])  # no end of the latter can be read
def test_a_list_that_cannot_be_written_stops_nothing(path, tmp_path, caplog):
    (tmp_path / "a folder").mkdir()
    found = epochs(loader_of("skip", shuffle="none", quarantine=tmp_path / path), 1)[0]
    assert sum(map(len, found)) == 100 - len(BAD)
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1
    assert "lists them" not in caplog.text


def test_more_bad_samples_than_allowed_end_the_run_at_their_batch(caplog):
    with loader_of("skip", shuffle="none", max_bad=4) as loader:
        assert len(list(itertools.islice(loader, sorted(BAD)[4] // 6))) == 6
        with pytest.raises(SourceError, match=r"max_bad: .* are allowed"):
            next(loader)
    assert sum("epoch 0 of Damaged was read around 5 bad" in line for line in caplog.messages) == 1


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
@pytest.mark.parametrize(("options", "hooks"), READERS[:3])
def test_a_damaged_part_of_a_sample_costs_it_the_epochs_that_draw_the_part(on_error, options, hooks):
    source = acts.DamagedParts((), StorageLayout(reading="python", random=True))
    options = {"batch_size": 6, "seed": 5, "max_bad": 1.0, "on_error": on_error, "return_indices": True, **options}
    with AsyncLoader(source, options) as whole:
        found = [[batch["index"].tolist() for batch in whole] for _ in range(12)]
        assert not whole._wiring.quarantine.known
        state = whole.state_dict()
    own = [{*itertools.chain(*epoch)} for epoch in found]
    assert all(60 < len(each) < 95 for each in own)
    assert len(set.union(*own[-4:])) > 97
    with AsyncLoader(source, options) as resumed:  # without the memory of a run
        resumed.load_state_dict(state | {"epoch": 11, "position": 0})
        assert [batch["index"].tolist() for batch in resumed] == found[11]


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
    loader = loader_of("substitute", shuffle=False)
    loader.evaluation = True
    assert sorted(itertools.chain(*epochs(loader, 1)[0])) == sorted({*range(100)} - BAD)
