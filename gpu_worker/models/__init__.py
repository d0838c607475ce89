"""Model architectures: one file and one line in ``registry`` for each."""
