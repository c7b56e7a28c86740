"""Bad samples under the Trainer: counted over ranks, listed in the folder of the log, marked among the predictions."""

import json

import numpy as np
import pytest
from support.lightning.predictions import rows_in
from support.lightning.trainer import NO_STAGES, Learning, pl, trainer
from support.sources.reader_sources import Damaged

import lit_async_data as lad

pytestmark = [NO_STAGES, pytest.mark.filterwarnings("ignore:.*does not have many workers")]
BAD = {2, 3, 50, 51, 52, 53}


class Model(Learning):
    def training_step(self, batch, number):
        self.seen.append(batch["index"].tolist())
        return self.layer(batch["y"].float().unsqueeze(1)).mean()

    def validation_step(self, batch, number):
        self.log("val/loss", batch["y"].float().mean())

    def predict_step(self, batch, number):
        return {"twice": 2.0 * batch["y"], "name": [str(each) for each in batch["y"].tolist()]}


def module(on_error, **options):
    loader = {"batch_size": 4, "on_error": on_error, "max_bad": 10, "return_indices": True}
    return lad.AsyncDataModule(loader=loader, **{stage: Damaged(BAD) for stage in options} or {"train": Damaged(BAD)})


def test_bad_samples_are_counted_in_metrics_listed_once_and_told_for_each_pass(tmp_path, caplog):
    model, logger = Model(), pl.loggers.CSVLogger(tmp_path)
    run = trainer(lad.DevicePrefetcher(), max_epochs=2, log_every_n_steps=1, logger=logger, default_root_dir=tmp_path)
    run.fit(model, datamodule=module("skip", train=True, val=True))
    assert run.callback_metrics["data/bad_samples"] == len(BAD)
    assert run.callback_metrics["val/bad_samples"] == len(BAD)
    assert [sum(map(len, model.seen[first : first + 25])) for first in (0, 25)] == [100 - len(BAD)] * 2
    lines = (tmp_path / "lightning_logs" / "version_0" / "quarantine-0.jsonl").read_text().splitlines()
    listed = [json.loads(line)["id"] for line in lines]
    assert sorted(listed) == sorted(BAD)  # once, though training and validation meet them
    told = [line.split(" was read around")[0] for line in caplog.messages if "was read around 6 bad" in line]
    assert told == [f"epoch {epoch} of Damaged" for epoch in (0, 0, 1, 1)]


def test_a_bad_sample_keeps_its_row_among_the_predictions_and_is_marked(tmp_path, caplog):
    run = trainer(lad.DevicePrefetcher(), lad.PredictionWriter(tmp_path / "out"), default_root_dir=tmp_path)
    run.predict(Model(), datamodule=module("skip", predict=True), return_predictions=False)
    assert sum("was read around 6 bad" in line for line in caplog.messages) == 1
    rows = rows_in(tmp_path / "out")
    assert rows["sample"] == list(range(100))
    assert [sample for sample, missing in enumerate(rows["missing"]) if missing] == sorted(BAD)
    for sample, (twice, name) in enumerate(zip(rows["twice"], rows["name"], strict=True)):
        assert (np.isnan(twice) and name is None) if sample in BAD else (twice == 2 * sample and name == str(sample))
