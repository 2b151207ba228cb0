"""What trainer and engines say to one another about a refit, beside the weights (`csrc/refit/`)."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_BUCKET_BYTES = 8_000_000
"""Of `policy.refit_buffer_size_gb: null`. A bucket that stays in the cache is copied and digested faster (tests/benchmarks/bench_refit.py)."""


class RefitMeeting(NamedTuple):
    """Where rank 0 of the trainers (rank 0 here) and the engines (1, 2, ...) meet.

    Attributes:
        host, port: of the TCP store that the run's own process holds.
        size: of all who meet.
        deadline: seconds that one message may take.
        bucket_bytes: weights of one message.
        delta: only what has changed since the last refit is sent.
    """

    host: str
    port: int
    size: int
    deadline: float
    bucket_bytes: int
    delta: bool = False


class Moved(NamedTuple):
    """What a refit came to for one process: bytes of weights, seconds, the digest of the weights that it has afterwards, and the
    bytes of the messages that carried them."""

    bytes: int
    seconds: float
    digest: str
    sent: int = 0
