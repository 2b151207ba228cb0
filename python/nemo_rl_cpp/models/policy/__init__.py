"""The policy: the model that is trained and that generates."""
