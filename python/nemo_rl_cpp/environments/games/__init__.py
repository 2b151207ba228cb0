"""Games: environments of several turns."""
