"""How a hook takes random numbers, and what those are."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.engine.hooks.callables import EvaluatedAlike, Hook, StageTransform
from lit_async_data.engine.hooks.calls import KeyedGenerator


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
