"""Words in the names of datasets, columns and files, and what they say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

INPUTS = "x|data|images?|imgs?|volumes?|scans?|frames|inputs|signal"
LABELS = (
    "y|labels?|targets?|class(es)?|category|species|diagnosis|gt|digits?|outcome|answer|type|truth|true|tags|actions?"
)
MASKS = "masks?|seg|segmentations?|annotations?|groundtruth"
STARTS = "onsets?|starts?|begins?|triggers?|anchors?"
RECORDINGS = "signals?|eeg|ecg|emg|recordings?|series|traces?|waveform"
GROUPS = "patients?|subjects?|site|donor|group|batch|person|run|session"
# What a column with a value for each sample is about, if it is neither label nor group.
OTHERS = (
    "ids?|index|idx|indices|times?|timestamps?|date|rows?|offsets?|fold|split|seed|weights?|lat|lon|latitude|longitude"
    "|uid|names?|valid|flag|channels?|stage|set|subset|phase|partition|usage"
)
# Of training, and of the stages that are sources of their own.
TRAINING, HELD_OUT = "train|training|tr", "val|valid|validation|dev|test|testing|te"


def has_word(name: str, pattern: str) -> bool:
    """Whether a word of the last component of a name is one of a pattern: ``testImages_1`` has test, images and 1."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name.rpartition("/")[2])
    return any(re.fullmatch(pattern, word.lower()) for word in found)


def anywhere(name: str, pattern: str) -> bool:
    """Whether any component of a name has a word of a pattern."""
    return any(has_word(each, pattern) for each in name.split("/"))


def of_training(names: Iterable[str]) -> list[str]:
    """The names; without those of other stages, if some are of training. What all begin with does not count."""
    every = list(names)
    begin = len(common_start(every).rpartition("/")[0])
    training = [name for name in every if anywhere(name[begin:], TRAINING)]
    return [name for name in every if name in training or not (training and anywhere(name[begin:], HELD_OUT))]


def common_start(texts: Sequence[str]) -> str:
    pairs = zip(min(texts, default=""), max(texts, default=""), strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
