"""Does the training loop wait, and what does loading take from it?"""
