"""A model or a run's checkpoint, loaded to write: `nemo_rl_cpp.load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.api.prompting import Prompt
from nemo_rl_cpp.api.writing import Writer
from nemo_rl_cpp.argument_checks import in_a_line, model_name
from nemo_rl_cpp.config import load_eval_config
from nemo_rl_cpp.hub.sources import TINY_RANDOM, find_policy_weights, resolve_model
from nemo_rl_cpp.models.hf_config import read_config_file

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import EvalMasterConfig
    from nemo_rl_cpp.data.tokenizer import Tokenizer
    from nemo_rl_cpp.models.generation.base_engine import BaseEngine

BASE_CONFIG = "evals/notebook.yaml"
DEFAULT_NEW_TOKENS = 256


@dataclass(repr=False)
class LoadedModel:
    """A model with its tokenizer, ready to write; `nemo_rl_cpp.load` makes one.

    Attributes:
        name: what was loaded, as it was given.
        folder: where its files lie.
        precision: of weights and products.
    """

    name: str
    folder: Path
    precision: str
    tokenizer: Tokenizer
    config: EvalMasterConfig
    generation: BaseEngine = field(repr=False)

    @property
    def _writer(self) -> Writer:
        return Writer(self.generation, self.tokenizer, "the model's positions, or max_length of load")

    def generate(
        self, prompts: Prompt | Sequence[Prompt], greedy: bool | None = None, *, n: int = 1, seed: int | None = None, **options: object
    ) -> list[str] | list[list[str]]:  # fmt: skip
        """Answers to texts (continued as they are) or conversations (through the chat template): one text a prompt, or a list of
        `n` texts a prompt.

        `options`: max_new_tokens (256), temperature, top_p, top_k, stop_strings. Greedy, unless `greedy` is False or an option of
        sampling is given. Raises ValueError for a mistake in these, and for a prompt that leaves no room to answer.
        """
        return self._writer.write(prompts, greedy, n, seed, options)

    def chat(
        self, message: str, *, system: str | None = None, history: Sequence[Mapping[str, object]] = (), **options: object
    ) -> str:  # fmt: skip
        """The answer to a user's message by the model's chat template; `history` are earlier messages ({"role", "content"}),
        `options` those of `generate` but n."""
        return self._writer.chat(message, system, history, options)

    def __repr__(self) -> str:
        length = self.generation.max_model_len
        return f"LoadedModel({self.name!r}, {self.precision}, up to {length} tokens)"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>"


def load(model: str | Path, *, precision: str | None = None, max_length: int | None = None) -> LoadedModel:
    """A Hugging Face folder, a packaged model, a name on the hub, a checkpoint (`step_N`) or the folder of a run's checkpoints, of
    which the newest counts.

    `precision`: "float32" or "bfloat16"; None: float32 where the files are, else bfloat16. `max_length`: the most tokens of a
    prompt and its answer; None: 2048, or what the model has positions for. Raises ValueError where the model cannot be had.
    """
    from nemo_rl_cpp.data.tokenizer import get_tokenizer
    from nemo_rl_cpp.evals.eval import make_generation

    name = model_name(model)
    folder = weights_folder(name)
    if precision is None:
        precision = saved_precision(folder)
    config = eval_config({"generation.model_name": ("model", str(folder)), "generation.vllm_cfg.precision": ("precision", precision),
                          "generation.max_new_tokens": ("max_new_tokens", DEFAULT_NEW_TOKENS)}
                         | ({} if max_length is None else {"generation.vllm_cfg.max_model_len": ("max_length", max_length)}))  # fmt: skip
    tokenizer = get_tokenizer(config.tokenizer, section="tokenizer")
    return LoadedModel(name, folder, precision, tokenizer, config, make_generation(config, tokenizer))


def weights_folder(name: str) -> Path:
    """The folder of a model's files; ValueError where it cannot be had."""
    if name == TINY_RANDOM:
        raise ValueError(
            f"model is {TINY_RANDOM!r}, random weights that a run makes for itself: give the checkpoints of such a run, or a model, for "
            "example smollm2-135m-instruct"
        )
    return Path(resolve_model(find_policy_weights(name), key="the model"))


def saved_precision(folder: Path) -> str:
    """float32 where config.json says that the weights are, else bfloat16."""
    saved = read_config_file(folder)
    dtype = saved.get("dtype", saved.get("torch_dtype"))
    return "float32" if str(dtype).removeprefix("torch.") == "float32" else "bfloat16"


def eval_config(given: Mapping[str, tuple[str, object]]) -> EvalMasterConfig:
    """The configuration of a call. `given`: key -> (argument, value). Raises ConfigError, whose messages name the arguments."""
    precision = given.get("generation.vllm_cfg.precision", ("", "float32"))[1]
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {in_a_line(precision)}: expected float32 or bfloat16")
    length = "generation.vllm_cfg.max_model_len"
    return load_eval_config(
        BASE_CONFIG,
        [] if length in given else [f"~{length}"],  # a length that is not given is bounded by the model's
        values={key: value for key, (_, value) in given.items()},
        places={key: f"argument {name}" for key, (name, _) in given.items()},
    )
