"""Arguments that Hydra cannot read are answered with what to type."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hypothesis import assume, given
from hypothesis import strategies as st
from support.lightning.command_line import CONFIGS

from lit_async_data.reference.explanations import explained

PARSER = OverridesParser.create()
KEYS = ["data.train.path", "+data.train.path", "++a.b", "ckpt_path", "~tags", "data", "logger@run.logger"]


def typed_again(argument):
    """What a user types who does as the message says, as Python gets it from the shell."""
    with pytest.raises(OverrideParseException) as caught:
        PARSER.parse_overrides([argument])
    said = explained(caught.value, [argument], str(CONFIGS))
    assert "\n" not in said
    return shlex.split(said.partition("quote it: ")[2])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "value",
    ["x (v2).h5", r"file:(patient_\d+)", "it's (a).h5", 'a "b" (c).h5', "a b=c (d),e.h5", "[x].h5", "é.h5", "(\\"],
)
def test_the_quotes_that_a_message_names_are_right(key, value):
    (written,) = typed_again(f"{key}={value}")
    override = PARSER.parse_override(written)
    assert override.value() == value
    assert written.startswith(f"{key}=")


@given(st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12), st.sampled_from(KEYS))
def test_any_value_can_be_typed_as_the_message_says(value, key):
    try:
        PARSER.parse_overrides([f"{key}={value}"])
        assume(False)
    except OverrideParseException:
        pass
    (written,) = typed_again(f"{key}={value}")
    assert PARSER.parse_override(written).value() == value


def test_words_after_a_space_are_put_back_into_the_value():
    typed = ["loader.workers=2", "data.train.path=my", "data", "file (v2).h5", "seed=1"]
    with pytest.raises(OverrideParseException) as caught:
        PARSER.parse_overrides([typed[3]])
    said = explained(caught.value, typed, str(CONFIGS))
    assert said.endswith("""if it belongs to data.train.path, quote it: 'data.train.path="my data file (v2).h5"'""")
