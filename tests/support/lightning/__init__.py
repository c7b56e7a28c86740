"""Programs with a Trainer, and `train.py`: the pieces of runs, and what they write."""
