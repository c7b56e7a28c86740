"""A plugin of pytest for suites of others: they run with this package in the way of each batch, if INJECT says where.

``INJECT=lightning``: each Trainer has a `DevicePrefetcher`. ``INJECT=torch``: each DataLoader is read through
`prefetched`. The outcome of each test goes to the file OUTCOMES, a line each.
"""

import functools
import os
import sys


def pytest_configure(config):
    {"lightning": into_trainers, "torch": around_loaders}.get(os.environ.get("INJECT"), int)()


def into_trainers():
    from lightning.pytorch import Trainer

    from lit_async_data import DevicePrefetcher

    init = Trainer.__init__

    @functools.wraps(init)
    def with_prefetcher(trainer, *args, callbacks=None, **options):
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        init(trainer, *args, callbacks=[*given, DevicePrefetcher()], **options)

    Trainer.__init__ = with_prefetcher


def around_loaders():
    from torch.utils.data import DataLoader

    from lit_async_data import prefetched

    begin = DataLoader.__iter__

    def read_ahead(loader):
        if sys._getframe(1).f_globals["__name__"].startswith(("lit_async_data.", "torch.")):
            return begin(loader)
        if "read_ahead" not in vars(loader):
            vars(loader)["read_ahead"] = prefetched(loader, device="cpu")
        return iter(vars(loader)["read_ahead"])

    DataLoader.__iter__ = read_ahead


def pytest_runtest_logreport(report):
    counts = report.when == "call" or report.outcome != "passed"
    if counts and report.outcome != "rerun" and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["OUTCOMES"], "a") as file:
            file.write(f"{report.outcome} {report.nodeid}\n")
