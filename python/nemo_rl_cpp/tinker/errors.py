"""Errors that a client causes."""


class UserError(ValueError):
    """Raised for a request that the client must change. Any other exception is the server's fault."""
