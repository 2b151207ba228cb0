"""The `env` section: one entry an environment, by the name that `data.*.env_name` uses."""

from __future__ import annotations

from typing import Any, Literal

from .base import Positive, Real, Section, key


class MathEnvConfig(Section):
    """The math environment: scores an answer 1 or 0 in worker processes."""

    num_workers: Positive = key(8, "verifier processes")
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] | None = key("hf_math_verify", "how answers are compared")
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] | None = key("math", "kind of answer")
    stop_strings: list[str] | None = key(None, "texts that end a response")
    timeout: Real | None = key(None, "seconds until a verifier is killed and the answer scores 0; null: the environment's default", gt=0)


# Environments that this package brings with a fixed set of keys; others take any keys.
KNOWN_ENVIRONMENTS: dict[str, type[Section]] = {"math": MathEnvConfig}

EnvConfigs = dict[str, Any]
