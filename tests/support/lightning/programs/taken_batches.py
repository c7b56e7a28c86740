"""Which batches the Trainer takes: limits, early stopping, checkpoints."""

import torch

from support.lightning.runs import program
from support.lightning.trainer import pl

EarlyStopping, ModelCheckpoint = pl.callbacks.EarlyStopping, pl.callbacks.ModelCheckpoint


@program(
    options=[
        {"num_sanity_val_steps": -1},
        {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
        {"limit_val_batches": 0},
        {"limit_train_batches": 0},
        {"max_steps": 6, "max_epochs": 5},
        {"val_check_interval": 0.25},
        {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 4},
        {"check_val_every_n_epoch": 2, "max_epochs": 4},
        {"overfit_batches": 0.5},
        {"fast_dev_run": 3},
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4, "num_sanity_val_steps": 1},
        {"accumulate_grad_batches": 2, "max_steps": 3, "max_epochs": 9},
        {"max_epochs": 0},
        {"min_epochs": 2, "max_epochs": 4, "max_steps": 7},
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
        {"inference_mode": False, "num_sanity_val_steps": 1},
        {"use_distributed_sampler": False},
        {"barebones": True, "logger": None, "enable_checkpointing": None, "num_sanity_val_steps": None}
        | {"enable_progress_bar": None, "enable_model_summary": None},
    ]
)
def the_trainer_with(run, options):
    if "barebones" in options:
        run.model.log = lambda *args, **more: None
    again = options.get("reload_dataloaders_every_n_epochs", 0) > 0
    model = run.model
    model.train_dataloader, model.val_dataloader = lambda: run.load(shuffle=not again), run.val
    model.drops = not again
    run.fit(**{"max_epochs": 2} | options)


@program(limit=[0.5, 0])
def limits_of_evaluation(run, limit):
    fit = run.trainer(limit_val_batches=limit, limit_test_batches=limit, limit_predict_batches=limit)
    loaders = [run.val(), run.load(9)]
    fit.validate(run.model, loaders, verbose=False)
    fit.test(run.model, loaders, verbose=False)
    predictions = fit.predict(run.model, loaders)
    run.note([[part.tolist() for part in loader] for loader in predictions or []])


@program
def early_stopping(run):
    stop = EarlyStopping("worse", patience=0, mode="min")
    fit = run.fit(run.load(shuffle=True), run.val(), more=[stop], max_epochs=9, val_check_interval=2)
    run.note(stop.stopped_epoch)
    assert fit.global_step < 9


@program
def a_stop_in_the_middle_of_an_epoch(run):
    def stop(stage, number):
        run.model.trainer.should_stop = number == 1

    run.model.on_step = stop
    run.fit(run.load(), run.val(), max_epochs=3)
    run.model.on_step = lambda *_: None
    run.fit(run.load(), run.val())


@program
def the_rest_of_an_epoch_is_skipped(run):
    run.model.on_train_batch_start = lambda batch, number: -1 if number == 2 else None
    run.fit(run.load(), run.val(), max_epochs=3)


@program
def the_number_of_steps_is_known_before_training(run):
    def optimizers():
        run.note(steps=run.model.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        steps = run.model.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    run.model.configure_optimizers = optimizers
    run.fit(run.load(shuffle=True), run.val(), max_epochs=3)
