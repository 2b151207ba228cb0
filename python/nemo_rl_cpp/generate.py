"""Generate text from a model or a run's checkpoint. On the CPU this module does not load torch's Python package, so the
first token comes within a second or two.

nemo-rl-cpp generate --model results/grpo/step_10 "12 + 30 ="
python -m nemo_rl_cpp.generate --model smollm2-135m-instruct --chat "Why is the sky blue?"
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nemo_rl_cpp._torch_version import check_torch_version
from nemo_rl_cpp.argument_checks import LARGEST, SMALLEST, in_a_line, model_name, number, stop_texts, whole_number
from nemo_rl_cpp.data.boundaries import end_token_ids, prompt_ids
from nemo_rl_cpp.data.conversation import prompt_of
from nemo_rl_cpp.data.texts import TextStream, token_bytes_table
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.errors import say_once
from nemo_rl_cpp.hub.sources import find_policy_weights, resolve_model
from nemo_rl_cpp.models.hf_config import max_positions
from nemo_rl_cpp.models.model_folder import ModelFolder, read_model_folder
from nemo_rl_cpp.models.weight_files import RawTensor, fill_parameters, raw_tensors, row_parts, weight_files


def sampling(
    max_new_tokens: int, temperature: float, top_p: float, seed: int, top_k: int | None = None, greedy: bool = False,
    stop_strings: str | Sequence[str] | None = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of `TextGenerator.generate` in the native engine's form. Raise ValueError if invalid."""
    temperature = number("temperature", temperature, SMALLEST, LARGEST, zero_is="for greedy decoding")
    return {
        "max_new_tokens": whole_number("max_new_tokens", max_new_tokens, 1),
        "temperature": temperature or 1.0,
        "top_p": number("top_p", top_p, SMALLEST, 1),
        "top_k": 0 if top_k is None else max(whole_number("top_k", top_k, -1), 0),
        "greedy": greedy or temperature == 0,
        "seed": whole_number("seed", seed, 0, 2**32 - 1),
        "stop_strings": stop_texts(stop_strings),
    }


@dataclass(frozen=True)
class GeneratedText:
    """A generated text. `finish_reason`: "stop" (a stop token or stop string) or "length" (a length limit)."""

    text: str
    token_ids: list[int]
    finish_reason: str


class TextGenerator:
    """A model with its tokenizer and the native generation engine, which generates one text at a time, with weights in
    `precision`, "bfloat16" or "float32", on `device`, "cpu" or "cuda", with `num_threads` CPU threads (None: all
    cores). `model` is a Hugging Face folder, a GGUF file, a model name, a checkpoint (`step_N`) or the folder of a
    run's checkpoints. Raises ValueError if the model cannot be found, or the native engine does not support it."""

    def __init__(
        self,
        model: str | Path,
        *,
        precision: str = "bfloat16",
        quantization: str | None = None,
        num_threads: int | None = None,
        device: str = "cpu",
    ):
        if precision not in ("bfloat16", "float32"):
            raise ValueError(f"precision {in_a_line(precision)}: expected bfloat16 or float32")
        if device != "cpu":
            from nemo_rl_cpp.distributed.cluster import check_device  # loads torch and the CUDA kernels

            check_device(device, "the device")
        name = model_name(model)
        folder = resolve_model(find_policy_weights(name), key="the model")
        opened = read_model_folder(folder)
        opened.check_device(device)
        self.max_length = max_positions(opened.config)
        opened = replace(opened, max_length=self.max_length)
        opened = opened.quantised(quantization, "--quantization")
        opened.check_weights()
        for remark in opened.remarks:
            say_once("warning", remark)
        self.tokenizer = Tokenizer.from_pretrained(folder, section="")
        self._folder, self._end_token_ids = folder, end_token_ids(folder, opened.config, self.tokenizer)
        self._chat_settled = False
        check_torch_version(version("torch"))
        from nemo_rl_cpp import _text as native

        if num_threads is not None:
            native.set_num_threads(whole_number("num_threads", num_threads, 1, 4096))
        self._model = native.TextModel(opened.native(), precision, self.max_length, device)
        self._fill(opened)
        self._knows_bytes = False
        self._vocab_size = int(opened.config["vocab_size"])

    def _fill(self, opened: ModelFolder) -> None:
        def put(name: str, tensor: RawTensor) -> None:
            if self._model.put_blocks(name, tensor.dtype, tensor.data):
                return
            for first, rows in row_parts(tensor):
                self._model.put(name, rows.dtype, rows.data, first)

        if opened.path is None:
            raise ValueError(f"{self._folder} holds an adapter of random weights, which generate cannot load: serve it")
        fill_parameters(opened.path, dict(self._model.shapes), raw_tensors(weight_files(opened.path)), put)
        if opened.adapter is not None:
            saved = opened.adapter
            self._model.adapt(saved.dim, saved.alpha, list(saved.targets), saved.use_rslora)
            for name, tensor in saved.tensors():
                self._model.put(name, tensor.dtype, tensor.data)
            self._model.masters_changed()

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, object]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        greedy: bool = False,
        seed: int = 42,
        stop_strings: str | Sequence[str] | None = (),
        on_text: Callable[[str], None] | None = None,
    ) -> GeneratedText:
        """Continue a text, or respond to messages ({"role": ..., "content": ...}) through the model's chat template.

        Temperature 0 is greedy decoding. The same seed gives the same text. `on_text` is called with each piece of text
        once it is final (a character may take several tokens, and what may begin a stop string waits); bytes that form
        no character become U+FFFD, as in transformers. The text ends at a stop token, after a stop string, after
        `max_new_tokens`, or at the model's last position. Raise ValueError for invalid arguments."""
        prompt = prompt_of(prompt, "the prompt", may_be_empty=True)
        rule = sampling(max_new_tokens, temperature, top_p, seed, top_k, greedy, stop_strings)
        ids = self._encode(prompt)
        if not ids:
            raise ValueError("the prompt is empty: give at least one character")
        if self.max_length and len(ids) >= self.max_length:
            raise ValueError(f"the prompt has {len(ids)} tokens, but the model {self.max_length} positions: shorten it")
        if rule["stop_strings"] and not self._knows_bytes:
            self._model.set_token_bytes(token_bytes_table(self.tokenizer, self._vocab_size))
            self._knows_bytes = True
        stops = tuple(rule["stop_strings"])
        stream, tokens, pieces = TextStream(self.tokenizer, ids, stops=stops, keep_stop=True), [], []

        def give(texts: list[str]) -> None:
            if piece := "".join(texts):
                pieces.append(piece)
                if on_text is not None:
                    on_text(piece)

        def on_token(token: int) -> None:
            tokens.append(token)
            give(stream.push((token,)))

        reason = self._model.generate(ids, **rule, stop_token_ids=self._end_token_ids, on_token=on_token)
        give(stream.push((), last=True))
        return GeneratedText("".join(pieces), tokens, reason)

    def _encode(self, prompt: str | Sequence[Mapping[str, object]]) -> list[int]:
        if isinstance(prompt, str):
            return prompt_ids(self.tokenizer, prompt)

        from nemo_rl_cpp.data.chat_template import render_prompt
        from nemo_rl_cpp.data.checkpoint_template import settle_chat_template  # jinja2 takes time to load

        if not self._chat_settled:
            for remark in settle_chat_template(self.tokenizer, self._folder):
                warnings.warn(remark, stacklevel=3)
            self._chat_settled = True
        text = render_prompt(self.tokenizer, prompt)
        return prompt_ids(self.tokenizer, text, prompt)


if __name__ == "__main__":
    sys.exit(import_module("nemo_rl_cpp.cli").main(command="generate"))
