"""The `env` section: one entry per environment, under the name that `data.*.env_name` uses."""

from typing import Any, Literal, Required, TypedDict

from pydantic import ConfigDict

from .base import Int, Positive, Real, Section, StopStrings, key, no_effect, only


class VerifierPoolConfig(Section):
    """Settings of verifiers that run in separate processes and are killed when their time limit has passed."""

    num_workers: Positive = key(1, "Number of verifier processes.")
    verifier_deadline_s: Real = key(5.0, gt=0)
    """Time limit in seconds for verifying one response. Then the verifier is killed, and the response gets reward 0."""
    verifier_memory_mb: Positive | None = key(2048, "Memory limit of a verifier process in MB. null: no limit.")
    max_answer_chars: Positive = 1_000_000
    """Maximum length in characters of a response that is verified. Longer responses get reward 0."""


class MathEnvConfig(VerifierPoolConfig):
    """Settings of the math environment: the reward is 1 if the answer equals the ground truth, otherwise 0."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] | None = "hf_math_verify"
    """Implementation that compares the answer with the ground truth: the package math_verify, or DAPO's rules."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] | None = "math"
    """Type of the answers: an expression, or the letter of a multiple-choice question (English or multilingual)."""
    stop_strings: StopStrings | None = None
    """Stop strings of a response in the next turn, in addition to those of the generation section. null: no others."""


class MultiRewardEnvConfig(Section):
    """Settings of the math environment with three reward components for adv_estimator gdpo: correct answer, integer
    answer, and format."""

    math_verify_impl: Literal["hf_math_verify"] | None = no_effect("hf_math_verify", "answers are compared by letter")
    verifier_type: Literal["math"] | None = no_effect("math")
    max_answer_chars: Positive = 1_000_000
    """Maximum length in characters of a response that is verified. Longer responses get reward 0."""


class ReasoningGymEnvConfig(VerifierPoolConfig):
    """Settings of the environment for tasks of the package reasoning_gym, which also scores the answers."""

    answer_format: Literal["auto", "tag", "line"] = "auto"
    """Where the answer is in a response. tag: in the last `<answer>...</answer>`. line: in the first nonempty line.
    auto: in the tag if there is one, otherwise in the line."""


class PlainEnvConfig(Section):
    """An environment without settings, so its section has no keys."""


class CodeEnvConfig(Section):
    """Settings of the code environment, which runs the program in a response against tests, in a sandbox without
    network and without access to files."""

    num_workers: Positive = key(1, "Number of programs that run at the same time.")
    reward: Literal["all", "fraction"] = "all"
    """all: reward 1 if every test passes, otherwise 0. fraction: the fraction of tests that pass."""
    time_limit_s: Real = key(5.0, "Time limit in seconds for one run of a program.", gt=0)
    total_time_limit_s: Real = key(20.0, "Time limit in seconds for all tests of a response together.", gt=0)
    memory_mb: Int = key(512, "Memory limit of a program in MB, including its folder, which is in memory.", ge=64)
    max_processes: Positive = key(8, "Maximum number of threads of a program. A program cannot start a second process.")
    max_output_kb: Positive = key(1024, "Maximum output of a program in kB. A program that prints more is killed.")
    folder_mb: Positive = key(32, "Size of the program's folder in MB.")
    max_answer_chars: Positive = 1_000_000
    """Maximum length in characters of a response that is verified. Longer responses get reward 0."""


class GuessNumberEnvConfig(Section):
    """Settings of a multi-turn game: the policy guesses a number from the hints "higher" and "lower"."""

    max_guesses: Positive = 3
    """Maximum number of guesses in a game. grpo.max_rollout_turns must be at least as large."""
    higher: str = key(" higher\n", "Reply of the environment to a guess that is too low.")
    lower: str = key(" lower\n", "Reply of the environment to a guess that is too high.")
    stop_strings: StopStrings | None = None
    """Stop strings of the next guess, in addition to those of the generation section. null: no others."""


class RolloutsConfig(Section):
    """The base class of the sections of environments whose agents make the rollouts."""

    max_concurrency: Positive = key(64, "Maximum number of rollouts that run at the same time.")
    timeout_s: Real = key(600.0, gt=0)
    """Time limit in seconds for one rollout. A rollout that takes longer gets reward 0 and is not trained on."""


class AgentEnvConfig(RolloutsConfig):
    """Settings of rollouts by your own function, which calls the policy over HTTP. They need
    policy.generation.expose_http_server."""

    function: str = key(..., "Dotted name of your function, which takes an AgentTask and returns the reward.")


class VerifiersEnvConfig(RolloutsConfig):
    """Settings of rollouts by agents of the package verifiers. They need policy.generation.expose_http_server."""

    env: dict[str, Any] = key({}, "The section env of verifiers without its task set: id, roles, timeouts.")
    harness: dict[str, Any] | None = None
    """Program of the agents, a mapping with id. null: the one that the task set names."""
    runtime: dict[str, Any] = key({"type": "subprocess"}, "Where the program runs. type subprocess: on this machine.")
    renderer: dict[str, Any] | None = None
    """How a conversation is converted to tokens, a mapping with name. null: chosen by the model's name."""
    max_turns: Positive | None = None
    """Maximum number of responses of the policy in a rollout. null: no limit other than the program's."""
    max_tokens: Positive | None = None
    """Maximum number of tokens in a response. null: policy.generation.max_new_tokens."""


TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")


class NemoGymEnvConfig(RolloutsConfig):
    """Settings of rollouts by the agents and resource servers of the package NeMo Gym, which the run starts. They need
    policy.generation.expose_http_server. Keys that are not listed are passed to NeMo Gym."""

    model_config = ConfigDict(extra="allow")

    python: str | None = None
    """Python interpreter of an environment in which nemo-gym is installed. null: the run's interpreter."""
    config_paths: list[str] = key([], "Configuration files of the servers, as NeMo Gym finds them.")
    should_mask_flagged_samples: bool = True
    """Do not train on rollouts that a server flags with mask_sample; their rewards still count in the baseline. Written
    as env.should_mask_flagged_samples."""
    effort_levels: dict[str, Any] | None = only(None, why="grpo.length_penalty rewards short responses in any task")
    port_range_low: Positive = key(5000, "Lowest port of NeMo Gym's servers.")
    port_range_high: Positive = key(5999, "Highest port of NeMo Gym's servers.")
    timeout_s: Real = key(3600.0, gt=0)
    invalid_tool_call_patterns: list[str] | None = only(
        None, list(TOOL_CALL_TAGS), why="grpo.invalid_tool_call_advantage looks for these four tags"
    )
    thinking_tags: list[str] | None = only(["<think>", "</think>"], why="reward_penalties reads these tags")
    rollout_max_attempts_to_avoid_lp_nan: Int = no_effect(1, "a log-probability that is not finite ends the run")


class EnvironmentEntry(TypedDict, total=False):
    """The definition of an environment: the dotted name of its class and, if its keys are checked, their section."""

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
    "nemo_gym": _ours("nemo_gym_environment.NemoGymEnvironment", NemoGymEnvConfig),
    "reward_functions": _ours("reward_environment.RewardFunctionEnvironment"),
}
"""The table of environments. `register_env` adds one at run time. An environment without a section accepts any keys."""


def environment_sections() -> dict[str, type[Section]]:
    """Return {name of an environment: class of its section} for the environments whose keys are checked."""
    return {name: entry["section"] for name, entry in ENV_REGISTRY.items() if "section" in entry}


EnvConfigs = dict[str, Any]
