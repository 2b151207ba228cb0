"""The `env` section: one entry per environment, under the name that `data.*.env_name` uses."""

from typing import Any, Literal, Required, TypedDict

from .base import Int, Positive, Real, Section, StopStrings, key, no_effect


class VerifierPoolConfig(Section):
    """Verifiers that run in separate processes and are killed at a deadline."""

    num_workers: Positive = key(1, "verifier processes")
    verifier_deadline_s: Real = key(
        5.0, "seconds for one response, after which its verifier is killed and it scores 0", gt=0
    )
    verifier_memory_mb: Positive | None = key(2048, "memory of a verifier process in MB; null: no limit")
    max_answer_chars: Positive = key(1_000_000, "characters of the longest response that is read; longer ones score 0")


class MathEnvConfig(VerifierPoolConfig):
    """Compares the answer with the ground truth: 1 or 0."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] | None = key(
        "hf_math_verify", "how answers are compared"
    )
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] | None = key(
        "math", "kind of answer"
    )
    stop_strings: StopStrings | None = key(None, "texts that end a response of the next turn")


class MultiRewardEnvConfig(Section):
    """Three reward components: correctness, an integer as answer, and the format (for adv_estimator gdpo)."""

    math_verify_impl: Literal["hf_math_verify"] | None = no_effect(
        "hf_math_verify", "answers are compared letter for letter"
    )
    verifier_type: Literal["math"] | None = no_effect("math")
    max_answer_chars: Positive = key(1_000_000, "characters of the longest response that is read; longer ones score 0")


class ReasoningGymEnvConfig(VerifierPoolConfig):
    """Scores with the task's own function in the reasoning_gym package."""

    answer_format: Literal["auto", "tag", "line"] = key("auto", "where the answer stands in a response")


class PlainEnvConfig(Section):
    """An environment without settings."""


class CodeEnvConfig(Section):
    """Runs the program in a response against tests, in a sandbox without network or files."""

    num_workers: Positive = key(1, "programs that run at the same time")
    reward: Literal["all", "fraction"] = key("all", "all: 1 when every test passes; fraction: the share that passes")
    time_limit_s: Real = key(5.0, "seconds for one run of a program", gt=0)
    total_time_limit_s: Real = key(20.0, "seconds for all tests of a response", gt=0)
    memory_mb: Int = key(512, "memory of a program, its folder included, in MB", ge=64)
    max_processes: Positive = key(8, "threads of a program at the same time; it is one process")
    max_output_kb: Positive = key(1024, "what a program may print, in kB")
    folder_mb: Positive = key(32, "size of the program's folder in MB")
    max_answer_chars: Positive = key(1_000_000, "characters of the longest response that is read; longer ones score 0")


class GuessNumberEnvConfig(Section):
    """A multi-turn game: guess a number from the hints "higher" and "lower"."""

    max_guesses: Positive = key(3, "turns of a game; grpo.max_rollout_turns must allow them")
    higher: str = key(" higher\n", "what the environment says after a guess that is too low")
    lower: str = key(" lower\n", "what it says after one that is too high")
    stop_strings: StopStrings | None = key(None, "texts that end the next guess; null: those of the generation")


class AgentEnvConfig(Section):
    """Rollouts by a user's function that calls the policy over HTTP; needs policy.generation.expose_http_server."""

    function: str = key(..., "dotted name of the function: it takes an AgentTask and returns the reward")
    max_concurrency: Positive = key(64, "rollouts under way at the same time")
    timeout_s: Real = key(600.0, "seconds for one rollout; one that is not over scores 0 and is not trained", gt=0)


class VerifiersEnvConfig(Section):
    """Rollouts by agents of the package verifiers; needs policy.generation.expose_http_server."""

    env: dict[str, Any] = key({}, "verifiers' own section env without its taskset: id, roles, timeouts")
    harness: dict[str, Any] | None = key(None, "the agents' program, a mapping with id; null: that of the task set")
    runtime: dict[str, Any] = key(
        {"type": "subprocess"}, "where the program runs; its type subprocess: on this machine"
    )
    renderer: dict[str, Any] | None = key(
        None, "how conversations become tokens, a mapping with name; null: by the model's name"
    )
    max_turns: Positive | None = key(None, "answers of the policy in a rollout; null: no limit but the program's")
    max_tokens: Positive | None = key(None, "tokens of one answer; null: policy.generation.max_new_tokens")
    max_concurrency: Positive = key(64, "rollouts under way at the same time")
    timeout_s: Real = key(600.0, "seconds for one rollout; one that is not over scores 0 and is not trained", gt=0)


class EnvironmentEntry(TypedDict, total=False):
    """The definition of a name in `env`: the dotted name of its class and, if its keys are known, its section."""

    actor_class_fqn: Required[str]
    section: type[Section]


def _ours(target: str, section: type[Section] | None = None) -> EnvironmentEntry:
    entry: EnvironmentEntry = {"actor_class_fqn": f"nemo_rl_cpp.environments.{target}"}
    return entry if section is None else {**entry, "section": section}


ENV_REGISTRY: dict[str, EnvironmentEntry] = {
    "math": _ours("math_environment.MathEnvironment", MathEnvConfig),
    "math_default": _ours("math_environment.MathEnvironment", MathEnvConfig),
    "math_multi_reward": _ours("math_environment.MathMultiRewardEnvironment", MultiRewardEnvConfig),
    "arithmetic": _ours("arithmetic_environment.ArithmeticEnvironment", PlainEnvConfig),
    "reverse_digits": _ours("arithmetic_environment.ReverseDigitsEnvironment", PlainEnvConfig),
    "reasoning_gym": _ours("reasoning_gym_environment.ReasoningGymEnvironment", ReasoningGymEnvConfig),
    "code": _ours("code_environment.CodeEnvironment", CodeEnvConfig),
    "guess_number": _ours("guess_number.GuessNumberEnv", GuessNumberEnvConfig),
    "agent": _ours("agents.AgentFunctionEnvironment", AgentEnvConfig),
    "verifiers": _ours("verifiers_environment.VerifiersEnvironment", VerifiersEnvConfig),
    "reward_functions": _ours("reward_environment.RewardFunctionEnvironment"),
}
"""The table of environments. `register_env` adds one at run time; one without a section takes any keys."""


def environment_sections() -> dict[str, type[Section]]:
    """Return the sections of the environments whose keys are known."""
    return {name: entry["section"] for name, entry in ENV_REGISTRY.items() if "section" in entry}


EnvConfigs = dict[str, Any]
