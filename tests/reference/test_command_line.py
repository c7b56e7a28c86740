"""What is typed wrong after `train.py` ends with one line that says what was meant."""

import pytest
import torch
from support.lightning.command_line import CONFIGS, QUIET

from lit_async_data.errors import ConfigError
from reference.command_line import check, own_model

WRONG = {
    # The section of the key, or that of another choice, or a key of that name elsewhere.
    "loader.worker=4": "loader.worker: no such key; did you mean loader.workers?",
    "data=hdf5 data.train.pth=x.h5": "did you mean data.train.path?",
    "data=hdf5 data.path=x.h5": "data.path: no such key; did you mean data.train.path?",
    "data.train.path=x.h5": "data.train.path: no such key; it belongs to data=hdf5",
    "data.split.train=0.8": "it belongs to data=folder or data=hdf5_split or data=manifest",
    "optimizer.lr=1": "did you mean model.lr?",
    "epochs=2": "did you mean trainer.min_epochs or trainer.max_epochs?",
    "~callbacks.early": "callbacks.early: no such key; did you mean callbacks.early_stopping?",
    "-m loader.depth=1,2": "loader.depth: no such key; did you mean loader.queue_depth?",
    # Names of torch, and another name of a section.
    "num_workers=2": "num_workers: no such key; for the loader, use workers",
    "loader.pin_memory=true": "for the loader, leave it out",
    "data.loader.worker=3": "did you mean loader.workers?",
    # Otherwise what there is.
    "model.depth=3": "there are x, y, channels, classes, width, lr; to add it, write +model.depth=…",
    "data=manifest data.source.fields={x:a,z:c}": "data.source.fields.z: no such key; there are x, y",
    "data=hdf5 data.train.fields.x=X": "data.train.fields is set as a whole: 'data.train.fields={x: …}'",
    "data=hdf5 data.train.fields.x.patch=[8,8]": "as a whole: 'data.train.fields={x: {name: …, patch: …}}'",
    "data=manifest data.source.fields.y=grade data.source.fields.y.kind=class": "fields.y={name: grade, kind: …}'",
    "loader=thread": "loader: thread is no choice; there are threads",
    "data=manifest data.source.fields={x:a,y:{name:b,null:drop}}": "write ++data.source.fields.y.null=VALUE",
    # Values of another type.
    "trainer.max_epochs=abc": "trainer.max_epochs: 'abc' is not a number (the default is 12)",
    "data=hdf5 data.train=x.h5": "'x.h5' cannot replace all of its settings; write data.train.path=x.h5",
    # What Hydra cannot read.
    "data.train.path=x(v2).h5": "quote it: 'data.train.path=\"x(v2).h5\"'",
    "x.h5": "x.h5: cannot be read; write KEY=VALUE",
    "data.train.fields={x:": "quote the whole argument for the shell: 'data.train.fields={x: …'",
}
RIGHT = [
    "data=hdf5 data.train.path=x.h5 data.train.layout=NHWC loader.workers=2",
    "data=hdf5 data.train.fields={x:images} data.train.layout={x:NHWC}",
    "data=manifest data.source.fields={x:a,y:{name:b}} +data.source.fields.z=c ~data.groups",
    "data=manifest data.source.fields.y={name:b} ++data.source.fields.y.null=drop",
    "data=hdf5_split data.split={train:[0,1],val:[2]} data.groups=fold",
    "-m data=digits,hdf5 loader.queue_depth=1,2 seed=range(1,4)",
    "logger=[csv,tensorboard] hydra/job_logging=disabled hydra.run.dir=x callbacks.early_stopping=null",
    "experiment=digits_wide model.width=3 loader.workers=auto",
    "model._target_=net.Net model.depth=3 +model.width=3",
    "--cfg job loader.worker=4",
]


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_is_named_as_typed_with_what_was_meant(typed):
    with pytest.raises(ConfigError) as caught:
        check(own_model(typed.split()), str(CONFIGS))
    assert WRONG[typed] in str(caught.value)


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize("typed", RIGHT)
def test_what_the_configuration_has_is_let_through(typed):
    check(own_model(typed.split()), str(CONFIGS))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loader.worker=4"], "loader.worker: no such key; did you mean loader.workers?"),
        (["data=hdf5"], "data.train.path: missing; give it, as in data.train.path=VALUE"),
        (["data=hdf5", "data.train.path=a,b.h5"], "a,b.h5"),
        (["model._target_=nope.Net"], "model: ImportError: Error loading 'nope.Net'"),
        (["model.x=image"], "model.x: there is no field 'image'; choose model.x from x, y"),
        (["train=false"], "would test untrained weights; give a checkpoint"),
        (["optimized_metric=val/ac", "train=false", "test=false"], "optimized_metric: 'val/ac' is not one of"),
        (["-m", "trainer=ddp_sim"], "trainer.devices: 2 with --multirun: each process would"),
        (["trainer=gpu", "trainer.accelerator=gpu"], " finds no GPU here; trainer=cpu trains on the CPU, trainer=ddp"),
        # Lightning's own texts follow.
        (["trainer.val_check_interval=100"], "error: ValueError: "),
        (["callbacks.early_stopping.monitor=val/los", "trainer.limit_train_batches=1"], "error: RuntimeError: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_a_run_with_one_line(typed, arguments, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    quiet = [override for override in QUIET if override.partition("=")[0] not in " ".join(arguments)]
    shown, ending = typed(*arguments, *quiet)
    assert "Error executing job" not in shown  # Hydra's line, which would come first
    assert ending.startswith("error: ")
    assert said in ending
    assert "\n" not in ending


def test_a_column_that_is_not_there_is_named_with_its_key(typed, tmp_path):
    table = tmp_path / "birds.csv"
    table.write_text("path,species\n1.png,auk\n")
    _, ending = typed("data=manifest", f"data.source.table={table}", "data.source.fields.y=specie", *QUIET)
    assert ending.startswith(f"error: data.source.fields.y: {table}: has no column 'specie'; ")
