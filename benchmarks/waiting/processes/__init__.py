"""What `workers.py` measures: batches made by Python code in other processes."""
