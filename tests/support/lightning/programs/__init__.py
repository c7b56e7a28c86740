"""Programs as users write them for Lightning. `PROGRAMS` maps a sentence that describes each to its function."""

# Each of these modules enters its programs when it is imported.
from support.lightning.programs import (
    dataloaders,
    errors,
    given_loaders,
    hooks_and_steps,
    repeated_runs,
    taken_batches,
)
from support.lightning.runs import PROGRAMS

__all__ = [
    "PROGRAMS",
    "dataloaders",
    "errors",
    "given_loaders",
    "hooks_and_steps",
    "repeated_runs",
    "taken_batches",
]
