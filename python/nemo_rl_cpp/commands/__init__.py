"""The subcommands of `nemo-rl-cpp`: one module a command, each with `main(arguments)`, which returns the exit status."""
