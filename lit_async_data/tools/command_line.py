"""``python -m lit_async_data COMMAND``: chooses the command, and turns its errors into one line."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from lit_async_data.errors import AsyncDataError

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
    parser = argparse.ArgumentParser("lit-async-data", description="Tools for the files that training reads.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        module = importlib.import_module(command.module) if name in arguments[:1] else None
        described = None if module is None else module.__doc__
        below = commands.add_parser(
            name, help=command.summary, description=described, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if module is not None:
            module.add_arguments(below)
            below.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    logging.getLogger("lit_async_data").addHandler(logging.NullHandler())  # a report says what a warning would
    try:
        return int(chosen.run(chosen))
    except AsyncDataError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return WRONG_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
