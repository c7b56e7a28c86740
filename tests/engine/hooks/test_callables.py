"""How a hook takes random numbers, and what those are."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch

from lit_async_data import AsyncDataModule, Normalize, prefetched
from lit_async_data.engine.hooks.callables import EvaluatedAlike, Hook, StageTransform, takes_rng
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource


def test_a_hook_finds_the_function_inside_the_wrappers_of_the_datamodule():
    def flipped(sample, rng): ...

    alike = EvaluatedAlike(flipped)
    hook = Hook(StageTransform(alike, "sample_transform, stage val"), "sample_transform")
    assert (hook.function, hook.where, hook.draws, hook.alike) == (flipped, "sample_transform, stage val", True, alike)


def test_what_a_reader_process_needs_of_hooks_imports_no_torch():
    program = (
        "import sys, lit_async_data.engine.hooks.transformation, lit_async_data.engine.processes.__main__; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def module(forward):
    return type("Module", (torch.nn.Module,), {"forward": forward})()


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (None, False),
        (lambda batch, rng: None, True),
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
