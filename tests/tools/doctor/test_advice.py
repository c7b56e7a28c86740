"""What ``doctor`` advises: pure functions of what was measured, and the text of a report."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.tools.doctor.advice import CLOSE, MIXED, best, why_pack
from lit_async_data.tools.doctor.report import DoctorReport, Reading, Trial
from lit_async_data.tools.doctor.text import print_report
from lit_async_data.tools.terminal import console


def trial(shuffle="global", workers=1, rate=100.0, *, mixing=1.0, amplification=1.0, **labels):
    return Trial(shuffle, 64, workers, "process", rate, amplification, mixing, labels, 10**7)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


trials = st.lists(
    st.builds(
        trial,
        shuffle=st.sampled_from(["none", "chunk", "global"]),
        workers=st.integers(0, 8),
        rate=st.floats(1, 1e6),
        mixing=st.floats(0, 1),
    ),
    min_size=1,
    max_size=12,
)


@given(trials)
def test_the_best_is_close_to_the_fastest_that_mixes(found):
    chosen = found[best(found)]
    mixing = [each for each in found if each.shuffle != "none" and each.mixed >= MIXED]
    assert chosen in (mixing or found)
    assert chosen.samples_per_s >= CLOSE * max(each.samples_per_s for each in (mixing or found))
    for each in mixing or found:
        if each.samples_per_s >= CLOSE * max(other.samples_per_s for other in (mixing or found)):
            assert chosen.workers <= each.workers


def test_labels_that_do_not_mix_rule_a_shuffle_out():
    assert best([trial("chunk", 1, 900.0, y=0.3), trial("global", 1, 100.0)]) == 1
    assert best([trial("chunk", 1, 900.0, y=0.9), trial("global", 1, 100.0)]) == 0


@pytest.mark.parametrize(
    ("found", "chosen", "measured", "why"),
    [
        ([trial()], trial(), ("copied", 0.0, False), ""),
        ([trial()], trial(), ("copied", 0.0, True), ""),
        ([trial()], trial(), ("decoded", 0.9, False), ""),  # compressed one by one: the file is as it should be
        (
            [trial()],
            trial(),
            ("decoded", 0.9, True),
            "readers spend 90 % of their time decoding images, each epoch again",
        ),
        ([trial()], trial(), ("decoded", 0.5, True), ""),
        ([trial()], trial(), ("locked", 0.0, False), "h5py reads it under a lock, one thread at a time"),
        (
            [trial("chunk", mixing=0.1)],
            trial(amplification=50.0),
            ("decoded", 0.9, False),
            "the chunk shuffle mixes only 0.10 as well as a global one, which decodes 50.0 samples for each one used",
        ),
        (
            [trial("chunk", mixing=1.0)],
            trial("chunk", amplification=3.0),
            ("decoded", 0.9, False),
            "each sample that is used costs 3.0 that are decoded",
        ),
    ],
)
def test_why_to_pack(found, chosen, measured, why):
    reading, decoding, files = measured
    assert why_pack(found, chosen, reading, decoding, files=files) == why


REPORT = DoctorReport(
    source="scan.h5",
    samples=6000,
    batch={"x": {"dtype": "uint8", "shape": (3, 16, 12)}},
    batch_size=64,
    reading="decoded",
    cores=2,
    trials=[trial("chunk", 2, 12_345.6, mixing=0.98, y=0.91), trial("none", 2, 15_000.0, mixing=0.0)],
    chosen=0,
    warm=Reading(12_345.6, 210.0, 380.0, 0.6),
    cold=Reading(9_000.0, 100.0, 380.0, 0.4),
    why_not_cold="",
    files=1,
    bytes=1_700_000,
    free_memory=8 * 10**9,
    risks=["this process may use one core only"],
    options={"workers": 2},
    override="loader.workers=2",
    python="",
    command="python train.py data=hdf5",
    pack="",
    why_pack="",
    notes=[],
)


def printed(report):
    stream = io.StringIO()
    print_report(report, console(stream))
    return stream.getvalue()


def test_a_report_in_words():
    text = printed(REPORT)
    assert "12,300 samples/s, at most 193 steps/s of 64: a step shorter than 5.18 ms waits for data" in text
    assert "1 file, 1.7 MB, fits into the 8.0 GB" in text
    assert "the first at 9,000 samples/s from the disk" in text
    assert "from the disk: each reader 100 MB/s while reading, 380 MB/s while decoding, which takes 40 %" in text
    assert "0.98 (y 0.91)" in text
    assert "python train.py data=hdf5 loader.workers=2" in text
    assert "Pack" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_word_of_the_settings_breaks_in_a_narrow_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    settings = printed(REPORT).partition("Prediction")[0]
    assert max(map(len, settings.splitlines())) <= width
    words = [word.strip(",;:") for word in settings.split()]
    assert {"12,300", "15,000", "samples/s", "193", "(process)", "0.98", "(y", "0.91)", "10.0", "use"} <= {*words}


def test_fewer_samples_than_a_batch_are_a_step():
    report = dataclasses.replace(REPORT, samples=10)
    assert report.steps_per_s == 1_234.56
    assert "1,230 steps/s of 10: a step shorter than 0.81 ms" in printed(report)


def test_readers_that_keep_all_chunks_have_no_speed():
    text = printed(dataclasses.replace(REPORT, warm=Reading(12_345.6, 0.0, 0.0, 0.0)))
    assert "from the page cache: nothing is read any more" in text
    assert " 0 MB/s" not in text


def test_what_to_use_can_be_pasted():
    """Options of a configuration go to another program; a folder has no command line."""
    text = printed(dataclasses.replace(REPORT, command=""))
    assert "on the command line of your program:\n    loader.workers=2\n" in text
    text = printed(dataclasses.replace(REPORT, command="", python="source = ManifestSource.from_folder('a')"))
    assert text.endswith("    source = ManifestSource.from_folder('a')\n")
    assert "the options as they are" in printed(dataclasses.replace(REPORT, command="", override=""))


def test_files_that_do_not_fit_are_read_from_the_disk():
    report = dataclasses.replace(REPORT, bytes=9 * 10**9)
    assert report.samples_per_s == 9_000.0
    text = printed(report)
    assert "does not fit into the 8.0 GB" in text
    assert "from memory it would be 12,300 samples/s" in text
    assert printed(dataclasses.replace(report, cold=None, why_not_cold="left out")).count("left out") == 1


def test_why_and_how_to_pack():
    text = printed(dataclasses.replace(REPORT, why_pack="it is slow", pack="python -m lit_async_data pack scan.h5"))
    assert "it is slow" in text
    assert "    python -m lit_async_data pack scan.h5" in text


def test_values_for_programs():
    values = REPORT.as_dict()
    assert (values["version"], values["fits"], values["samples_per_s"]) == (1, True, 12_345.6)
    assert values["trials"][0]["labels"] == {"y": 0.91}


def test_the_document_names_every_key_of_the_json():
    page = (Path(__file__).parents[3] / "docs/tools/doctor.md").read_text()
    for name in [*REPORT.as_dict(), *dataclasses.asdict(REPORT.trials[0]), *dataclasses.asdict(REPORT.warm)]:
        assert f"`{name}`" in page, name
