"""Mistakes of a client."""


class UserError(ValueError):
    """A request that the client has to change; any other exception is the server's fault."""
