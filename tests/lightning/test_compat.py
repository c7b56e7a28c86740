"""`Replacement`: a method of somebody's object is replaced for a while."""

import copy

import pytest

from lit_async_data.lightning.compat import Replacement


class Speaker:
    def say(self, number):
        return number


@pytest.mark.parametrize("composed", [{}, {"say": lambda number: -number}])
def test_a_method_is_replaced_until_it_is_undone(composed):
    speaker = Speaker()
    vars(speaker).update(composed)
    before, own = speaker.say, dict(vars(speaker))
    replacement = Replacement(speaker, "say", lambda original, number: (original(number), "more"))
    assert speaker.say(1) == (before(1), "more")
    replacement.undo()
    replacement.undo()
    assert (speaker.say, vars(speaker)) == (before, own)
    assert replacement(1) == before(1)  # of code that keeps it


def test_what_was_replaced_since_is_kept_and_a_copy_has_the_original():
    speaker = Speaker()
    replacement = Replacement(speaker, "say", lambda original, number: "replaced")
    assert copy.deepcopy(speaker).say(1) == 1
    speaker.say = theirs = lambda number: 7
    replacement.undo()
    assert speaker.say is theirs
