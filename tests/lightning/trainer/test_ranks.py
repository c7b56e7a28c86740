"""Several processes share the samples, however they were started; see `support/ranks/rank_program.py`."""

import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.lightning.predictions import check_files
from support.lightning.rows import SAMPLES
from support.plans import plan_of
from support.ranks.processes import as_ranks, environment, free_port, run_together
from support.ranks.rank_program import BATCH, EPOCHS, LENGTHS, LONG, OTHER_BATCH, PREDICTED, SAVED, VAL
from support.ranks.wrapped_loaders import DEALT

PROGRAM = Path(__file__).parents[2] / "support/ranks/rank_program.py"


def started_by_lightning(program, ranks, folder):
    return [(program, {})]


def started_by_srun(program, ranks, folder):
    """Without a file as main module: workers of a DataLoader would import it, for seconds."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    code = "import sys; from support.ranks import rank_program; rank_program.main(*sys.argv[1:])"
    program = [program[0], "-c", code, *program[2:]]
    return [(program, environment(folder, "77", rank=rank, ranks=ranks) | address) for rank in range(ranks)]


def started_by_torchrun(program, ranks, folder):
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={ranks}", "--nproc-per-node=1"]
    agent += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [([*agent, f"--node-rank={node}", *program[1:]], {}) for node in range(ranks)]


WAYS = {"ddp": started_by_lightning, "ddp_spawn": started_by_lightning, "torchrun": started_by_torchrun}
WAYS |= {"slurm": started_by_srun, "fabric": lambda program, ranks, folder: as_ranks(program, ranks)}
LIGHTNING = ["ddp", "torchrun", "slurm"]
long = pytest.mark.long


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("slurm", 2),  # starts both processes at once, which is the fastest way
        pytest.param("ddp", 2, marks=long),
        pytest.param("ddp", 3, marks=long),
        pytest.param("ddp_spawn", 2, marks=long),
        pytest.param("torchrun", 2, marks=long),
        pytest.param("fabric", 2, marks=long),
    ],
)
def test_ranks_share_the_samples(way, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    program = [sys.executable, str(PROGRAM), str(tmp_path), way, str(ranks)]
    run_together(WAYS[way](program, ranks, tmp_path), tmp_path)

    def found(name):
        return [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]

    for samples in LENGTHS if way in LIGHTNING else LENGTHS[:1]:
        facts = found(f"{samples} samples")
        for epoch in range(EPOCHS):
            check_epoch([fact["train"][epoch] for fact in facts], samples, epoch)
    if way == "fabric":
        batches = [fact["train"][0] for fact in found("prefetched")]
        assert sorted(sample for rank in batches for batch in rank for sample in batch) == list(range(24))
        assert {len(rank) for rank in batches} == {24 // ranks // BATCH}
    if way in {*LIGHTNING, "ddp_spawn"}:
        check_validation(found("22 samples"))
    if way in LIGHTNING:
        check_test_and_predict(found("22 samples"))
        check_drop_last(found("drop_last"))
        check_resumed(found("resumed"), ranks)
        check_predictions(tmp_path / "out", *found("predictions"))
        if way == "slurm":
            check_wrapped(found)
        for fact in found("one sample"):
            assert f"1 samples cannot be shared by {ranks} ranks" in fact["error"]


def check_epoch(batches, samples, epoch, **options):
    """Every sample once, in the order of the plan, and equal, non-empty batch counts. Batches are given by rank."""
    assert len({len(rank) for rank in batches}) == 1
    assert all(batch for rank in batches for batch in rank)
    for rank, dealt in enumerate(batches):
        plan = planned(samples, epoch, rank, len(batches), **options)
        assert dealt == [plan.batch(step).tolist() for step in range(len(plan))]
    left = samples % (BATCH * len(batches)) if options.get("drop_last") else 0
    seen = [sample for rank in batches for batch in rank for sample in batch]
    assert len(seen) == len(set(seen)) == samples - left
    assert set(seen) <= set(range(samples))


def planned(samples, epoch, rank, ranks, shuffle="global", **options):
    given = {"length": samples, "batch_size": BATCH, "shuffle": shuffle, "seed": 0, "epoch": epoch}
    return plan_of(**given, rank=rank, world_size=ranks, **options)


def check_validation(facts):
    sanity, *passes = zip(*(fact["val"] for fact in facts))
    assert {len(rank) for rank in sanity} == {2 if len(facts) < 3 else 1}
    assert len(passes) == EPOCHS
    for batches in passes:
        check_epoch(batches, VAL, 0, shuffle="none")
    for fact in facts:  # what is logged over all ranks is that of all samples
        assert fact["metrics of fit"]["val sum"] == sum(range(VAL))
        assert fact["metrics of fit"]["train sum"] == sum(range(LENGTHS[0]))


def check_test_and_predict(facts):
    check_epoch([fact["test"][0] for fact in facts], VAL, 0, shuffle="none")
    check_epoch([fact["predict"][0] for fact in facts], VAL, 0, shuffle="none")
    for fact in facts:
        assert fact["metrics of test"]["test sum"] == sum(range(VAL))


def check_resumed(facts, ranks):
    for epoch, done in enumerate([SAVED * BATCH * ranks, *[0] * (EPOCHS - 1)]):
        rest = planned(LONG, epoch, 0, 1).deck.samples(np.arange(done, LONG)).tolist()
        for step, dealt in enumerate(zip(*(fact["train"][epoch] for fact in facts), strict=True)):
            assert sorted(itertools.chain(*dealt)) == sorted(rest[: OTHER_BATCH * ranks]), (epoch, step)
            del rest[: OTHER_BATCH * ranks]
        assert not rest


def check_wrapped(found):
    for workers, names in DEALT.items():
        for name in names:
            assert found(f"{name}-{workers}-1") == found(f"{name}-{workers}-0")
        for name in ("shuffled", "by_hand"):
            facts = found(f"{name}-{workers}-1")
            one, other = ([ids for stage, _, _, ids in fact["batches"] if stage == "train"] for fact in facts)
            assert set(itertools.chain(*one, *other)) == set(range(SAMPLES)), name
            assert one
            assert not {*itertools.chain(*one[:2])} & {*itertools.chain(*other[:2])}
    for fact in found("unsharded-1-0"):
        ((kind, message, _),) = fact["notes"]
        assert kind == "ConfigError"
        assert "DistributedSampler(" in message
        assert fact["batches"] == []


def check_drop_last(facts):
    for epoch in range(EPOCHS):
        check_epoch([fact["train"][epoch] for fact in facts], LENGTHS[0], epoch, drop_last=True)
    (same,) = {fact["normalize"] for fact in facts}  # of all samples, which rank 0 has read
    found = [float(number) for number in re.findall(r"(?:mean|std)=([\d.]+)", same)]
    assert found == pytest.approx([np.mean(range(LENGTHS[0])), np.std(range(LENGTHS[0]))], rel=1e-6)
    for batches in list(zip(*(fact["val"] for fact in facts)))[1:]:  # evaluation drops nothing
        check_epoch(batches, VAL, 0, shuffle="none")


def check_predictions(path, *facts):
    check_files(path, range(PREDICTED))
    assert all("out" in each["seen"] and "out.partial" not in each["seen"] for each in facts)
    own, *others = [each["error"] for each in facts]
    assert own.startswith(f"ConfigError: path: {path} exists; move or delete it")
    failed = f"AsyncDataError: PredictionWriter: rank 0 failed: ConfigError: path: {path} exists"
    assert all(said.startswith(failed) for said in others)
