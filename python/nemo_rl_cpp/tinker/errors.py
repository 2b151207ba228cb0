"""Errors caused by a client."""


class UserError(ValueError):
    """Raised for a request that the client has to change; any other exception is the server's fault."""
