"""`PROGRAMS`: all programs, by a sentence that describes each."""

from __future__ import annotations

import functools

PROGRAMS = {}


def program(function=None, /, **variants):
    """Registers a program; with variants, once for each value of its argument."""

    def enter(function):
        sentence = function.__name__.replace("_", " ")
        ((name, values),) = variants.items()
        for value in values:
            label = getattr(value, "__name__", None) or str(value)
            PROGRAMS[f"{sentence} {name}={label}"] = functools.partial(function, **{name: value})
        return function

    if function is None:
        return enter
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function
