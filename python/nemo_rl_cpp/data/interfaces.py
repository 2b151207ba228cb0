"""Types that data sets, processors, environments and the training loop share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, TypeVar

from nemo_rl_cpp.files.prompt_files import find_file

if TYPE_CHECKING:
    import torch

T_co = TypeVar("T_co", covariant=True)

Row = dict[str, object]  # a row of a data set: column name -> value


class Indexed(Protocol[T_co]):
    """A sequence that supports only indexing and `len`: the rows of a data set, or the samples made from its rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> T_co: ...


class Message(TypedDict, total=False):
    """A message of a rollout's conversation, with its S tokens."""

    role: str  # the author: system, user, assistant, tool or environment
    content: str  # the text
    token_ids: torch.Tensor  # int64 [S]
    generation_logprobs: torch.Tensor  # float32 [S], only in messages that the policy has sampled
    is_invalid_tool_call: bool  # True if the response to an agent has tags of a tool call, but no complete one
    has_malformed_thinking: bool  # True if the response to an agent has thinking tags where none belong


LLMMessageLogType = list[Message]  # the messages of a conversation


def tokens_of(message_log: LLMMessageLogType) -> int:
    """Return the number of tokens in a conversation."""
    return sum(message["token_ids"].numel() for message in message_log)


PathLike = str | os.PathLike[str]


class TokenizerType(Protocol):
    """The tokenizer methods that a run uses, as in `nemo_rl_cpp.data.tokenizer.Tokenizer` or transformers."""

    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    pad_token_id: int | None
    all_special_ids: list[int]

    def __len__(self) -> int: ...
    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> Mapping[str, list[int] | list[list[int]] | torch.Tensor]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None, *,
        tokenize: bool, add_generation_prompt: bool, add_special_tokens: bool = False,
    ) -> str: ...  # fmt: skip
    def save_pretrained(self, folder: str, /) -> object: ...


@dataclass(frozen=True)
class ServerAddress:
    """The address at which agents reach the policy."""

    base_url: str  # the URL for an OpenAI client; ends in /v1
    api_key: str
    model: str  # the model's name
    header: str  # the HTTP header in which a request sends its rollout key
    tokenizer: str  # a folder with the tokenizer's files, for clients that tokenize themselves
    max_model_len: int  # the longest sequence in tokens


class DatumSpec(TypedDict):
    """One tokenized prompt, with the data that its rollout needs."""

    message_log: LLMMessageLogType  # the tokenized messages of the prompt
    length: int  # the number of tokens of all messages, before the prompt is truncated
    extra_env_info: Mapping[str, object] | None  # data for the environment, such as the ground truth
    loss_multiplier: float  # weight of the sample in the loss; 0 masks it
    idx: int  # the index of the row in the data set
    task_name: NotRequired[str]  # selects the row's processor and environment
    stop_strings: NotRequired[list[str]]  # strings at which generation ends for this sample
    __extra__: NotRequired[object]


@dataclass
class TaskDataSpec:
    """The settings that determine how the rows of a task become prompts.

    `prompt_file` is the path of a text with the placeholder `{}` for the question, `system_prompt_file` the system
    message's path. Both are read immediately, into `prompt` and `system_prompt` (None without a file). A relative path
    is looked up in the working directory, then in the source tree, then in the package. A missing file raises
    FileNotFoundError."""

    task_name: str | None = None
    prompt_file: PathLike | None = None
    system_prompt_file: PathLike | None = None

    def __post_init__(self) -> None:
        self.prompt: str | None = self._read(self.prompt_file, "prompt_file")
        self.system_prompt: str | None = self._read(self.system_prompt_file, "system_prompt_file")

    @staticmethod
    def _read(path: PathLike | None, key: str) -> str | None:
        if path is None:
            return None
        file = find_file(os.fspath(path), key)
        try:
            return file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            fault = f"{error.reason} at byte {error.start}"
            raise ValueError(f"{key}: {file} is not UTF-8 text ({fault}): save it as UTF-8") from None


TaskDataProcessFnCallable = Callable[[Row, TaskDataSpec, TokenizerType, int | None, int], DatumSpec]
"""A processor: (row, task's settings, tokenizer, maximum length, index of the row) -> DatumSpec."""

TaskDataPreProcessFnCallable = Callable[[Row], Row]
"""A preprocessor: a function that changes a row before the processor gets it."""
