"""Reports in columns, and the line that shows progress."""

import io
import itertools

from lit_async_data.tools.terminal import ProgressLine, indented, section, table


def test_a_terminal_has_one_line_which_is_cleared():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with ProgressLine(stream, clock=itertools.count(0, 4).__next__) as shown:
        for done in (0, 2, 4):
            shown("packing", done * 2**30, 10 * 2**30)
    assert stream.getvalue().split("\r\x1b[K") == [
        "",
        "packing: 20 % of 10.0 GiB, 512.0 MiB/s, 0:00:16 left",
        "packing: 40 % of 10.0 GiB, 512.0 MiB/s, 0:00:12 left",
        "",
    ]


def test_a_log_has_a_line_every_ten_seconds():
    with ProgressLine(stream := io.StringIO(), clock=itertools.count(0, 4).__next__) as shown:
        for done in range(7):
            shown("packing", done * 2**30, 10 * 2**30)
    assert stream.getvalue() == (
        "packing: 30 % of 10.0 GiB, 256.0 MiB/s, 0:00:28 left\npacking: 60 % of 10.0 GiB, 256.0 MiB/s, 0:00:16 left\n"
    )


def test_lines_stand_in_columns_and_in_sections():
    assert table([("name", "rows"), ("x", "10"), ("label", "")]) == ["name    rows", "─" * 12, "x       10", "label"]
    assert table([("name", "rows")]) == section("Notes", []) == indented([]) == []
    lines = [str(number) for number in range(14)]
    assert section("Notes", lines[:13])[2:] == [f" · {line}" for line in lines[:13]]
    assert section("Notes", lines)[:3] + section("Notes", lines)[-2:] == ["", "Notes", " · 0", " · 11", " · and 2 more"]
    assert indented(["a = 1"]) == ["", "  a = 1"]
