"""``python -m lit_async_data COMMAND``: chooses the command, and turns its errors into one line."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import lit_async_data
from lit_async_data.errors import AsyncDataError, ConfigError

# Exit status after wrong input, as of argparse.
WRONG_INPUT = 2


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        module: Has ``add_arguments(parser)``, and ``run(arguments)``, which returns the exit status. Imported only for
            this command.
        summary: For the list of commands.
    """

    module: str
    summary: str


#: By name. A new subcommand is one line here.
COMMANDS = {
    "inspect": Command("lit_async_data.tools.inspect.command", "what files hold, and the lines that read them"),
    "doctor": Command("lit_async_data.tools.doctor.command", "how fast files feed training, and what helps"),
    "pack": Command("lit_async_data.tools.pack.command", "one HDF5 file that is fast to read at random"),
}


def main(given: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        given: The arguments; None for those of the process.

    Returns:
        The exit status: 0; 2 after an error, which is one line on stderr; 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if given is None else given)
    logging.getLogger("lit_async_data").addHandler(logging.NullHandler())  # a report says what a warning would
    try:
        chosen = _parsed(arguments)
        status = int(chosen.run(chosen))
        sys.stdout.flush()
    except AsyncDataError as error:
        return _ended(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _ended(f"{error.filename or 'output'}: {error.strerror}; free some, or write elsewhere")
        if error.filename is None:
            raise
        return _ended(f"{error.filename}: {error.strerror}; check the path, and whether this user may use it")
    return status


def _ended(why: str) -> int:
    sys.stderr.write(f"error: {' '.join(why.split())}\n")
    return WRONG_INPUT


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the function ``run`` of their command.

    Raises:
        ConfigError: There is no such command or option.
        SystemExit: Help was asked for, or a value is wrong; argparse has printed why.
    """
    parser = argparse.ArgumentParser("lit-async-data", description="Tools for the files that training reads.")
    parser.add_argument("--version", action="version", version=f"lit-async-data {lit_async_data.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {}
    for name, command in COMMANDS.items():
        module = importlib.import_module(command.module) if name in arguments[:1] else None
        described = None if module is None else module.__doc__
        below = parsers[name] = commands.add_parser(
            name, help=command.summary, description=described, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if module is not None:
            module.add_arguments(below)
            below.set_defaults(run=module.run)
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(WRONG_INPUT)
    if arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        raise ConfigError(f"{arguments[0]}: no such command; {_meant(arguments[0], COMMANDS)}")
    chosen, left = parser.parse_known_args(arguments)
    if left and left[0].startswith("-"):
        options = re.findall(r"--[a-z-]+", parsers[arguments[0]].format_usage())
        raise ConfigError(f"{left[0]}: no such option of {arguments[0]}; {_meant(left[0], options)}")
    if left:
        raise ConfigError(f"{left[0]}: not expected here; name files before options")
    return chosen


def _meant(typed: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(typed.partition("=")[0], known, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
