"""What vLLM in a process of the run's own and vLLM behind a server have in common: what they are asked, and what comes of it."""

from abc import abstractmethod
from collections.abc import Mapping
from hashlib import blake2b
from struct import pack
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.generation.base_engine import STREAMS, Answers, Asked, BaseEngine
from nemo_rl_cpp.models.generation.interfaces import Finished, Moved, Responses
from nemo_rl_cpp.models.trained_model import TrainedModel


class Request(NamedTuple):
    """One response that vLLM is asked for. `row` is that of the batch, `room` the most tokens that it may have."""

    row: int
    prompt: list[int]
    room: int
    seed: int
    stops: tuple[str, ...]


class VllmEngine(BaseEngine):
    """NeMo RL's generation interface on vLLM, wherever it runs.

    vLLM generates nothing before the first `update_weights`. A sample is drawn by vLLM with a seed of its own, made from (seed, stream,
    draw id, sample, length of the prompt), so that a run that is repeated asks for the same. vLLM's log-probabilities are not those of
    training to the bit. `generate` raises, besides what `BaseEngine.generate` does, VllmError before the first refit, and WorkerLostError
    when vLLM has ended, or has made no step for vllm_cfg.timeout_s.

    Args:
        policy: whose weights vLLM gets.
        config: section `policy`.
        tokenizer, end_token_ids, seed: as of `BaseEngine`.

    Attributes:
        model_config: config.json of the policy's model.
        weight_version: of the weights that vLLM has; None before the first refit.
    """

    owns_process = True

    def __init__(
        self, policy: TrainedModel, config: PolicyConfig, tokenizer: TokenizerType, *, end_token_ids: list[int] | None = None, seed: int = 42
    ) -> None:  # fmt: skip
        longest = config.generation.effective_max_model_len(config.max_total_sequence_length)
        super().__init__(config.generation, tokenizer, end_token_ids=end_token_ids, max_model_len=longest, seed=seed)
        self.sampling(greedy=False, stream="train")  # reports bad values now rather than at the first step
        self.model_config = policy.saved_config()
        self.weight_version: int | None = None
        self._arrived: str | None = None
        self._vocab_size = vocabulary_of(self.model_config)

    # ---- token ids in, token ids out

    def _respond(self, asked: Asked, on_finished: Finished | None) -> Responses:
        prompts, room = [row.tolist() for row in asked.batch.rows(asked.batch.tokens["input_ids"])], self._room(asked)
        draws, samples = asked.draws.tolist(), asked.samples.tolist()
        requests = [
            Request(row, prompts[row], room[row], self._seed_of(STREAMS[asked.stream], draws[row], samples[row], len(prompts[row])), asked.stops[row])
            for row in range(asked.batch.size)
            if room[row] > 0
        ]  # fmt: skip
        answers = Answers(asked.batch.size, on_finished)
        if requests:
            self._answer(requests, self._sampling_arguments(asked), answers)
        responses = answers.responses(self.weight_version)
        if not bool(torch.isfinite(responses.logprobs).all()):
            raise RuntimeError("vLLM gave a log-probability that is not finite: the model's logits are not")
        return responses

    @abstractmethod
    def _answer(self, requests: list[Request], sampling: dict[str, float], answers: Answers) -> None:
        """Lets vLLM answer all requests, by the weights of `weight_version`. `sampling`: fields of vLLM's SamplingParams that they share."""

    def _sampling_arguments(self, asked: Asked) -> dict[str, float]:
        sampling = self.sampling(asked.greedy, asked.stream)
        if sampling.greedy:
            return {"temperature": 0.0}
        return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}

    def _seed_of(self, stream: int, draw: int, sample: int, length: int) -> int:
        """63 bits of the key of a response. The prompt's length sets the turns of a conversation apart."""
        digest = blake2b(pack("<IIqqq", self.seed, stream, draw, sample, length), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _check_version(self, version: int | None) -> None:
        if version != self.weight_version:
            raise RuntimeError(
                f"vLLM answered with weights of version {version}, and version {self.weight_version} was sent"
            )

    # ---- weights and memory

    @abstractmethod
    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> Moved:
        """Brings the weights to vLLM, in its own types where they differ; those of `version` from then on.

        Raises RuntimeError when what arrived has another digest than what was sent, or a parameter of vLLM's model got nothing; vLLM
        generates nothing then.
        """

    def weight_digest(self) -> str:
        """Of the weights that arrived at the last refit, 32 hexadecimal digits. RuntimeError before the first."""
        if self._arrived is None:
            raise RuntimeError("vLLM has no weights before the first sync_weights")
        return self._arrived


def vocabulary_of(config: dict[str, Plain]) -> int:
    """Rows of the embedding of a config.json; 0 where it does not say."""
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)
