"""Load a model or a run's checkpoint to generate text: `nemo_rl_cpp.load`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp.api.arguments import Prompt, prompt_message
from nemo_rl_cpp.argument_checks import described, did_you_mean, in_a_line, model_name, stop_texts, whole_number
from nemo_rl_cpp.config import load_eval_config
from nemo_rl_cpp.data.conversation import prompts_of
from nemo_rl_cpp.data.tokenizer import get_tokenizer
from nemo_rl_cpp.distributed.cluster import check_device
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.evals.eval import make_generation
from nemo_rl_cpp.hub.sources import find_policy_weights, resolve_model
from nemo_rl_cpp.models.generation.interfaces import generating
from nemo_rl_cpp.models.hf_config import read_config_file
from nemo_rl_cpp.rollouts.rollouts import attach_responses

if TYPE_CHECKING:
    from nemo_rl_cpp.api.arguments import Keys
    from nemo_rl_cpp.config.master import EvalMasterConfig
    from nemo_rl_cpp.data.tokenizer import Tokenizer
    from nemo_rl_cpp.models.generation.base_engine import BaseEngine

DEFAULT_NEW_TOKENS = 256
_OPTIONS = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_strings")
_one_call = threading.Lock()  # a call sets the engine's config and seed


class TextWriter:
    """The base class of objects that generate text with an engine and a tokenizer. `limit_name` is the name, used in
    error messages, of the setting that limits the tokens of prompt and response."""

    generation: BaseEngine
    tokenizer: Tokenizer
    limit_name: str

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        greedy: bool | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        **options: object,
    ) -> list[str] | list[list[str]]:
        """Generate text: continue prompts that are strings, and answer conversations through the chat template. Return
        one text per prompt, or with `n` > 1 a list of `n` texts per prompt.

        `options` are max_new_tokens, temperature, top_p, top_k and stop_strings. An option that is None has the value
        used in training. For a model from `load` this is 256 tokens, temperature 1, and no top-p, top-k or stop
        strings. Decoding is greedy unless `greedy` is False, or `n` > 1 or a sampling option is given. The same seed
        gives the same texts. Raise ValueError for invalid arguments, and for a prompt that leaves no room for a
        response."""
        greedy = _is_greedy(greedy, n, options)
        n = whole_number("n", n, 1, 4096)
        if n > 1 and greedy:
            raise ValueError(f"n={n} greedy answers would be equal: give a temperature above 0, or greedy=False")
        several = prompts_of(prompts)
        if not several:
            return []
        with _one_call:
            engine = self.generation
            usual = engine.config, engine.seed
            settings = engine.config.model_copy()
            for name, value in options.items():
                if value is not None:  # validated like a configuration key
                    setattr(settings, name, stop_texts(value) if name == "stop_strings" else value)
            if not greedy and settings.temperature == 0:  # `load` sets 0, of an evaluation
                settings.temperature = 1.0
            if seed is not None:
                engine.seed = whole_number("seed", seed, 0, 2**32 - 1)
            engine.config = settings
            try:
                texts = self._texts([prompt for prompt in several for _ in range(n)], n, greedy)
            finally:
                engine.config, engine.seed = usual
        return texts if n == 1 else [texts[i : i + n] for i in range(0, len(texts), n)]

    def chat(
        self,
        message: str,
        *,
        system: str | None = None,
        history: Sequence[Mapping[str, object]] = (),
        **options: object,
    ) -> str:
        """Return the model's response, as text, to the user's message `message`. `system` is the text of a system
        message, `history` the earlier messages ({"role", "content"}). `options` are those of `generate` except n."""
        if "n" in options:
            raise ValueError("chat gives one answer and takes no n: use generate, which takes conversations")
        if not isinstance(message, str):
            raise ValueError(f"message is {described(message)}: give a text, or call generate with the conversation")
        first = [{"role": "system", "content": system}] if system is not None else []
        (answer,) = self.generate([[*first, *history, {"role": "user", "content": message}]], **options)
        return str(answer)

    def _texts(self, prompts: Sequence[Prompt], n: int, greedy: bool) -> list[str]:
        logs = [[prompt_message(prompt, self.tokenizer)] for prompt in prompts]
        rows = [log[0]["token_ids"] for log in logs]
        lengths = torch.tensor([len(row) for row in rows])
        if not lengths.all():
            raise ValueError(f"prompt {int(lengths.argmin()) // n} is empty: give at least one character")
        limit, longest = self.generation.max_model_len, int(lengths.max())
        if limit and longest >= limit:
            index, of = int(lengths.argmax()) // n, f"{limit} ({self.limit_name})"
            raise ValueError(f"prompt {index} has {longest} tokens: no room to answer within {of}")
        index = torch.arange(len(logs))
        inputs = BatchedDataDict(
            input_ids=torch.nn.utils.rnn.pad_sequence(rows, True, self.tokenizer.pad_token_id or 0),
            input_lengths=lengths,
            draw_ids=index // n,
            sample_index=index % n,
            stream=["eval"] * len(logs),
            stop_strings=[None] * len(logs),
        )
        with generating(self.generation):
            outputs = self.generation.generate(inputs, greedy=greedy)
        attach_responses(outputs, BatchedDataDict(message_log=logs), self.tokenizer, lengths)
        return [log[-1]["content"] for log in logs]


def _is_greedy(greedy: bool | None, n: int, options: Mapping[str, object]) -> bool:
    """Return whether to decode greedily. Raise ValueError for an unknown option, or for a temperature that contradicts
    `greedy`."""
    unknown = next((name for name in options if name not in _OPTIONS), None)
    if unknown is not None:
        known = ["n", "greedy", "seed", *_OPTIONS]
        hint = did_you_mean(unknown, known, f"generate takes {', '.join(known)}")
        raise ValueError(f"{unknown} is unknown; {hint}")
    if not isinstance(greedy, (bool, type(None))):
        raise ValueError(f"greedy must be True or False, not {in_a_line(greedy)}")
    temperature = options.get("temperature")
    if greedy and temperature:
        raise ValueError(f"greedy=True takes no temperature, not {in_a_line(temperature)}: leave one of them out")
    if greedy is False and temperature == 0:
        raise ValueError("greedy=False samples, but temperature 0 is greedy: leave one of them out")
    if greedy is not None:
        return greedy
    sampled = any(options.get(name) is not None for name in ("temperature", "top_p", "top_k")) or n != 1
    return temperature == 0 or not sampled


@dataclass(repr=False)
class LoadedModel(TextWriter):
    """A model with its tokenizer, ready to generate, made by `load` from `name`: its files are in `folder`, and
    `precision` is that of weights and matrix products."""

    name: str
    folder: Path
    precision: str
    tokenizer: Tokenizer
    config: EvalMasterConfig
    generation: BaseEngine = field(repr=False)
    limit_name = "the model's positions, or max_length of load"

    def __repr__(self) -> str:
        length = self.generation.max_model_len
        return f"LoadedModel({self.name!r}, {self.precision}, up to {length} tokens)"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>"


def load(
    model: str | Path, *, precision: str | None = None, quantization: str | None = None, max_length: int | None = None,
    device: str = "cpu",
) -> LoadedModel:  # fmt: skip
    """Load a Hugging Face folder, a GGUF file, a packaged model, a name on the Hub, a checkpoint (`step_N`), or the
    newest checkpoint in a run's folder.

    `precision` is "float32" or "bfloat16"; None: float32 if config.json has this dtype, otherwise bfloat16.
    `quantization` is the format of the matrices: "q8_0", "q4_0" or "nf4"; None: as `precision`. `max_length` is the
    maximum number of tokens of prompt and response together; None: 2048, or what the model supports if that is
    less. `device` is "cpu" or "cuda". Raise ValueError if the model cannot be found or loaded."""
    check_device(device, "device")
    name = model_name(model)
    folder = Path(resolve_model(find_policy_weights(name), key="the model"))
    if precision is None:
        saved = read_config_file(folder)
        is_float32 = str(saved.get("dtype", saved.get("torch_dtype"))).removeprefix("torch.") == "float32"
        precision = "float32" if is_float32 else "bfloat16"
    keys: Keys = {
        "generation.model_name": ("model", str(folder)),
        "generation.vllm_cfg.precision": ("precision", precision),
        "generation.quantization": ("quantization", quantization),
        "generation.max_new_tokens": ("max_new_tokens", DEFAULT_NEW_TOKENS),
        "cluster.device": ("device", device),
    }
    if max_length is not None:
        keys["generation.vllm_cfg.max_model_len"] = ("max_length", max_length)
    config = eval_config(keys)
    tokenizer = get_tokenizer(config.tokenizer, section="tokenizer")
    tokenizer.section = ""  # the caller has no such section
    return LoadedModel(name, folder, precision, tokenizer, config, make_generation(config, tokenizer, "max_length"))


def eval_config(given: Keys) -> EvalMasterConfig:
    """Build a configuration from the keys that arguments set. Raise ConfigError, whose message names the arguments."""
    precision = given.get("generation.vllm_cfg.precision", ("", "float32"))[1]
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {in_a_line(precision)}: expected float32 or bfloat16")
    length = "generation.vllm_cfg.max_model_len"
    return load_eval_config(
        "evals/notebook.yaml",
        [] if length in given else [f"~{length}"],  # by default the model's positions limit it
        values={key: value for key, (_, value) in given.items()},
        places={key: f"argument {name}" for key, (name, _) in given.items()},
    )
