"""The parts of a custom training loop: a model, an engine that samples from it, and a trainer that updates it.

Engine and trainer use the same weights: after `Trainer.step` the engine samples from the updated ones. See
`examples/grpo_from_scratch.py`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.argument_checks import LARGEST, in_a_line, is_iterable, model_name, number, token_ids, whole_number
from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.config.optimizer import OptimizerKwargs
from nemo_rl_cpp.data.boundaries import end_token_ids, save_generation_config
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.models.policy.micro_batches import RowBatch, wanted_tokens
from nemo_rl_cpp.models.policy.train_step import Scoring, without_removed_tokens
from nemo_rl_cpp.models.trained_model import DTYPES
from nemo_rl_cpp.models.weights import save_weights


class Model:
    """A language model on the CPU, whose weights an `Engine` and a `Trainer` share: a Hugging Face folder, a GGUF file,
    a packaged model, a name on the Hub, or "tiny-random" with weights drawn from `seed`. `precision` is "float32",
    "float64", or "bfloat16" with float32 master weights. `overrides` replace entries of config.json
    (`hidden_size=128`). The attribute `tokenizer` is the folder's tokenizer; for "tiny-random" it is one whose tokens
    are digits, "+" and "=". Raise ModelFolderError for an unsupported model or damaged files."""

    def __init__(self, name: str, *, seed: int = 0, precision: str = "float32", **overrides: object) -> None:
        if precision not in DTYPES:
            raise ValueError(f"precision is one of {', '.join(DTYPES)}, not {precision!r}")
        seed = whole_number("seed", seed, -(2**62), 2**62)
        self.folder = open_model_folder(model_name(name), overrides, seed=seed, key="name")
        self.folder.check_trains(name)
        self.folder.check_weights()
        path = self.folder.path
        self.tokenizer = tiny_tokenizer() if path is None else Tokenizer.from_pretrained(path, section="")
        self.native = C.DecoderModel(self.folder.native(), DTYPES[precision], trainable=True)
        self.folder.fill(self.native)

    def save(self, path: str | Path) -> None:
        """Save a Hugging Face folder: weights, config.json, generation_config.json and tokenizer."""
        path = Path(path).expanduser()
        save_weights(self.native, path, self.folder.config)
        save_generation_config(self.folder.path, self.folder.config, self.tokenizer, path)
        self.tokenizer.save_pretrained(str(path))


class Engine:
    """An engine that samples responses from a `Model`. `settings` are keys of `policy.generation`, such as
    `max_new_tokens=64, temperature=0.7`. `seed` seeds the sampling; each call of `sample` gives different samples."""

    def __init__(self, model: Model, *, seed: int = 0, **settings: object) -> None:
        ends = end_token_ids(model.folder.path, model.folder.config, model.tokenizer)
        config = as_model(settings, GenerationConfig, "policy.generation")
        longest = config.effective_max_model_len(model.folder.config["max_position_embeddings"])
        runner, seed = native_runner(model.native, config), whole_number("seed", seed, -(2**63))
        limits = {"end_token_ids": ends, "seed": seed, "max_model_len": longest}
        self._native = NativeGeneration(runner, config, model.tokenizer, **limits)

    def sample(self, prompts: Sequence[Sequence[int]], n: int = 1, *, greedy: bool = False) -> RaggedBatch:
        """Generate `n` responses to each prompt.

        Return a batch of B = len(prompts) * n sequences with T tokens in total; responses to the same prompt are
        adjacent. `batch.tokens` holds [T] tensors: `input_ids` (prompts with responses), `token_mask` (1 for sampled
        tokens) and `generation_logprobs` (0 for all other tokens). `batch.samples["group_id"]`, int64 [B], is the index
        of the prompt. Raise ValueError for a prompt that is not a list of token ids, or leaves no room for a response."""
        n = whole_number("n", n, 1)
        if not is_iterable(prompts):
            raise ValueError(f"prompts is {in_a_line(prompts)}: expected a list of lists of token ids")
        rows = [token_ids(f"prompt {i}", prompt) for i, prompt in enumerate(prompts)]
        if not rows:
            raise ValueError("0 prompts: expected at least one")
        longest, limit = max(map(len, rows)), self._native.max_model_len
        if longest >= limit:
            raise ValueError(f"a prompt has {longest} tokens, but sequences at most {limit}: no room for a response")
        group = torch.arange(len(rows)).repeat_interleave(n)
        asked = [torch.tensor(rows[i], dtype=torch.int64) for i in group.tolist()]
        lengths = torch.tensor([len(ids) for ids in asked])
        answers = self._native.generate(RaggedBatch(offsets_of(lengths), {"input_ids": torch.cat(asked)}, {}), greedy)

        def behind_prompts(before: list[Tensor], of_answers: Tensor) -> Tensor:
            rows = zip(before, answers.rows(of_answers))
            return torch.cat([part for row in rows for part in row])

        zeros = [torch.zeros(len(ids)) for ids in asked]
        tokens = {
            "input_ids": behind_prompts(asked, answers.token_ids),
            "token_mask": behind_prompts(zeros, torch.ones(len(answers.token_ids))),
            "generation_logprobs": behind_prompts(zeros, answers.logprobs),
        }
        return RaggedBatch(offsets_of(lengths + answers.lengths), tokens, {"group_id": group})


class Trainer:
    """A trainer that updates a model's weights with AdamW. `temperature`, `top_p` and `top_k` are the engine's, so that
    its log-probabilities are bit-identical to the engine's. Raise ValueError for values that the engine rejects."""

    def __init__(self, model: Model, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = 0) -> None:
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._scoring = Scoring.of(as_model(given, GenerationConfig, "policy.generation"))
        self._native = C.Trainer(model.native)

    def forward_backward(self, batch: RaggedBatch, loss_fn: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
        """Compute a loss, and accumulate its gradient for the next `step`.

        `loss_fn` computes a scalar with torch operations from log-probabilities, [T] in the order of `batch.tokens`. A
        token whose `token_mask` is 0, or that `top_p` or `top_k` now removes, has log-probability 0 and no gradient. A
        prompt shared by several responses is computed once.

        Return (loss, log-probabilities). Raise ValueError if the loss is not a scalar, or is infinite or NaN."""
        if not isinstance(batch, RaggedBatch):
            raise ValueError(f"batch is {in_a_line(batch)}: expected a RaggedBatch, such as Engine.sample returns")
        wanted = wanted_tokens(batch)
        rows = (batch.by_sample(wanted.int()) > 0).nonzero().flatten().tolist()
        logprobs = torch.zeros(batch.num_tokens, dtype=self._native.out_dtype)
        if rows:
            scoring = self._scoring
            self._native.forward(
                RowBatch(batch, wanted), rows, scoring.temperature, True, True, False, logprobs,
                top_p=scoring.top_p, top_k=scoring.top_k,
            )  # fmt: skip
            logprobs, _ = without_removed_tokens(logprobs)
        loss = loss_fn(logprobs.requires_grad_())
        gradient = None
        if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
        if gradient is None:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"loss_fn gave {given}, expected a scalar tensor computed from its log-probabilities")
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}, expected a finite number: nothing was added to the gradient")
        if rows:
            self._native.backward(gradient.contiguous())
        return loss.item(), logprobs.detach()

    def step(
        self, learning_rate: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> float:  # fmt: skip
        """Update the weights with AdamW, and reset the gradient to zero.

        Return the gradient's norm before it was clipped to `max_grad_norm` (0: no limit). If the norm is not finite,
        the weights are unchanged. Raise ValueError for settings that the configuration's optimizer rejects."""
        given = {
            "lr": learning_rate,
            "betas": list(betas) if is_iterable(betas) else betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        rule = as_model(given, OptimizerKwargs, "policy.optimizer.kwargs")
        limit = number("max_grad_norm", max_grad_norm, 0, LARGEST)
        done = self._native.step(rule.lr, *rule.betas, rule.eps, rule.weight_decay, limit)
        self._native.zero_grad()
        return done.grad_norm
