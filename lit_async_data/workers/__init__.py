"""Who fills slots. `thread.ThreadWorker` is one of them; the pipeline asks no more of it than its public names."""
