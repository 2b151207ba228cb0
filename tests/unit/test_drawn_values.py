"""Hundreds of drawn values of every type for every argument of the Python entries: each arrives as it was given, or is
refused by a ValueError of one sentence. Training and models are stubs."""

import inspect
import math
import random
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from nemo_rl_cpp import argument_checks, generate
from nemo_rl_cpp.api import training
from nemo_rl_cpp.config import ConfigError, EvalMasterConfig, GRPOMasterConfig, PPOMasterConfig
from nemo_rl_cpp.config.access import plain
from nemo_rl_cpp.config.base import Section, section_type
from nemo_rl_cpp.config.env import environment_sections
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.hub import sources

pytestmark = pytest.mark.slow
pandas = pytest.importorskip("pandas")
NUM_VALUES = 300
NUM_CALLS = 100  # of train_grpo, each of which reads a configuration
RAW = (
    "incompatible function arguments",
    "Traceback",
    "validation error",
    "pydantic",
    "TypeError",
    "KeyError",
    "object has no attribute",
    "ambiguous",
)


class Colour(Enum):
    red = "red"


class Thing:
    """An object of the caller's that says nothing about itself."""

    def __repr__(self):
        return "a thing\nof two lines " + "x" * 1000


def reward(completions):
    return [0.0] * len(completions)


def draw(rng):
    """One value; containers hold others."""
    whole = lambda: rng.choice(
        [0, 1, -1, 2, 3, 7, 8, 100, -5, 2**31, 2**32, 2**63, -(2**64), 10**40, rng.randint(-1000, 1000)]
    )  # noqa: E731
    real = lambda: rng.choice(
        [0.0, -0.0, 0.5, 1.0, 1e-40, 1e-5, 1e38, 1e39, 1e300, math.nan, math.inf, -math.inf, 3.0, rng.uniform(-2, 2)]
    )  # noqa: E731
    text = lambda: rng.choice(  # noqa: E731
        ["", " ", "a", "\n", "\\n", "é", "日本", "🙂", "${x}", "${", "???", "null", "true", "1", "1e-5", "[1]", "{a: 1}", "a=b", "###", "\0", "\ud800", "x" * 3000,
         "float32", "bfloat16", "native", "no/such/folder", "x.jsonl", "math.pi", "~", "..", "%s %d {}", "'", '"', "".join(chr(rng.randint(1, 0x2FFF)) for _ in range(5))]
    )  # fmt: skip
    scalars = [whole, real, text, lambda: None, lambda: rng.random() < 0.5, lambda: text().encode("utf-8", "replace")]
    odd = [
        Thing, lambda: Colour.red, lambda: Decimal("0.5"), lambda: Fraction(1, 3), lambda: 1j, lambda: reward, lambda: Thing, lambda: Path("a") / "b",
        lambda: np.int64(rng.randint(-3, 9)), lambda: np.float32(rng.choice([0.5, 1e-5])), lambda: np.bool_(True), lambda: np.str_("a"), lambda: np.array([1, 2]),
        lambda: np.array(["a", "b"]), lambda: np.zeros((2, 2)), lambda: torch.tensor(3), lambda: torch.ones(2), lambda: range(3), lambda: iter(["a"]),
        lambda: pandas.DataFrame({"prompt": ["a", "b"]}), lambda: pandas.Series([1, 2]), lambda: slice(1), lambda: ..., lambda: bytearray(b"a"),
    ]  # fmt: skip
    some = lambda: [rng.choice(scalars)() for _ in range(rng.randint(0, 3))]  # noqa: E731
    containers = [
        some, lambda: tuple(some()), lambda: {text(): rng.choice(scalars)() for _ in range(rng.randint(0, 3))}, lambda: {whole(): text()}, lambda: {"a", "b"},
        lambda: [text() for _ in range(2)], lambda: [some()], lambda: [{"prompt": text()}], lambda: {"prompt": [text(), text()]}, lambda: (text(), text()),
        lambda: [{"role": text(), "content": text()}], lambda: {"prompt": text(), text(): whole()}, lambda: {"enabled": rng.random() < 0.5}, lambda: [reward, reward],
        lambda: deep(100),
    ]  # fmt: skip
    return rng.choice(rng.choice([scalars, scalars, odd, containers]))()


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def drawn(seed, count=NUM_VALUES):
    rng = random.Random(seed)
    return [draw(rng) for _ in range(count)]


def refused(error):
    """Asserts that a refusal is sentences, one a mistake."""
    assert isinstance(error, ValueError), repr(error)
    text = str(error)
    lines = text.split("\n")
    assert len(lines) == (len(error.problems) if isinstance(error, ConfigError) else 1), text
    assert text and not any(words in text for words in RAW) and max(map(len, lines)) < 1500, text


def same(held, given):
    """Whether what is held is the given value, as the types of a configuration write it."""
    given = plain(given)
    if isinstance(held, Section):
        return isinstance(given, (dict, Section))
    if isinstance(held, (list, tuple)):
        if isinstance(given, (str, int, dict)):
            return list(held) == [given] or (len(held) == 1 and isinstance(held[0], Section))
        return len(held) == len(given) and all(isinstance(h, Section) or same(h, g) for h, g in zip(held, given))
    if isinstance(held, dict):
        return held.keys() == given.keys() and all(same(held[key], given[key]) for key in held)
    if held is given or (isinstance(held, float) and isinstance(given, (int, Fraction)) and held == float(given)):
        return True
    if type(held) in (int, float, bool, str, type(None)):
        return (
            held == given
            and (type(held) is type(given) or {type(held), type(given)} <= {int, float, Decimal})
            or (held != held and given != given)
        )
    return False


VALUES = drawn(500)
SETTINGS = {
    "model": "policy.model_name", "num_steps": "grpo.max_num_steps", "num_prompts_per_step": "grpo.num_prompts_per_step",
    "num_generations": "grpo.num_generations_per_prompt", "max_new_tokens": "policy.generation.max_new_tokens",
    "max_length": "policy.max_total_sequence_length", "learning_rate": "policy.optimizer.kwargs.lr", "temperature": "policy.generation.temperature",
    "stop_strings": "policy.generation.stop_strings", "precision": "policy.precision", "seed": "grpo.seed", "log_dir": "logger.log_dir",
    "checkpoint_dir": "checkpointing.checkpoint_dir", "overlong_filtering": "grpo.overlong_filtering", "reward_scaling": "grpo.reward_scaling",
    "advantage_clip_low": "grpo.advantage_clip_low", "policy__tokenizer__chat_template": "policy.tokenizer.chat_template",
    "policy__hf_config_overrides": "policy.hf_config_overrides", "policy__optimizer__kwargs__betas": "policy.optimizer.kwargs.betas",
}  # fmt: skip


@pytest.fixture
def train(monkeypatch, tmp_path):
    """train_grpo up to the point where it has all that it trains on: (config, rows, validation rows, environment)."""
    monkeypatch.setattr(training, "_train", lambda *parts: parts)
    monkeypatch.setattr(training, "preflight", lambda config: [])
    monkeypatch.chdir(tmp_path)
    return lambda **given: training.train_grpo(
        **{"model": "m", "prompts": ["a"] * 600, "reward_funcs": reward, "log_dir": tmp_path} | given
    )


def test_settings_of_train_grpo(train):
    """All settings drawn at once; those that are refused are left out, and the others must arrive."""
    arrived, kept_back = 0, 0
    columns = {name: drawn(index, NUM_CALLS) for index, name in enumerate(SETTINGS)}
    for row in range(NUM_CALLS):
        given = {name: values[row] for name, values in columns.items()}
        for _ in range(len(given) + 1):
            try:
                config = train(**given)[0]
                break
            except ValueError as error:
                refused(error)
                named = [
                    name
                    for name in given
                    if any(
                        f"argument {name}:" in line or line.startswith(f"{name} is ") for line in str(error).split("\n")
                    )
                ]
                assert named, error
                kept_back += len(named)
                for name in named:
                    del given[name]
        for name, value in given.items():
            if value is None and name in (
                "log_dir",
                "checkpoint_dir",
                "max_new_tokens",
            ):  # which then follow from others
                continue
            if name == "num_prompts_per_step":
                value = min(value, 600)  # there are no more
            held = config
            for part in SETTINGS[name].split("."):
                held = held[part]
            assert same(held, value) or (name == "stop_strings" and value == () and held in (None, [])), (
                name,
                value,
                held,
            )
            arrived += 1
    assert arrived > NUM_CALLS and kept_back > 10 * NUM_CALLS


def test_prompts_and_functions_of_train_grpo(train):
    others = set(inspect.signature(training.train_grpo).parameters) - set(SETTINGS) - {"overrides"}
    assert others == {
        "prompts", "dataset", "validation", "reward_funcs", "reward_weights", "loss_fn", "adv_estimator", "callbacks", "resume", "lora",
    }  # fmt: skip
    taken = dict.fromkeys(others, 0)
    for index, name in enumerate(sorted(others)):
        functions = (
            [reward, [reward], (reward, reward), {"a": reward}, iter([reward])] if name == "reward_funcs" else []
        )
        for value in [*drawn(100 + index, NUM_CALLS), *functions]:
            try:
                _, rows, val_rows, environment, _ = train(
                    **({"prompts": None} if name == "dataset" else {}) | {name: value}
                )
            except ValueError as error:
                refused(error)
                continue
            taken[name] += 1
            found = val_rows if name == "validation" else rows
            if name in ("prompts", "dataset", "validation") and isinstance(value, str):
                assert found == [{"prompt": value}]
            elif isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
                assert [row["prompt"] for row in found] == list(value)
            elif name == "reward_weights" and value is not None:
                assert environment._weights == [float(weight) for weight in (value if np.iterable(value) else [value])]
    assert min(taken.values()) >= 5, taken


def test_unknown_keywords_of_train_grpo(train):
    for index, value in enumerate(drawn(200, NUM_CALLS)):
        name = ["learnig_rate", "beta", "peft_config", "grpo__sed", "nonsense", "größe", "a__b", "loss_fn__", "__x"][
            index % 9
        ]
        with pytest.raises(ValueError, match="is unknown") as caught:
            train(**{name: value})
        refused(caught.value)
        assert name.replace("__", ".") in str(caught.value) and len(str(caught.value)) < 900


class Model:
    """Stands in for the native model: holds what reaches it, and takes nothing that the binding would not."""

    def set_token_bytes(self, table):
        pass

    def generate(
        self, ids, *, max_new_tokens, temperature, top_p, top_k, greedy, seed, stop_token_ids, stop_strings, on_token
    ):
        self.held = dict(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            greedy=greedy,
            seed=seed,
            stop_strings=stop_strings,
        )
        assert (
            ids
            and all(type(i) is int for i in ids)
            and 1 <= max_new_tokens < 2**63
            and type(max_new_tokens) is type(top_k) is type(seed) is int
        )
        assert (
            np.isfinite(np.float32(temperature))
            and np.float32(temperature) > 0
            and np.isfinite(np.float32(1 / temperature))
            and 0 < np.float32(top_p) <= 1
        )
        assert 0 <= seed < 2**32 and 0 <= top_k < 2**63 and type(greedy) is bool
        assert all(type(text) is str and text.encode() for text in stop_strings)
        return "length"


def test_arguments_of_a_text_generator():
    from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer

    generator = TextGenerator.__new__(TextGenerator)
    generator.tokenizer, generator.max_length, generator._model, generator._knows_bytes, generator._vocab_size = (
        tiny_tokenizer(),
        0,
        Model(),
        True,
        64,
    )
    generator._end_token_ids, generator._chat_settled = [], True
    generator._encode = lambda prompt: [1] if prompt else []
    arguments = [name for name in inspect.signature(TextGenerator.generate).parameters if name != "self"]
    taken = dict.fromkeys(arguments, 0)
    for index, name in enumerate(arguments):
        for value in drawn(300 + index):
            try:
                generator.generate(**{"prompt": "1+1="} | {name: value})
            except ValueError as error:
                refused(error)
                continue
            taken[name] += 1
            held = generator._model.held
            if name == "temperature":
                assert (held["greedy"], held["temperature"]) == ((True, 1.0) if value == 0 else (False, value))
            elif name == "top_k":
                assert held["top_k"] == max(value or 0, 0)
            elif name == "stop_strings":
                assert held["stop_strings"] == (
                    [] if value is None else [value] if isinstance(value, str) else list(value)
                )
            elif name in held:
                assert same(held[name], value)
    assert min(taken.values()) >= 3, taken


def test_arguments_of_a_text_generators_making(monkeypatch):
    asked = []

    def nowhere(name, *more, **options):
        assert isinstance(name, str) and name
        asked.append(name)
        raise sources.SourceError(f"{name!r:.60} is not here")

    monkeypatch.setattr(generate, "resolve_model", nowhere)
    for index, name in enumerate(("model", "precision", "num_threads")):
        for value in drawn(400 + index):
            with pytest.raises(ValueError) as caught:
                TextGenerator(**{"model": "m"} | {name: value})
            refused(caught.value)
    assert len(asked) > 60


def sections():
    found = {}

    def walk(section):
        if section not in found:
            found[section] = None
            for info in section.model_fields.values():
                if (inner := section_type(info.annotation)) is not None:
                    walk(inner)

    for master in (GRPOMasterConfig, PPOMasterConfig, EvalMasterConfig, *environment_sections().values()):
        walk(master)
    return [section for section in found if section.model_fields]


def test_keys_of_the_configuration_classes():
    """Every key of every section: assigned, and (some of them) given to the class."""
    rng, arrived = random.Random(5), 0
    for section in sections():
        blank = section.model_construct(
            **{name: 1.0 for name, info in section.model_fields.items() if info.is_required()}
        )
        for name, info in section.model_fields.items():
            values = (
                rng.sample(VALUES, 40) if info.json_schema_extra else VALUES
            )  # keys without an effect are taken by type alone
            for index, value in enumerate(values):
                instance = blank.model_copy()
                try:
                    setattr(instance, name, value)
                    if index % 60 == 0 and not any(other.is_required() for other in section.model_fields.values()):
                        assert same(section(**{name: value})[name], value) or info.json_schema_extra
                except ValueError as error:
                    refused(error)
                    assert str(error).startswith(section.__name__) or isinstance(error, ConfigError)
                    continue
                arrived += 1
                assert same(instance[name], value) or name in ("kwargs", "scheduler"), (
                    section,
                    name,
                    value,
                    instance[name],
                )
    assert arrived > 10_000


def test_whole_configurations():
    for value in VALUES[::4]:
        for master in (GRPOMasterConfig, PPOMasterConfig, EvalMasterConfig):
            for key in ("policy", "data", "env", "grpo", "eval", "bogus"):
                try:
                    master(**{key: value})
                except ValueError as error:
                    refused(error)


def test_prompts_are_described_in_a_line():
    assert argument_checks.described(Thing()) == "a Thing"
