"""Checksums that tell what has changed."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting.on_device.checksums import checksum

CONTENTS = st.binary(min_size=1, max_size=60)


def summed(content):
    return int(checksum(torch.frombuffer(bytearray(content), dtype=torch.uint8)))


@given(CONTENTS, st.data())
def test_any_changed_byte_changes_the_sum(content, data):
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    assert summed(changed) != summed(content)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=6), st.data())
def test_words_that_change_places_change_the_sum(words, data):
    one, other = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = list(words)
    swapped[one], swapped[other] = words[other], words[one]
    same = int(checksum(torch.tensor(swapped))) == int(checksum(torch.tensor(words)))
    assert same is (words[one] == words[other])


def test_the_sum_goes_by_memory_and_any_view_has_one():
    stored = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)
    assert int(checksum(stored)) == int(checksum(stored.permute(0, 3, 1, 2)))  # channels_last
    assert int(checksum(stored[:, 1:, ::2])) == int(checksum(stored[:, 1:, ::2].clone()))
    assert int(checksum(stored.flatten()[1:])) == int(checksum(stored.flatten()[1:].clone()))  # not aligned
    assert int(checksum(torch.ones(1).expand(5))) == int(checksum(torch.ones(5)))
