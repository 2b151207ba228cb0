"""What every run needs around its training loop: timer, logger, checkpoints, terminal line, report."""
