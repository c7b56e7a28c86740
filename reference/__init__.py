"""What `train.py` needs besides the library; it is no part of the wheel."""
