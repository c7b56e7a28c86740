"""The lines that commands print: the sources that they build, and the batches of these."""

import contextlib
import shlex
import textwrap

import hydra
import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lit_async_data import AsyncLoader, split
from support.lightning.command_line import CONFIGS


def built_by_python(python):
    names = {}
    exec(python, names)
    return names["source"]


def built_by_report(text):
    """The source that the line under "Read it with" builds."""
    return built_by_python(textwrap.dedent(text.partition("Read it with\n")[2]))


def built_by_command(command):
    _, script, *overrides = shlex.split(command)
    assert script == "train.py"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        source = hydra.utils.instantiate(compose("train", overrides).data).sources["train"][0]
    return source if "data=hdf5" in overrides else source.source  # of a table or a folder, it is one side of a split


@contextlib.contextmanager
def sides(suggestion, call):
    with contextlib.closing(built_by_python(suggestion.call.python())) as source:
        yield eval(call, {"split": split, "source": source})


def first_batch(source):
    with AsyncLoader(source, {"batch_size": 4, "shuffle": False, "workers": 0}) as loader:
        return {key: np.asarray(values) for key, values in next(loader).items()}


def check(suggestion):
    """Both lines build the same source, of the samples and batches that the report tells; returns the first batch."""
    with contextlib.closing(built_by_python(suggestion.call.python())) as source:
        assert len(source) == suggestion.samples
        batch = first_batch(source)
        told = {key: (each["dtype"], tuple(each["shape"])) for key, each in suggestion.batch.items()}
        assert {key: (str(values.dtype), values.shape[1:]) for key, values in batch.items()} == told
        assert source.chunks.reading == suggestion.reading
    with contextlib.closing(built_by_command(suggestion.call.command())) as other:
        same = first_batch(other)
        assert len(other) == suggestion.samples
        assert {key: np.array_equal(batch[key], same[key]) for key in batch} == dict.fromkeys(batch, True)
    return batch


def only(report):
    (suggestion,) = report.suggestions
    return suggestion


def check_said(report, suggested, noted, never=""):
    assert len(report.suggestions) == (suggested is not None)
    lines = [line for each in report.suggestions for line in (each.call.python(), *each.notes)]
    said = " ".join([*report.notes, *lines, *(f"{each.type} {each.why}" for each in report.datasets)])
    assert (suggested or "") in said
    assert noted in said
    assert not never or never not in said
    for each in report.suggestions:
        check(each)
