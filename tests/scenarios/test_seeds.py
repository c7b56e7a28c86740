"""Some seeds of `fuzz` and `soak`. One that has failed is added to them."""

import collections

import pytest
from scenarios import fuzz, soak


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("seeds")


def test_damaged_files_give_right_values_or_errors_that_name_them(folder):
    found = fuzz.outcomes(folder, 1128, 50)  # of 1128 and 1176, a checksum alone detects the damage
    assert not {seed: what for seed, what in found.items() if what.startswith("WRONG")}
    counts = collections.Counter(found.values())
    # Damage is detected, and much of it matters.
    assert counts["CorruptError"] + counts["FormatError"] > 10 < counts["value"], counts


@pytest.mark.processes
@pytest.mark.parametrize("seed", [*range(6), 56, 103])
def test_interrupted_loaders_hand_out_the_order_of_the_epoch(seed, folder):
    assert soak.checked(seed, folder) == 0


@pytest.mark.processes
def test_loaders_hand_out_the_order_while_their_processes_are_killed(folder):
    assert soak.checked(0, folder, kills=4) == 4
