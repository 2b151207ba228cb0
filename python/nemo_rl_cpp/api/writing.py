"""Texts from an engine: what `TrainResult` and `LoadedModel` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp.api.prompting import Prompt, prompt_message
from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line, stop_texts, whole_number
from nemo_rl_cpp.data.conversation import prompts_of
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.models.generation.interfaces import generating
from nemo_rl_cpp.rollouts.rollouts import generate_responses

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.models.interfaces import GenerationInterface

_OPTIONS = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_strings")
_OF_TRANSFORMERS = {
    "num_return_sequences": "n",
    "do_sample": "greedy=False",
    "max_tokens": "max_new_tokens",
    "stop": "stop_strings",
    "max_length": "max_new_tokens",
}
_MOST_SEED = 2**32 - 1


@dataclass
class Writer:
    """An engine with its tokenizer; `limit_is` says whose the longest sequence is."""

    generation: GenerationInterface
    tokenizer: TokenizerType
    limit_is: str

    def write(
        self, prompts: Prompt | Sequence[Prompt], greedy: bool | None, n: int, seed: int | None, options: Mapping[str, object]
    ) -> list[str] | list[list[str]]:  # fmt: skip
        """n answers to each prompt: of n = 1 a text, else a list of n. `options` are keys of `policy.generation`; None leaves one
        as it is. Greedy where nothing says otherwise. ValueError of one sentence for a mistake."""
        greedy = _is_greedy(greedy, n, options)
        n = whole_number("n", n, 1, 4096)
        if n > 1 and greedy:
            raise ValueError(
                f"n={n} greedy answers would be equal: give a temperature above 0, or greedy=False to sample as in training"
            )
        several = prompts_of(prompts)
        if not several:
            return []
        engine = self.generation
        usual = engine.config, engine.seed
        settings = engine.config.model_copy()
        for name, value in options.items():
            if value is not None:  # checked as the key of a configuration
                setattr(settings, name, stop_texts(value) if name == "stop_strings" else value)
        if seed is not None:
            engine.seed = whole_number("seed", seed, 0, _MOST_SEED)
        engine.config = settings
        try:
            texts = self._texts([prompt for prompt in several for _ in range(n)], n, greedy)
        finally:
            engine.config, engine.seed = usual
        return texts if n == 1 else [texts[i : i + n] for i in range(0, len(texts), n)]

    def _texts(self, prompts: Sequence[Prompt], n: int, greedy: bool) -> list[str]:
        logs = [[prompt_message(prompt, self.tokenizer)] for prompt in prompts]
        batch = BatchedDataDict(message_log=logs, stop_strings=[None] * len(logs))
        lengths = torch.tensor([len(log[0]["token_ids"]) for log in logs])
        empty = (lengths == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"prompt {empty[0] // n} is empty: give at least one character")
        limit = self.generation.max_model_len
        if limit and int(lengths.max()) >= limit:
            raise ValueError(
                f"prompt {int(lengths.argmax()) // n} has {int(lengths.max())} tokens, which leaves no room to answer within {limit} "
                f"({self.limit_is})"
            )
        ids = torch.full((len(logs), int(lengths.max())), self.tokenizer.pad_token_id)
        for row, log in enumerate(logs):
            ids[row, : lengths[row]] = log[0]["token_ids"]
        rows = torch.arange(len(logs))
        inputs = BatchedDataDict(
            input_ids=ids, input_lengths=lengths, draw_ids=rows // n, sample_index=rows % n, stream=["eval"] * len(logs)
        )
        with generating(self.generation):
            batch, _, _ = generate_responses(self.generation, inputs, batch, self.tokenizer, lengths, greedy=greedy)
        return [log[-1]["content"] for log in batch["message_log"]]

    def chat(
        self, message: str, system: str | None, history: Sequence[Mapping[str, object]], options: Mapping[str, object]
    ) -> str:
        """The answer to a user's message by the chat template; `options` are arguments of `write`."""
        if not isinstance(message, str):
            raise ValueError(f"message is {in_a_line(message)}: give a text; generate takes whole conversations")
        if system is not None and not isinstance(system, str):
            raise ValueError(f"system is {in_a_line(system)}: give a text")
        said = [{"role": "system", "content": system}] if system is not None else []
        conversation = [*said, *history, {"role": "user", "content": message}]
        if "n" in options:
            raise ValueError("chat gives one answer and takes no n: use generate, which takes conversations")
        given = dict(options)
        greedy, seed = given.pop("greedy", None), given.pop("seed", None)
        (answer,) = self.write([conversation], greedy, 1, seed, given)
        return str(answer)


def _is_greedy(greedy: bool | None, n: int, options: Mapping[str, object]) -> bool:
    unknown = next((name for name in options if name not in _OPTIONS), None)
    if unknown is not None:
        takes = f"generate takes n, greedy, seed, {', '.join(_OPTIONS)}"
        meant = _OF_TRANSFORMERS.get(unknown)
        hint = f"did you mean {meant}?" if meant else did_you_mean(unknown, ["n", "greedy", "seed", *_OPTIONS], takes)
        raise ValueError(f"{unknown} is unknown; {hint}")
    if not isinstance(greedy, (bool, type(None))):
        raise ValueError(f"greedy must be True or False, not {in_a_line(greedy)}")
    temperature = options.get("temperature")
    if greedy and temperature:
        raise ValueError(
            f"greedy=True takes no temperature, but temperature is {in_a_line(temperature)}: leave one of them out"
        )
    if greedy is False and temperature == 0:
        raise ValueError(
            "greedy=False samples, but temperature is 0, which is greedy: give a temperature above 0, or leave greedy out"
        )
    if greedy is not None:
        return greedy
    sampled = any(options.get(name) is not None for name in ("temperature", "top_p", "top_k")) or n != 1
    return temperature == 0 or not sampled
