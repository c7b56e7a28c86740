"""Errors and signals, and the next run after them."""

import os
import signal

from torch.utils.data import DataLoader

from support.lightning.rows import Numbers
from support.lightning.runs import BATCH, our_threads, program


class BrokenError(Exception):
    """Raised by user code."""


def broken_at(run, where, at):
    def breaks(stage, number):
        if (stage, number) == (where, at):
            raise BrokenError(f"{stage} {number}")

    run.model.on_step = breaks


@program(stage=["train", "val", "sanity", "test", "predict"])
def an_error_in_a_step(run, stage):
    broken_at(run, stage, 1)
    model, fit = run.model, run.trainer(num_sanity_val_steps=2, val_check_interval=2)
    with run.fails(BrokenError):
        if stage in ("train", "val", "sanity"):
            fit.fit(model, run.load(), run.val())
        else:
            getattr(fit, stage)(model, run.load())
    assert our_threads() == []
    run.model.on_step = lambda *_: None
    run.fit(run.load(), run.val())


@program(kind=["train", "val"])
def an_error_in_a_dataset(run, kind):
    broken = run.load(dataset=Numbers(fails_at=9))
    with run.fails(KeyError):
        run.trainer().fit(run.model, *((broken, run.val()) if kind == "train" else (run.load(), broken)))
    assert our_threads() == []
    run.fit(run.load(), run.val())


@program
def an_error_in_iter(run):
    class Refusing(DataLoader):
        asked = 0

        def __iter__(self):
            self.asked += 1
            if self.asked == 2:  # after an error at the first call, Lightning itself fails
                raise BrokenError("iter")
            return super().__iter__()

    with run.fails(BrokenError):
        run.trainer(max_epochs=2).fit(run.model, Refusing(Numbers(), BATCH))


@program(stage=["train", "predict"])
def ctrl_c(run, stage):
    def interrupt(now, number):
        if (now, number) == (stage, 1):
            raise KeyboardInterrupt

    run.model.on_step, handler = interrupt, signal.getsignal(signal.SIGINT)
    try:
        with run.fails(SystemExit):
            if stage == "predict":
                run.trainer().predict(run.model, run.load())
            else:
                run.trainer(val_check_interval=2).fit(run.model, run.load(), run.val())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning leaves SIGINT ignored
    assert our_threads() == []
    run.model.on_step = lambda *_: None
    run.fit(run.load(), run.val())


@program
def sigterm(run):
    run.model.on_step = lambda stage, number: number == 1 and os.kill(os.getpid(), signal.SIGTERM)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with run.fails(SystemExit):
            run.trainer().fit(run.model, run.load())
    finally:
        signal.signal(signal.SIGTERM, handler)  # Lightning leaves its own handler
    assert our_threads() == []
