"""`folds`: a source cut into folds, each of which validates once what the others train."""

from __future__ import annotations

import logging
import numbers
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, few
from lit_async_data.sources.composed.groups import UNUSED
from lit_async_data.sources.composed.split import Drawn, Split, draw, parted, warn_of_untrained
from lit_async_data.sources.contract.checks import check_source
from lit_async_data.sources.contract.source import Source

log = logging.getLogger(__name__)


def folds(
    source: Source,
    k: int | None = None,
    *,
    groups: str | npt.ArrayLike | None = None,
    by: str | npt.ArrayLike | None = None,
    balance: str | npt.ArrayLike | None = None,
    seed: int = 0,
) -> list[Split]:
    """Cut a source into k folds for cross-validation.

    The fold of a sample depends on its file and row, or on its group, and on the seed, not on the order of the source.
    Folds differ by one sample; by the largest group at most if there are groups. Samples that are added move few of the
    others; groups that are added give other folds.

    Args:
        source: The source to cut: a side of a `split`, to keep a test set apart.
        k: Number of folds, from 2 on. None: 5, or those of ``by``.
        groups: Which samples stay together, as for `split`. With ``"time"``, a fold is a block of each file or group.
        by: The column, dataset or batch key with the fold of each sample, instead of k; see `split`. There is a fold
            for each value, in the order of numbers. A warning counts samples whose text or cell is empty: they are in
            none.
        balance: The classes that all folds hold alike, as for `split`; groups then make folds less equal in size.
        seed: Another seed gives other folds; 0 to 2**63 − 1.

    Returns:
        One split for each fold, whose ``"val"`` is the fold and ``"train"`` the others.

    Raises:
        ConfigError: As `split`; there are fewer samples or groups than folds; a group is in two stored folds.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.zeros((100, 3)), "dog": np.arange(100) // 5})
        >>> [(len(fold["train"]), len(fold["val"])) for fold in folds(source, 4, groups="dog")]
        [(75, 25), (75, 25), (75, 25), (75, 25)]
    """
    if by is not None and k is not None:
        raise ConfigError(f"{k!r}, but by says the folds; leave k out", "k")
    drawn = draw_folds(source, 5 if k is None else k, "k", groups=groups, by=by, balance=balance, seed=seed)
    return [fold_of(source, drawn, name) for name in drawn.names]


def draw_folds(source: Source, k: Any, option: str, *, groups: Any, by: Any, balance: Any, seed: int = 0) -> Drawn:
    check_source("source", source)
    if by is not None:
        drawn = draw(source, None, groups, by, balance, seed=seed)
        if len(drawn.names) < 2:
            raise ConfigError(f"all samples are in fold {drawn.names[0]}, which leaves none to train", "by")
        warn_of_untrained(source, drawn)
        return drawn
    if not isinstance(k, numbers.Integral) or not 2 <= int(k) <= len(source):
        raise ConfigError(f"{k!r} is not a whole number from 2 to {len(source)}, the number of samples", option)
    k = int(k)
    drawn = draw(source, {str(fold): 1 / k for fold in range(k)}, groups, None, balance, seed=seed, k=k)
    if drawn.labels is not None:
        samples, classes, _, names, _ = drawn.labels
        rare = names[np.bincount(np.unique(classes * k + drawn.sides[samples]) // k) < k].tolist()
        if rare:
            log.warning("%s: not each of %d folds has samples of the classes %s", source.name, k, few(rare))
    return drawn._replace(how=f"{drawn.how}, {k} folds")


def fold_of(source: Source, drawn: Drawn, fold: int | str) -> Split:
    """The split whose validation is a fold, by its number or stored value."""
    if str(fold) not in drawn.names:
        raise ConfigError(f"{fold!r} is not one of the folds {few(drawn.names)}", "fold")
    sides = np.array([0] * len(drawn.names) + [UNUSED])  # whose last entry is that of UNUSED, too
    sides[drawn.names.index(str(fold))] = 1
    how = f"{drawn.how}, val is fold {fold}"
    return parted(source, ["train", "val"], drawn._replace(sides=sides[drawn.sides], how=how))
