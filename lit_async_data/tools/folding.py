"""Breaks programs and command lines where Python and the shell allow it, so that they can be copied at any width."""

from __future__ import annotations

import ast
import shlex


def folded_python(program: str, width: int) -> str:
    """A program with one argument per line in assignments that are too long.

    Args:
        program: One statement per line.
        width: Columns.

    Example:
        >>> print(folded_python('source = HDF5Source("x.h5", {"x": "a"}, stride=64)', 30))
        source = HDF5Source(
            "x.h5",
            {"x": "a"},
            stride=64,
        )
    """
    return "\n".join(line if len(line) <= width else _folded(line, width) for line in program.splitlines())


def _folded(line: str, width: int) -> str:
    statement = ast.parse(line).body[0]
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return line
    call = statement.value
    begin = ast.get_source_segment(line, call.func)
    parts = [part for each in call.args for part in _argument(line, "", each, width)]
    parts += [part for each in call.keywords for part in _argument(line, f"{each.arg}=", each.value, width)]
    name = line.partition(" = ")[0]
    return "\n".join([f"{name} = {begin}(", *(f"    {part}" for part in parts), ")"])


def _argument(line: str, name: str, value: ast.expr, width: int) -> list[str]:
    text = f"{name}{ast.get_source_segment(line, value)},"
    if len(text) + 4 <= width or not isinstance(value, ast.Dict):
        return [text]
    pairs = [
        f"    {ast.get_source_segment(line, key)}: {ast.get_source_segment(line, each)},"
        for key, each in zip(value.keys, value.values, strict=True)
        if key is not None
    ]
    return [f"{name}{{", *pairs, "},"]


def folded_command(command: str, width: int) -> list[str]:
    r"""The lines of a shell command, each but the last ending in a backslash.

    Args:
        command: The command, in one line.
        width: Columns.

    Example:
        >>> folded_command("python train.py data=hdf5 'data.train.path=\"a b.h5\"'", 30)
        ['python train.py data=hdf5 \\', '    \'data.train.path="a b.h5"\'']
    """
    lines = [""]
    for word in (shlex.quote(each) for each in shlex.split(command)):
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
        if len(longer) + 2 > width and lines[-1].strip():
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] = longer
    return lines
