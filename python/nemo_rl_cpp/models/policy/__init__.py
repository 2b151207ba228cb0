"""The policy: the language model that generates responses and is trained."""
