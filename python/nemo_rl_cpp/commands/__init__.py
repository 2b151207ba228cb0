"""The subcommands of `nemo-rl-cpp`, mostly one module each. Their functions return the exit status."""
