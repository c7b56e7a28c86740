"""Which hooks a loader takes; and the random numbers and numbers of samples that they get depend on nothing else."""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sources.hooked_loaders import copied, drawing, hooked, read, source
from support.sources.hooks import LENGTH, Rows, aged, explode, older

from lit_async_data import AsyncDataModule, AsyncLoader, Normalize, SubsetSource, prefetched
from lit_async_data.engine.hooks import BATCH_HOOK_KEYS, SAMPLE_HOOK_KEYS, KeyedGenerator, StageTransform, takes_rng
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


@pytest.mark.parametrize(
    ("kind", "result", "message"),
    [
        ("sample", explode, r"failed on sample 9 \(row 9 of ArraySource\): ZeroDivisionError: no light"),
        ("sample", lambda s: {**s, "x": s["x"][:, 1:]}, r"'x' of .* \(3, 9, 8\), but \(3, 10, 8\) .* crop or"),
        ("sample", lambda s: {**s, "x": s["x"] / 2}, r"'x' of sample 9 .* float64, but uint8 .* .astype\('uint8'\)"),
        ("sample", lambda s: {"x": s["x"]}, r"returned the keys x for sample 9 \(.*\), but x, y for .* same keys"),
        ("sample", list, r"returned a list for sample 9 \(row 9 of ArraySource\); return a dict"),
        ("batch", explode, r"failed on the batch of samples 8, 9, 10, … \(4 in all\) \(the first is row 8 .*: Zero"),
        ("batch", lambda b: {**b, "x": b["x"][:3]}, r"'x' .* has shape \(3, 3, 10, 8\), but .* each of the 4"),
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
        ("sample", lambda s: {3: 1}, r"the key 3 in the result for sample 0 \(.*\) is not text; name each field by"),
        ("sample", explode, r"failed on sample 0 \(row 0 of ArraySource\): ZeroDivisionError: no light"),
        ("batch", lambda b: b["y"], r"returned a ndarray for the batch of samples 0, 1 \(the first is row 0 .*\); ret"),
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


# -- which hooks a loader takes ----------------------------------------------------------------------------------------


def module(forward):
    return type("Module", (torch.nn.Module,), {"forward": forward})()


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (StageTransform(lambda batch, rng: None, "stage val"), True),
        (lambda batch, generator: None, True),
        (lambda batch, strength=2: None, False),
        (functools.partial(lambda batch, strength, rng: None, strength=3), True),
        (functools.partial(lambda batch, rng: None, rng=None), False),  # that one is spoken for
        (lambda *batch, **rest: None, False),
        (lambda batch, *rng: None, False),
        (module(lambda self, batch, rng: None), True),
        (type("Callable", (), {"__call__": lambda self, batch, rng: None})(), True),
        (torch.neg, False),
    ],
)
def test_whether_a_transform_draws_is_read_off_its_signature(function, takes):
    assert takes_rng(function) is takes


@pytest.mark.parametrize("name", ["sample_transform", "batch_transform", "device_transform"])
@pytest.mark.parametrize(
    ("given", "why"),
    [("flip", "'flip' cannot be called with a"), (Normalize, r"Normalize is a class.*write Normalize\(…\)")],
)
def test_what_cannot_be_called_is_refused_by_name(name, given, why):
    source, options = ArraySource({"y": np.arange(4)}), {"batch_size": 4}
    module = functools.partial(AsyncDataModule, train=source, loader=options)
    loaders = [functools.partial(AsyncLoader, source, options), functools.partial(prefetched, [1])]
    for made in (module, *loaders[: 1 + (name == "device_transform")]):
        with pytest.raises(ConfigError, match=f"^{name}: {why}"):
            made(**{name: given})
    with pytest.raises(ConfigError, match=f"^{name}.eval: {why}"):
        module(**{name: {"eval": given}})
    with pytest.raises(ConfigError, match=f"^{name}: 'training' is not one of train, val"):
        module(**{name: {"training": dict}})


def of_library(module, name, base=object, **attributes):
    """An object of a class that says it is of a library, which need not be there."""
    return type(name, (base,), {"__module__": module, "__call__": lambda _, value: value, **attributes})()


CROP = of_library("torchvision.transforms.v2._geometry", "CenterCrop")
OLD = of_library("torchvision.transforms.transforms", "RandomCrop", torch.nn.Module)
FLIP = of_library("albumentations.augmentations.flip", "HorizontalFlip")


def composed(*transforms):
    return of_library("torchvision.transforms.v2._container", "Compose", transforms=list(transforms))


@pytest.mark.parametrize("name", ["sample_transform", "batch_transform"])
@pytest.mark.parametrize(
    "given",
    [
        *(FLIP, composed(composed(OLD), len), composed()),
        *(torch.nn.Sequential(OLD), functools.partial(functools.partial(composed(CROP)))),
    ],
)
def test_a_transform_of_a_library_that_takes_no_dict_of_arrays_is_refused_with_the_lines_to_write(name, given):
    source = ArraySource({"x": np.zeros((2, 3, 8, 8), "u1")})
    of = name.partition("_")[0]
    image = rf'image={of}\["x"\].transpose\(1, 2, 0\)\)\["image"\].transpose\(2, 0, 1\)'
    call = image if given is FLIP else rf'torch\.from_numpy\({of}\["x"\]\)\)'
    said = rf'def transformed\({of}\): return {{\*\*{of}, "x": transform\({call}}} \(docs/data/transforms\.md\)$'
    with pytest.raises(ConfigError, match=rf"^{name}: \w+ of (torchvision|Albumentations) .*{said}"):
        AsyncLoader(source, {"batch_size": 2}, **{name: given})
    for stages, where in ((given, name), ({"train": given}, f"{name}.train"), ({"eval": given}, f"{name}.eval")):
        with pytest.raises(ConfigError, match=rf"^{where}: .*{said}"):
            AsyncDataModule(train=source, loader={"batch_size": 2}, **{name: stages})
    line = said.replace("\\", "").removesuffix(" (docs/data/transforms.md)$").replace("{{", "{").replace("}}", "}")
    defined = {"torch": torch, "transform": lambda values: values}
    exec(line, defined)  # what the message says is Python
    if given is not FLIP:
        assert list(defined["transformed"]({"x": np.zeros(3), "y": 1})) == ["x", "y"]


@pytest.mark.parametrize(
    "given",
    [
        composed(dict, CROP),
        torch.nn.Sequential(torch.nn.Identity(), OLD),
        of_library("torchvision.transforms.v2._misc", "Lambda", lambd=dict),
        of_library("mine", "Crop", type(CROP)),
    ],
)
def test_what_may_take_a_dict_of_arrays_first_is_not_refused(given):
    source = ArraySource({"x": np.zeros((2, 3, 8, 8), "u1")})
    with AsyncLoader(source, {"batch_size": 2, "workers": 0}, sample_transform=given) as loader:
        assert next(loader)["x"].shape == (2, 3, 8, 8)


def changed_in_place(sample):
    CROP(sample)["x"] += 1
    return {**sample}


@pytest.mark.parametrize("name", ["sample_transform", "batch_transform"])
@pytest.mark.parametrize(
    ("given", "in_vain"),
    [
        (functools.partial(lambda crop, values: dict(crop(values)), CROP), True),
        (lambda values: {**values, "x": CROP(torch.from_numpy(values["x"]))}, False),
        (changed_in_place, False),
        (lambda values: {"x": CROP(values)["x"]}, False),
        (lambda values: {**values}, False),
        (lambda values: CROP(values) or None, False),  # the given dict, which may be changed for other samples
    ],
)
def test_a_function_that_gives_arrays_to_torchvision_in_vain_is_warned_of(name, given, in_vain, caplog):
    source = ArraySource({"x": np.zeros((2, 3, 8, 8), "u1"), "y": np.arange(2.0)})
    assert AsyncLoader(source, {"batch_size": 2}, **{name: given}).spec["x"].shape == (3, 8, 8)
    assert (f"{name}: arrays came back unchanged; give torchvision tensors" in caplog.text) == in_vain
