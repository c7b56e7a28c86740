"""The command line of `train.py` in tests: options that make it quiet, and what Lightning says meanwhile."""

from pathlib import Path

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
QUIET = [
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
    "trainer.enable_progress_bar=false",
    "trainer.accelerator=cpu",
    "logger=none",
]
LIGHTNING_SAYS = [
    # Two cores and few batches are what a test has.
    "ignore:The number of training batches:UserWarning",
    "ignore:.*does not have many workers:UserWarning",
    # After fit, its own checkpoint callback finds the folder that it wrote to.
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    # A resumed run has a new folder.
    "ignore:The dirpath has changed from:UserWarning",
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",
]
