"""Values as overrides of a command line: quoted for Hydra, and then for the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# Text that Hydra takes as it is, in all places: not a number, not null, nothing of its grammar.
_BARE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./\-]*")
_WORDS = {"null", "true", "false", "nan", "inf"}


def override(key: str, value: Any) -> str:
    r"""An argument for ``train.py``, as typed in a shell.

    Example:
        >>> override("data.train.path", "x (v2).h5")
        '\'data.train.path="x (v2).h5"\''
        >>> override("data.train.fields", {"x": "images", "y": {"name": "labels", "column": 0}})
        "'data.train.fields={x: images, y: {name: labels, column: 0}}'"
    """
    return shlex.quote(f"{key}={hydra_value(value)}")


def hydra_value(value: Any) -> str:
    r"""A value in the grammar of Hydra's overrides.

    Example:
        >>> hydra_value([0, None, "null", 'a "b"'])
        '[0, null, "null", "a \\"b\\""]'
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {hydra_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(hydra_value, value)) + "]"
    if not isinstance(value, str):
        return str(value)
    if _BARE.fullmatch(value) and value.lower() not in _WORDS and value.strip("."):
        return value
    return '"' + _escaped(_escaped(value, r"\$\{"), '"|$') + '"'


def _escaped(text: str, special: str) -> str:
    """Text with a backslash before what is special, first to OmegaConf and then to Hydra.

    Any other backslash stands for itself, but those right before something special are escaped too.
    """
    return re.sub(rf"(\\*)({special})", lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), text)
