"""Row states on GPUs: the observing kernel in Triton, its operator, when it is used. Importing this loads nothing."""
