"""`Replacement`: a method of somebody's object is replaced for a while."""

import copy

import pytest

from lit_async_data.lightning.compat import Replacement


class Speaker:
    def say(self, number):
        return number


@pytest.fixture(params=["of its class", "composed before"])
def speaker(request):
    made = Speaker()
    if request.param == "composed before":
        made.say = lambda number: -number
    return made


def test_a_method_is_replaced_until_it_is_undone(speaker):
    before, own = speaker.say, dict(vars(speaker))
    replacement = Replacement(speaker, "say", lambda original, number: (original(number), "more"))
    assert speaker.say(1) == (before(1), "more")
    replacement.undo()
    replacement.undo()
    assert (speaker.say, vars(speaker)) == (before, own)
    assert replacement(1) == before(1)  # of code that keeps it


def test_what_was_replaced_since_is_kept(speaker):
    replacement = Replacement(speaker, "say", lambda original, number: "replaced")
    speaker.say = theirs = lambda number: 7
    replacement.undo()
    assert speaker.say is theirs


def test_in_a_copy_the_method_is_the_original():
    speaker = Speaker()
    Replacement(speaker, "say", lambda original, number: "replaced")
    assert copy.deepcopy(speaker).say(1) == 1
