"""Reports in columns, and the bar that shows progress."""

import io
import time

from lit_async_data.tools.terminal import indented, progress_bar, section, table


def test_each_step_has_a_bar_of_its_own_which_is_cleared():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with progress_bar(stream) as show:
        for step in ("packing", "comparing"):
            show(step, 0, 10 * 2**30)
            time.sleep(0.11)
            show(step, 4 * 2**30, 10 * 2**30)
    assert all(f"{step}:  40%" in stream.getvalue() for step in ("packing", "comparing"))
    assert stream.getvalue().endswith(" \r")


def test_lines_stand_in_columns_and_in_sections():
    assert table([("name", "rows"), ("x", "10"), ("label", "")]) == ["name    rows", "─" * 12, "x       10", "label"]
    assert table([("name", "rows")]) == section("Notes", []) == indented([]) == []
    lines = [str(number) for number in range(14)]
    assert section("Notes", lines[:13])[2:] == [f" · {line}" for line in lines[:13]]
    assert section("Notes", lines)[:3] + section("Notes", lines)[-2:] == ["", "Notes", " · 0", " · 11", " · and 2 more"]
    assert indented(["a = 1"]) == ["", "  a = 1"]
