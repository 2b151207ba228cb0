"""Tinker's API over one base model: `nemo-rl-cpp serve --tinker` (docs/tinker.md)."""
