"""Fakes that make rollouts run in milliseconds: a byte-level tokenizer, an engine without a model, an environment."""

import hashlib
from typing import Any

import torch
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface


class ByteTokenizer:
    """A byte-level tokenizer: each byte of UTF-8 is a token, 256 is padding, and 257 is EOS."""

    pad_token_id, eos_token_id, bos_token_id = 256, 257, None
    pad_token, eos_token, bos_token = "<pad>", "<eos>", None
    vocab_size = 258

    def __call__(self, text: "str | list[str]", **_):
        ids = [self.encode(one) for one in ([text] if isinstance(text, str) else text)]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        ids = ids.tolist() if torch.is_tensor(ids) else list(ids)
        pieces = []
        for i in ids:
            if i < 256:
                pieces.append(bytes([i]))
            elif not skip_special_tokens:
                pieces.append({256: b"<pad>", 257: b"<eos>"}[i])
        return b"".join(pieces).decode(errors="replace")

    def apply_chat_template(self, messages, tokenize: bool = False, add_generation_prompt: bool = False, **_):
        text = "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]" * add_generation_prompt
        return self.encode(text) if tokenize else text


class FakeGeneration(GenerationInterface):
    """An engine without a model.

    `respond(prompt_text, key)` returns the response as text. EOS is appended unless the response is cut at
    `max_new_tokens` or ends with a stop string. Without `respond`, characters are drawn uniformly from `alphabet`.
    `key` is (stream, draw id, sample, position): the same key and prompt always give the same response, whatever the
    batch."""

    def __init__(self, respond=None, max_new_tokens=16, tokenizer=None, alphabet="0123456789\n") -> None:
        self.respond, self.tokenizer = respond or self._uniform, tokenizer or ByteTokenizer()
        self.max_new_tokens, self.alphabet = max_new_tokens, alphabet
        self.calls: list[BatchedDataDict] = []

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        self.calls.append(data)
        lengths = data["input_lengths"].tolist()
        rows, logprobs, truncated = [], [], []
        for i, length in enumerate(lengths):
            prompt = data["input_ids"][i, :length].tolist()
            new = self._new_tokens(data, i, prompt, greedy)
            truncated.append(len(new) > self.max_new_tokens)
            new = new[: self.max_new_tokens]
            rows.append(prompt + new)
            logprobs.append([0.0] * length + [-(i + 1) / 8] * len(new))
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        return BatchedDataDict(
            output_ids=torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
            logprobs=torch.tensor([row + [0.0] * (width - len(row)) for row in logprobs]),
            generation_lengths=torch.tensor([len(row) - length for row, length in zip(rows, lengths)]),
            unpadded_sequence_lengths=torch.tensor([len(row) for row in rows]),
            truncated=torch.tensor(truncated),
        )

    def _new_tokens(self, data: BatchedDataDict, i: int, prompt: list[int], greedy: bool) -> list[int]:
        def of(name: str, default: Any) -> Any:
            return data[name][i] if name in data else default

        key = (of("stream", "train"), int(of("draw_ids", 0)), 0 if greedy else int(of("sample_index", 0)), len(prompt))
        text = self.respond(self.tokenizer.decode(prompt), key)
        for stop in data["stop_strings"][i] or []:
            if stop in text:
                return self.tokenizer.encode(text[: text.index(stop) + len(stop)])
        return self.tokenizer.encode(text) + [self.tokenizer.eos_token_id]

    def _uniform(self, prompt: str, key: tuple) -> str:
        digest = hashlib.sha256(repr((prompt, key)).encode()).digest()
        return "".join(self.alphabet[byte % len(self.alphabet)] for byte in digest[: self.max_new_tokens])

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True


class EchoEnvironment(EnvironmentInterface[dict]):
    """An environment that repeats the model's last message in capitals for `metadata["turns"]` turns. The reward of a
    turn is the message's length / 100."""

    def __init__(self, cfg: dict[str, Any] | None = None) -> None:
        self.cfg = cfg or {}
        self.steps = 0

    def step(self, message_log_batch, metadata) -> EnvironmentReturn:
        self.steps += 1
        said = [log[-1]["content"] for log in message_log_batch]
        left = [info["turns"] - 1 for info in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text.upper()} for text in said],
            metadata=[{**info, "turns": turns} for info, turns in zip(metadata, left)],
            next_stop_strings=[self.cfg.get("next_stop_strings")] * len(said),
            rewards=torch.tensor([len(text) / 100 for text in said]),
            terminateds=torch.tensor([turns <= 0 for turns in left]),
            answers=None,
        )


def prompts(texts: list[str], task_names: list[str], infos: list[dict], **columns: Any) -> BatchedDataDict:
    """Return a batch of one-message prompts in the format of `rl_collate_fn`."""
    tokenizer = ByteTokenizer()
    logs = [[{"role": "user", "content": t, "token_ids": torch.tensor(tokenizer.encode(t))}] for t in texts]
    lengths = torch.tensor([len(log[0]["token_ids"]) for log in logs])
    return BatchedDataDict(
        message_log=logs, length=lengths, loss_multiplier=torch.ones(len(texts)), extra_env_info=infos,
        task_name=task_names, idx=list(range(len(texts))), stop_strings=[None] * len(texts), **columns,
    )  # fmt: skip
