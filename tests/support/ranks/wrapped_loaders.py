"""What each of two ranks runs with somebody's own DataLoaders, as Lightning does it, and again with the callback."""

import json
import logging
import multiprocessing

import torch
from torch.utils.data import DistributedSampler

from lit_async_data import ConfigError, DevicePrefetcher, prefetched
from support.lightning.programs import Writer
from support.lightning.rows import Numbers, Stream
from support.lightning.runs import Learner, Run, pl

# By number of workers. What happens to the order of a DataLoader needs no worker to be seen.
DEALT = {0: ["shuffled", "predicted", "by_hand", "streamed"], 1: ["shuffled", "by_hand"]}


def shuffled(run, fit):
    fit(max_epochs=2).fit(run.model, run.load(shuffle=True), run.val(9))


def predicted(run, fit):
    fit(Writer("batch", run.note)).predict(run.model, run.load(13))


def streamed(run, fit):  # Lightning cannot deal it, and says nothing: each rank reads all of it
    fit().fit(run.model, run.load(dataset=Stream()))


def by_hand(run, fit):
    class Mine(Learner):
        def train_dataloader(self):
            data = Numbers()
            return prefetched(run.load(dataset=data, sampler=DistributedSampler(data, shuffle=False)), device="cpu")

    run.model = Mine()
    fit(max_epochs=2).fit(run.model)
    run.model.trainer.train_dataloader.close()


def unsharded(run, fit):
    try:
        with prefetched(run.load(), device="cpu") as batches:
            fit().fit(run.model, batches)
    except ConfigError as error:
        run.note(type(error).__name__, str(error))


def write(folder, name, workers, callbacks):
    run = Run(workers, "", callbacks)

    def fit(*more, **options):
        return run.trainer(*more, devices=2, strategy="ddp", **options)

    globals()[name](run, fit)
    facts = {"batches": run.model.journal, "notes": run.notes, "losses": run.model.losses}
    with open(f"{folder}/{name}-{workers}-{len(callbacks)}-{torch.distributed.get_rank()}.json", "w") as file:
        json.dump(facts, file)


def write_all(folder):
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)
    # A worker that is forked beside gloo's threads may hang before its first line, with or without the callback:
    # Python before 3.11.8 waits there for a lock that such a thread held (gh-112275).
    torch.multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["support.lightning.rows"])
    for workers, names in DEALT.items():
        for name in names:
            for callbacks in ([], [DevicePrefetcher()]):
                write(folder, name, workers, callbacks)
    write(folder, "unsharded", 1, [])
