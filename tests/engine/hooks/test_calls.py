import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
