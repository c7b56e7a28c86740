"""Layouts of programs that write HDF5 files, after their documentation, and what `inspect` says of each."""

import h5py
import numpy as np

from support.files import examples

ROWS, STACK = np.arange(600, dtype="f4").reshape(30, 20), np.arange(3840, dtype="u2").reshape(12, 16, 20)
TEXT = h5py.string_dtype()


def written(datasets, **attributes):
    """A function that writes datasets, and attributes: of the root, or of a group whose name they begin with."""

    def write(path):
        examples.datasets(path, datasets)
        with h5py.File(path, "a") as file:
            for name, value in attributes.items():
                group, _, attribute = name.rpartition("__")
                file[f"/{group.replace('__', '/')}"].attrs[attribute] = value

    return write


def texts(letter, count, distinct):
    return np.array([f"{letter}{n % distinct}" for n in range(count)], TEXT)


LOOM = {"matrix": ROWS, "row_attrs/Gene": texts("g", 30, 30), "col_attrs/CellID": texts("c", 20, 20)}
CELLS = {"X": ROWS, "obs/class": np.arange(30) % 3, "var/class": np.arange(20), "varm/PCs": np.zeros((20, 900))}
NEXUS = {"entry__NX_class": "NXentry", "entry__data__NX_class": "NXdata", "entry__data__signal": "counts"}
SCAN = {"entry/data/counts": STACK, "entry/data/y": np.arange(16.0), "entry/data/errors": STACK.astype("f8")}
VIEWER = {f"t0000{t}/s00/{level}/cells": STACK[:, :: level + 1] for t in (0, 1) for level in (0, 1)}
VIEWER |= {f"s0{n}/{name}": np.ones((2, 3)) for n in (0, 1) for name in ("resolutions", "subdivisions")}
SLEAP = {"tracks": np.zeros((2, 2, 13, 90)), "node_names": texts("n", 13, 13), "edge_inds": np.zeros((12, 2), "i4")}
KSPACE = {"kspace": np.zeros((5, 4, 16, 12), "c8"), "reconstruction_rss": np.zeros((5, 8, 8), "f4")}
KSPACE["ismrmrd_header"] = "<a/>"
SIMULATION = {name: np.zeros((6, 5, 8, 8), "f4") for name in ("Vx", "Vy")} | {"x-coordinate": np.arange(8.0)}
TRIAL = {"data": np.zeros((9, 8, 8, 2), "f4"), "grid/x": np.arange(8.0)}
TRIALS = {f"{n:04}/{name}": values for n in range(3) for name, values in TRIAL.items()}
STEPS = {"observations": np.zeros((40, 11), "f4"), "actions": np.zeros((40, 3), "f4")}
STEPS["terminals"] = np.arange(40) % 20 > 18
CLUSTERS, MASKED = {"col_attrs/Cluster": np.arange(20) % 3}, {"mask": np.zeros((6, 9, 8), "u1")}
SEGMENTED = {"exported_data": np.zeros((7, 30, 28, 2), "f4"), "cells/labels": np.zeros((7, 30, 28), "u4")}
# As `MEANT` of the tests of `inspect`.
LAYOUTS = [
    (LOOM | CLUSTERS, '{"x": "matrix", "y": "col_attrs/Cluster"}, layout={"x": "CN"}', "", "Gene"),
    (LOOM | {"col_attrs/Type": texts("t", 20, 3)}, '"y": "col_attrs/Type"}, layout={"x": "CN"}', "t0, t1", "CellID"),
    ({**LOOM, "matrix": ROWS[:20]}, '{"x": "matrix"}, layout={"x": "CN"}', "", "Gene"),
    (CELLS, '{"x": "X", "y": "obs/class"}', "", "var"),
    ({name: CELLS[name] for name in ("obs/class", "var/class", "varm/PCs")}, None, "no dataset looks", ""),
    (written(SCAN, **NEXUS, entry__data__axes=["time", "y", "."]), '{"x": "entry/data/counts"}', "", "errors"),
    (written(SCAN, **NEXUS, entry__data__axes=["y", "time", "."]), None, "no dataset looks", ""),
    (written({"d/d/kernel:0": ROWS, "d/d/x": ROWS}, d__weight_names=["d/kernel:0"]), None, "no dat", ""),
    ({"conv1.weight": np.zeros((64, 3, 7, 7)), "conv1.bias": np.zeros((64, 1, 2))}, None, "no dataset looks", ""),
    (VIEWER, 'group="t*"', "", "resolutions"),
    (SLEAP, '{"x": "tracks"}, layout={"x": "CHWN"}', "", "edge"),
    (KSPACE, '{"x": "kspace", "y": "reconstruction_rss"}', "", "header"),
    (SIMULATION, '{"x": "V', "", "coordinate"),
    (TRIALS, '{"x": "data"}, group="*", layout={"x": "NHWC"}', "", "grid"),
    (STEPS, '{"x": "observations", "y": "actions"}, episodes={"flags": "terminals"})', "episode", '"y": "t'),
    ({"image": np.zeros((6, 3, 9, 8)), **MASKED}, '{"x": "image", "y": "mask"}, layout={"x": "NCHW"', "", ""),
    (SEGMENTED, '"y": "cells/labels"', "", ""),
]
NAMES = ("x", "y", "label", "mask", "weights", "matrix", "obs/class", "var/a", "g0/x", "g1/x", "g1/y", "img/1", "img/2")
SHAPES = ((), (6,), (1, 6), (6, 1), (6, 4), (5, 6), (6, 6), (6, 5, 4), (6, 5, 4, 3), (6, 3, 8, 8), (1,), (0, 4))
VALUES = SHAPES, ("u1", "f4", "i8", "?", "S3", ">i2", "c8", "f2", "u8")
