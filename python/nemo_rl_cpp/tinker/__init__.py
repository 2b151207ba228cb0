"""Tinker's API for one base model: `nemo-rl-cpp serve --tinker` (docs/tinker.md)."""
