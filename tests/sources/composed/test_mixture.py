"""`MixtureSource` in a loader: values, shares, resume, bad samples and bad input."""

import contextlib
import itertools
import pickle

import h5py
import numpy as np
import pytest

import lit_async_data as lad
from lit_async_data.errors import CorruptError
from lit_async_data.lightning.display import summary_lines
from lit_async_data.testing import ArraySource, check_contract

SHARES = {"sim": 0.6, "real": 0.15, "third": 0.25}


def arrays(length, first=0):
    return ArraySource({"x": np.arange(length * 3.0).reshape(length, 3), "y": first + np.arange(length)})


def mixed(**options):
    return lad.MixtureSource({"sim": (arrays(300), 7), "real": (arrays(20, 1000), 3)}, **options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder, rng, images = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0), {}
    for name, rows, how in (("sim", 700, "gzip"), ("real", 90, None), ("third", 333, "gzip")):
        images[name] = rng.integers(0, 255, (rows, 6, 5), np.uint8)
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=images[name], chunks=(16, 6, 5), compression=how)
            file["y"] = np.arange(rows)
    return folder, images


@pytest.fixture
def files(stored):
    folder, _ = stored
    sources = {name: lad.HDF5Source(folder / f"{name}.h5", {"x": "x", "y": "y"}) for name in SHARES}
    shared = {name: (source, SHARES[name]) for name, source in sources.items()}
    with contextlib.closing(lad.MixtureSource(shared, epoch=2000)) as mixture:
        yield mixture


@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
@pytest.mark.parametrize(
    "workers", [0, 2, pytest.param(("process", 2), marks=pytest.mark.processes)], ids=["caller", "threads", "processes"]
)
def test_2000_samples_are_those_of_the_files_in_their_shares(files, stored, shuffle, workers):
    kind, workers = workers if isinstance(workers, tuple) else ("thread", workers)
    options = {"batch_size": 32, "shuffle": shuffle, "shuffle_chunks": 4, "workers": workers, "worker_kind": kind}
    wrong, taken = 0, 0
    with lad.AsyncLoader(files, options if workers else options | {"worker_kind": "auto"}) as loader:
        for batch in loader:
            x, y, names = batch["x"].numpy(), batch["y"].tolist(), files.spec.names("source", batch["source"]).tolist()
            wrong += sum((x[n] != stored[1][names[n]][y[n]]).any() for n in range(len(y)))
            taken += len(y)
            assert all(abs(names.count(name) - share * len(y)) < 1 for name, share in SHARES.items())
    assert (wrong, taken) == (0, 2016)  # 63 batches


def test_the_contract_of_a_source_holds(files):
    for source in (files, mixed(), mixed(source_key=None), pickle.loads(pickle.dumps(mixed()))):
        check_contract(source)


def test_a_chunk_of_each_source_is_decoded_once_per_pass(files, stored):
    options = {"batch_size": 32, "shuffle": "chunk", "shuffle_chunks": 4, "workers": 0}
    with lad.AsyncLoader(files, options) as loader:
        assert sum(len(batch["y"]) for batch in loader) == 2016
        decoded = loader.stats().read.decoded / files.spec["x"].nbytes
        passes = {name: loader.order.decks.counts[n] for n, name in enumerate(files.names)}
    rounds = sum(-(-passes[name] // len(stored[1][name])) * (len(stored[1][name]) + 16) for name in ("sim", "third"))
    assert passes["sim"] + passes["third"] - 100 < decoded <= rounds


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"on_error": "substitute"}])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2)])
def test_a_resume_on_other_ranks_goes_on_around_the_same_bad_samples(options, before, after):
    class Bad(ArraySource):
        def read_into(self, samples, out):
            if options and (samples % 7 == 3).any():
                raise CorruptError("a hole", row=3)
            super().read_into(samples, out)

    sources = [Bad({"y": first + np.arange(size)}) for first, size in ((0, 200), (1000, 30))]
    mixture = lad.MixtureSource({"sim": (sources[0], 2), "real": (sources[1], 1)}, epoch=288)

    def loaders(ranks, state=None):
        for rank in range(ranks):
            given = {"batch_size": 6, "shuffle": True, "workers": 0, "max_bad": 1.0, **options}
            loader = lad.AsyncLoader(mixture, given, rank=rank, world_size=ranks)
            if state is not None:
                loader.load_state_dict(state)
            yield loader

    whole = sorted(itertools.chain.from_iterable(batch["y"].tolist() for batch in next(loaders(1))))
    seen = []
    for loader in loaders(before):
        for batch in itertools.islice(loader, 3):
            seen += batch["y"].tolist()
        state = loader.state_dict()
    for loader in loaders(after, state):
        for batch in loader:
            if len(batch["y"]) == 6:
                assert np.bincount(batch["source"], minlength=2).tolist() == [4, 2]
            seen += batch["y"].tolist()
    assert sorted(seen) == whole


@pytest.mark.parametrize(
    ("share", "batch_size", "said"),
    [
        (0.7, 16, "batch_size, of a mixture: 8 in the checkpoint, 16 now"),
        (0.70000004, 8, r"shares: a 0\.7, b 0\.3.* in the checkpoint, a 0\.70000001"),
        (0.5, 8, r"samples of an epoch: .*\(force_resume=True\)$"),  # not a word of exclude
    ],
)
def test_another_batch_size_or_share_in_the_middle_of_an_epoch_is_refused(share, batch_size, said):
    def loader(share, batch_size):
        mixture = lad.MixtureSource({"a": (SIM, share), "b": (REAL, 0.3)})
        return lad.AsyncLoader(mixture, {"batch_size": batch_size, "shuffle": True})

    with loader(0.7, 8) as first:
        next(first)
        state = first.state_dict()
    with pytest.raises(lad.ResumeError, match=said):
        loader(share, batch_size).load_state_dict(state)


def test_a_resume_does_not_mind_the_order_of_keys():
    columns = {"y": np.arange(60), "x": np.arange(60.0)}
    mixtures = [
        lad.MixtureSource({"a": (ArraySource({key: columns[key] for key in keys}), 1), "b": (ArraySource(columns), 2)})
        for keys in ("yx", "xy")
    ]
    with lad.AsyncLoader(mixtures[0], {"batch_size": 6, "shuffle": True}) as loader:
        next(loader)
        state, wanted = loader.state_dict(), next(loader)
    with lad.AsyncLoader(mixtures[1], {"batch_size": 6, "shuffle": True}) as loader:
        loader.load_state_dict(state)
        batch = next(loader)
    assert {key: values.tolist() for key, values in batch.items()} == {key: wanted[key].tolist() for key in batch}


def test_fewer_samples_than_ranks_can_remain_since_the_last_step_is_completed():
    with lad.AsyncLoader(mixed(epoch=33), {"batch_size": 16, "shuffle": True}) as loader:
        batches = [next(loader)["y"].tolist() for _ in range(2)]
        state = loader.state_dict()
        rest = next(loader)["y"].tolist()
    for rank in range(3):
        with lad.AsyncLoader(mixed(epoch=33), {"batch_size": 16, "shuffle": True}, rank=rank, world_size=3) as loader:
            loader.load_state_dict(state)
            (last,) = [batch["y"].tolist() for batch in loader]
        assert len(last) == 16
        assert (last == rest) == (rank == 0)
    assert all(len(batch) == 16 for batch in batches)


def test_an_epoch_ends_with_a_source_with_all_or_after_a_number_of_samples():
    for epoch, samples in (("sim", (300, 0)), ("real", (0, 20)), (None, (300, 20)), (100, (70, 30))):
        with lad.AsyncLoader(mixed(epoch=epoch), {"batch_size": 16}) as loader:
            batches = [np.bincount(batch["source"], minlength=2) for batch in loader]
            line = summary_lines(loader)[1]
        assert (sum(batches) >= samples).all()
        assert (sum(batches[:-1]) < samples).any()
        assert f"{sum(batches)[1]} of real ({sum(batches)[1] / 20:.3g} × its 20)" in line


def test_repeated_samples_draw_new_random_numbers():
    mixture = lad.MixtureSource({"a": (arrays(50), 1), "b": (arrays(4, 1000), 1)})

    def noisy(sample, rng):
        return {**sample, "drawn": rng.integers(2**31)}

    with lad.AsyncLoader(mixture, {"batch_size": 10, "shuffle": True}, sample_transform=noisy) as loader:
        drawn = np.concatenate([batch["drawn"] for batch in loader])
    assert len({*drawn.tolist()}) == len(drawn) > 90


def test_a_mixture_of_mixtures_divides_its_share():
    inner = lad.MixtureSource({"p": (arrays(10), 1), "q": (arrays(30, 100), 3)})
    outer = lad.MixtureSource({"syn": (inner, 0.5), "real": (arrays(20, 1000), 0.5)}, epoch="syn")
    assert (outer.names, outer.shares) == (("syn/p", "syn/q", "real"), (0.125, 0.375, 0.5))
    check_contract(outer)
    with lad.AsyncLoader(outer, {"batch_size": 12, "shuffle": True}) as loader:
        batches = [np.bincount(batch["source"], minlength=3) for batch in loader]
    assert (sum(batches)[:2] >= [10, 30]).all()
    assert (sum(batches[:-1])[:2] < [10, 30]).any()
    for counts in batches:
        assert counts[2] == counts[:2].sum() == 6  # within one of the outer shares, too


def test_fields_of_a_source_get_the_keys_of_the_batch():
    other = ArraySource({"image": np.full((6, 3), 9.0), "label": np.arange(6) + 50, "rest": np.zeros(6)})
    sources = {"sim": (arrays(30), 1), "real": {"source": other, "share": 1}}
    mixture = lad.MixtureSource(sources, fields={"real": {"x": "image", "y": "label"}})
    check_contract(mixture)
    assert mixture.column("y").tolist() == [*range(30), *range(50, 56)]
    assert mixture.column("source").tolist() == [0] * 30 + [1] * 6
    with lad.AsyncLoader(mixture, {"batch_size": 4}) as loader:
        batch = next(loader)
    assert (batch["y"].tolist(), batch["x"][2:].unique().tolist()) == ([0, 1, 50, 51], [9.0])


def test_classes_are_numbered_alike_in_all_sources():
    class Texts(ArraySource):
        asked = None

        def with_classes(self, classes):
            made = type(self)(self._arrays)
            made.asked = dict(classes)
            return made

    pairs = {"a": (Texts({"y": np.arange(3)}), 1), "b": (Texts({"z": np.arange(3)}), 2)}
    mixture = lad.MixtureSource(pairs, fields={"b": {"y": "z"}})
    changed = mixture.with_classes({"y": ("auk", "owl")})
    assert (changed.shares, changed.names) == (mixture.shares, mixture.names)
    assert changed.sources[0].asked == {"y": ("auk", "owl")}
    assert changed.sources[1].sources[0].asked == {"z": ("auk", "owl")}


def test_statistics_take_the_samples_of_all_sources():
    values = np.concatenate([np.arange(900.0), np.arange(60.0)])
    assert lad.statistics(mixed())["x"].mean == pytest.approx(values.mean())


SIM, REAL = arrays(300), arrays(20)


def inside(**options):
    return {"in": (lad.MixtureSource({"b": (SIM, 1)}, **options), 1)}


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({"sim": (SIM, 0), "real": (REAL, 0.3)}, {}, "sources: sim has share 0; give a number above 0"),
        ({"sim": (SIM, -0.5)}, {}, "sim has share -0.5"),
        ({"sim": (SIM, float("nan"))}, {}, "sim has share nan"),
        ({"sim": (SIM, True)}, {}, "sim has share True"),
        ({"sim": SIM}, {}, "give a source and its share: 'sim'"),
        ({"sim": {"source": SIM}}, {}, "give a source and its share: 'sim'"),
        ({"sim": (3, 0.5)}, {}, "sources.sim: 3 is not a source"),
        ({}, {}, "names no sources"),
        ([SIM, REAL], {}, "names no sources"),
        ({0: (SIM, 1)}, {}, "give a source and its share: '0'"),
        ({"a": inside()["in"], "a/b": (REAL, 1)}, {}, "'a/b' seems to be a source of 'a'; rename"),
        ({"a/b": (SIM, 1), "a": (REAL, 1)}, {"epoch": "a"}, "'a/b' seems to be a source of 'a'; rename"),
        ({"sim": (SIM, 10**400)}, {}, "sim has share 1000"),
        (inside(epoch="b"), {}, "sources: in is a mixture with epoch='b', source_key='source'; only the outermost"),
        (inside(source_key="robot"), {}, "in is a mixture with epoch=None, source_key='robot'; only the outermost"),
        ({"sim": (arrays(0), 1)}, {}, r"sim has no samples \(ArraySource\)"),
        ({"sim": (SIM, 1)}, {"epoch": "rael"}, "epoch: 'rael' is not a whole number from 1 on or one of the sources"),
        ({"sim": (SIM, 1)}, {"epoch": 0}, "epoch: 0 is not a whole"),
        ({"sim": (SIM, 1)}, {"epoch": True}, "epoch: True is not a whole"),
        ({"sim": (SIM, 1)}, {"source_key": "y"}, "source_key: the sources have a field 'y' of their own"),
        ({"sim": (SIM, 1)}, {"fields": {"real": {}}}, "fields: 'real' is not one of the sources sim"),
        ({"sim": (SIM, 1)}, {"fields": {"sim": {"x": "z"}}}, "fields: sim has no field 'z'; it has x, y"),
        ({"sim": (SIM, 1)}, {"fields": {"sim": {"x": "x", "y": "x"}}}, "fields: sim has a field twice"),
    ],
)
def test_bad_input_is_named(sources, options, message):
    with pytest.raises(lad.ConfigError, match=message):
        lad.MixtureSource(sources, **options)


def test_sources_with_other_fields_are_named():
    other = ArraySource({"z": np.zeros((4, 3)), "y": np.arange(4)})
    message = "'real' .* has dicts of z, y, but 'sim' .* x, y; .*fields={NAME: {KEY: FIELD}} renames"
    with pytest.raises(lad.FormatError, match=message):
        lad.MixtureSource({"sim": (SIM, 1), "real": (other, 1)})


def loaded(mixture, **options):
    return lad.AsyncLoader(mixture, {"batch_size": 4} | options)


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (lambda mixture: lad.ConcatSource([mixture, SIM]), "would lose its shares; use its sources one by one"),
        (lambda mixture: lad.SubsetSource(mixture, [0, 319]), "source: sim .* would lose its shares"),
        (lambda mixture: lad.split(mixture, {"train": 0.5}), "would lose its shares"),
        (lambda mixture: lad.folds(mixture, 2), "would lose its shares"),
        (lambda mixture: loaded(mixture, weights=np.ones(320)), "weights: sim .* would lose its shares"),
        (lambda mixture: loaded(mixture, batch_by="y"), "batch_by: sim .* would lose its shares"),
    ],
)
def test_what_would_lose_the_shares_is_refused(used, message):
    with pytest.raises(lad.ConfigError, match=message):
        used(mixed())


@pytest.mark.parametrize("epoch", [None, 100])
def test_a_share_too_small_for_one_sample_is_refused(epoch):
    mixture = lad.MixtureSource({"sim": (SIM, 1), "real": (REAL, 1e-9)}, epoch=epoch)
    with pytest.raises(lad.ConfigError, match=f"real has share 1e-09, too little .* epoch of {epoch or 300} samples"):
        lad.AsyncLoader(mixture, {"batch_size": 4})


@pytest.mark.parametrize("share", [1e308, 1e-308, 5])
def test_shares_of_any_size_are_proportions(share):
    with lad.AsyncLoader(lad.MixtureSource({"a": (SIM, share), "b": (REAL, share)}), {"batch_size": 8}) as loader:
        assert np.bincount(next(loader)["source"]).tolist() == [4, 4]


def test_an_inner_mixture_may_have_the_key_of_the_outer_one():
    for key in (None, "source", "robot"):
        inner = lad.MixtureSource({"p": (SIM, 1)}, source_key=key)
        assert lad.MixtureSource({"in": (inner, 1)}, source_key=key or "robot").names == ("in/p",)


def test_keys_of_dicts_come_in_any_order():
    other = ArraySource({"y": np.arange(50) + 1000, "x": np.full((50, 3), 7.0)})
    for source in (lad.MixtureSource({"sim": (SIM, 1), "other": (other, 1)}), lad.ConcatSource([SIM, other])):
        check_contract(source)
        assert list(source.spec)[:2] == ["x", "y"]
        with lad.AsyncLoader(source, {"batch_size": 50, "shuffle": "global"}) as loader:
            batch = next(loader)
        assert ((batch["x"] == 7).all(axis=1) == (batch["y"] >= 1000)).all()


def test_keys_of_tuples_come_in_one_order(stored):
    tuples = [lad.HDF5Source(stored[0] / "sim.h5", list(keys)) for keys in ("xy", "yx")]
    with pytest.raises(lad.FormatError, match=r"has tuples of y, x, but .* has tuples of x, y"):
        lad.ConcatSource(tuples)


@pytest.mark.parametrize(("epoch", "batch_size", "world_size"), [(None, 8, 1), (70, 8, 1), (64, 8, 3)])
def test_evaluation_refuses_a_mixture_whose_samples_come_again(epoch, batch_size, world_size):
    loader = lad.AsyncLoader(mixed(epoch=epoch), {"batch_size": batch_size}, world_size=world_size)
    with pytest.raises(lad.ConfigError, match=r"of real \(.* × its 20\): samples come again.* val=\[sim, real\]"):
        loader.evaluation = True
    assert not loader.evaluation
    val = lad.AsyncDataModule(train=SIM, val=mixed(), loader={"batch_size": 8})
    with pytest.raises(lad.ConfigError, match="samples come again"):
        val.val_dataloader()
