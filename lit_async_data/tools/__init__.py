"""What users run on a command line. Nothing that reads batches imports it."""
