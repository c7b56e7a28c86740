"""``python -m lit_async_data COMMAND``: chooses the command, and turns its errors into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import lit_async_data
from lit_async_data.errors import AsyncDataError
from lit_async_data.tools import doctor, fill, inspect, pack

# Modules with `add_arguments(parser)`, and `run(arguments)`, which prints and may return an exit status.
COMMANDS = {"inspect": inspect, "doctor": doctor, "pack": pack, "fill": fill}


def main(given: Sequence[str] | None = None) -> int:
    """Run a command. The exit status is 1 if a check finds bad samples, 2 after an error, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser("lit-async-data", description="Tools for the files that training reads.")
    parser.add_argument("--version", action="version", version=f"lit-async-data {lit_async_data.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        said, kept = str(module.__doc__), argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=said.splitlines()[0], description=said, formatter_class=kept)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments, status = parser.parse_args(given), None
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except AsyncDataError as error:
        return _ended(str(error))
    except MemoryError as error:
        said = f" ({error})" * bool(str(error))
        return _ended(f"there is not enough memory{said}; raise the limit (ulimit -v), or end other programs")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _ended(f"{error.filename or 'output'}: {error.strerror}; check the path, its permissions and its disk")
    return status or 0


def _ended(why: str) -> int:
    sys.stderr.write(f"error: {' '.join(why.split())}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
