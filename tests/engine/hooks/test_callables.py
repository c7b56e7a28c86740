"""How a hook takes random numbers, and what those are."""

import functools

import numpy as np
import pytest
import torch

from lit_async_data import AsyncDataModule, Normalize, prefetched
from lit_async_data.engine.hooks import StageTransform, takes_rng
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource


def module(forward):
    return type("Module", (torch.nn.Module,), {"forward": forward})()


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (None, False),
        (StageTransform(lambda batch, rng: None, "stage val"), True),
        (lambda batch, generator: None, True),
        (lambda batch, strength=2: None, False),
        (functools.partial(lambda batch, strength: None, strength=3), False),
        (functools.partial(lambda batch, strength, rng: None, strength=3), True),
        (functools.partial(lambda batch, rng: None, rng=None), False),  # that one is spoken for
        (lambda *batch, **rest: None, False),
        (lambda rng: None, False),
        (lambda batch, *rng: None, False),
        (module(lambda self, batch: None), False),
        (module(lambda self, batch, rng: None), True),
        (torch.nn.Sequential(module(lambda self, batch: None)), False),
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
        *(CROP, OLD, FLIP, composed(CROP, len), composed(composed(OLD)), composed()),
        *(functools.partial(functools.partial(CROP)), torch.nn.Sequential(OLD), functools.partial(composed(CROP))),
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
        of_library("mine", "WithCrop", torch.nn.Module, crop=CROP),
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


IN_VAIN = [lambda values: dict(CROP(values)), functools.partial(lambda crop, values: dict(crop(values)), CROP)]
NOT_IN_VAIN = [
    lambda values: {**values, "x": CROP(torch.from_numpy(values["x"]))},
    *(changed_in_place, lambda values: {"x": CROP(values)["x"]}, lambda values: {**values}),
    lambda values: CROP(values) or None,  # the dict that was given, which may be changed for other samples
]


@pytest.mark.parametrize("name", ["sample_transform", "batch_transform"])
@pytest.mark.parametrize("given", IN_VAIN + NOT_IN_VAIN)
def test_a_function_that_gives_arrays_to_torchvision_in_vain_is_warned_of(name, given, caplog):
    source = ArraySource({"x": np.zeros((2, 3, 8, 8), "u1"), "y": np.arange(2.0)})
    assert AsyncLoader(source, {"batch_size": 2}, **{name: given}).spec["x"].shape == (3, 8, 8)
    assert (f"{name}: arrays came back unchanged; give torchvision tensors" in caplog.text) == (given in IN_VAIN)
