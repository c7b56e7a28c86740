"""Runs a suite of others plain and with this package in the way of its batches, and lists the tests that differ.

``python tests/outside/compare.py lightning|torch CHECKOUT [ARGUMENT OF PYTEST …]``. Tests that differ run again. The
exit status is 1 if some of those are not in ``known.toml``.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
# By suite: the folder to run it in, arguments, and what of it is about loops, data or callbacks and needs no GPU.
LIGHTNING = """callbacks core loops models/test_hooks.py models/test_restore.py trainer/dynamic_args trainer/flags
trainer/connectors/test_data_connector.py trainer/logging_ trainer/optimization trainer/test_dataloaders.py
trainer/test_trainer.py tuner utilities/test_combined_loader.py"""
SUITES = {
    "lightning": ("tests", ["-c", "../pyproject.toml"], [f"tests_pytorch/{each}" for each in LIGHTNING.split()]),
    "torch": ("test", ["-c", os.devnull], ["test_dataloader.py"]),
}


def outcomes(suite, checkout, inject, words):
    """``"passed"``, ``"failed"`` or ``"skipped"`` by test."""
    folder, arguments, _ = SUITES[suite]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "outcomes")
        paths = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
        named = {"PYTHONPATH": paths, "OUTCOMES": str(path), "INJECT": inject, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "injection", "-p", "no:cacheprovider", "--timeout=120", "-q"]
        command += ["--rootdir=..", f"--basetemp={scratch}/tests", *arguments, *words]
        subprocess.run(command, cwd=os.path.join(checkout, folder), env=os.environ | named, check=False)
        lines = [line.partition(" ")[::2] for line in path.read_text().splitlines()]
    bad = {test: outcome for outcome, test in lines if outcome != "passed"}
    return {test: bad.get(test, "passed") for _, test in lines}


def differing(suite, checkout, words):
    """The outcomes of tests, plain and injected, where they are not the same; and how many tests there are."""
    plain, injected = (outcomes(suite, checkout, inject, words) for inject in ("", suite))
    return {test: (plain[test], injected.get(test)) for test in plain if plain[test] != injected.get(test)}, len(plain)


def main(suite, checkout, *words):
    checkout = os.path.abspath(checkout)
    found, count = differing(suite, checkout, [*words, *SUITES[suite][2]])
    if found:
        found, _ = differing(suite, checkout, [os.path.join(checkout, test) for test in found])
    known = tomllib.loads((HERE / "known.toml").read_text())[suite]
    reasons = {test: reason for reason, tests in known.items() for test in tests.split()}
    unknown = 0
    for test, (plain, injected) in found.items():
        reason = reasons.get(test.partition("[")[0].partition("::")[2])
        unknown += reason is None
        print(f"{plain}, injected {injected}: {test}: {reason or 'UNKNOWN'}")
    print(f"{count} tests, {len(found)} differ, {unknown} of them for no known reason")
    sys.exit(bool(unknown))


if __name__ == "__main__":
    main(*sys.argv[1:])
