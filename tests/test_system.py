"""What a process has of its system, and a gate to wait at."""

from lit_async_data import system


def test_a_gate_lets_all_pass_from_the_moment_that_it_opens():
    gate = system.Gate()
    assert not gate.wait(0)
    gate.open()
    gate.open()
    assert gate.wait(0)
    gate._opened = False  # as two threads saw it that began to wait before
    gate.wait(0)
    assert not gate._closed.locked()  # the first one lets the second pass
