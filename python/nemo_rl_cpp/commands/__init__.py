"""The subcommands of `nemo-rl-cpp`: one module each, with `main(arguments)`, which returns the exit status."""
