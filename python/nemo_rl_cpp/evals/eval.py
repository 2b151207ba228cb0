"""The run of an evaluation, from its configuration to its score."""

import inspect
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.fold import fold_text
from nemo_rl_cpp.config.master import EvalMasterConfig as MasterConfig
from nemo_rl_cpp.config.master import checked
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.checkpoint_template import differences_from_run
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, load_eval_dataset
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.tokenizer import get_tokenizer
from nemo_rl_cpp.distributed.cluster import check_device, use_threads
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.environments.interfaces import Environment, EnvironmentReturn, checked_return
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.environments.remote import answer_of, call_remote, shut_down
from nemo_rl_cpp.environments.response_data import Limits, inspect_rows, say
from nemo_rl_cpp.environments.single_turn import assistant_text
from nemo_rl_cpp.errors import say_once
from nemo_rl_cpp.evals.results import EvalResult, cons_at_k, interval_of_mean, pass_at_k, save_evaluation_data, show
from nemo_rl_cpp.hub.sources import find_policy_weights
from nemo_rl_cpp.models.generation.base_engine import BaseEngine
from nemo_rl_cpp.models.generation.hf import HfGeneration
from nemo_rl_cpp.models.generation.interfaces import generating
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.hf.trained import open_frozen
from nemo_rl_cpp.models.hf_config import max_positions
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.rollouts.rollout_metrics import combine_rollout_metrics, environment_metrics, rollout_metrics
from nemo_rl_cpp.rollouts.rollouts import Conversations, merged_returns, repeat_prompts, visible
from nemo_rl_cpp.user_code import serve


def main(config: MasterConfig) -> EvalResult:
    """Evaluate the configured model, print and return the result. Raise ConfigError if `config` is invalid."""
    config = checked(config, MasterConfig)
    folder = find_policy_weights(config.generation.model_name)
    for remark in differences_from_run(Path(folder), config.tokenizer):
        warnings.warn(remark, stacklevel=2)
    if config.tokenizer.name == config.generation.model_name:
        config.tokenizer.name = folder
    config.generation.model_name = folder
    with _environment(config) as environment:  # it starts its processes before this process starts threads
        tokenizer = get_tokenizer(config.tokenizer, section="tokenizer")
        loader = make_loader(config, tokenizer)
        return run_env_eval(make_generation(config, tokenizer), loader, environment, config)


def evaluate_policy(
    policy: PolicyInterface, tokenizer: TokenizerType, config: MasterConfig, longest: int
) -> EvalResult:
    """Evaluate the current weights of a policy in training, with its model, precision and tokenizer, and at most
    `longest` or `generation.vllm_cfg.max_model_len` tokens. Raise ConfigError if `config` is invalid."""
    config = checked(config, MasterConfig)
    with _environment(config) as environment:
        loader = make_loader(config, tokenizer)
        _limit_length(config, longest)
        generation = policy.create_generation(config.generation, seed=config.eval.seed)
        try:
            return run_env_eval(generation, loader, environment, config)
        finally:
            generation.shutdown()


@contextmanager
def _environment(config: MasterConfig) -> Iterator[Environment]:
    """Make the environment, and end its processes after the `with` block."""
    environment = create_env(env_name=config.data.env_name, env_config=config.env[config.data.env_name])
    try:
        yield environment
    finally:
        shut_down(environment)


def _limit_length(config: MasterConfig, longest: int) -> None:
    """Reduce `generation.vllm_cfg.max_model_len` to `longest` tokens, without marking the key as set by the user."""
    engine = config.generation.vllm_cfg
    engine.__dict__["max_model_len"] = min(engine.max_model_len or longest, longest)


def make_loader(config: MasterConfig, tokenizer: TokenizerType) -> StatefulDataLoader:
    """Load the data set of the section `data`, report problems of its rows, and return a loader of its prompts."""
    raw = load_eval_dataset(config.data)
    limit, size = config.data.max_input_seq_length, config.generation.num_prompts_per_step
    environment = config.data.env_name, config.env.get(config.data.env_name)
    say(inspect_rows(raw, raw.dataset, tokenizer, Limits(limit), "data", environment))
    dataset = AllTaskProcessedDataset(raw.dataset, tokenizer, raw.task_spec, raw.processor, max_seq_length=limit)
    return StatefulDataLoader(dataset, len(dataset) if size == -1 else size)


def make_generation(
    config: MasterConfig, tokenizer: TokenizerType, length_key: str = "generation.vllm_cfg.max_model_len"
) -> BaseEngine:
    """Return the generation engine, native or transformers, with its own copy of the weights, for sequences of the
    configured length or at most the model's positions. `length_key` names the length in errors."""
    if (text := fold_text(config)) is not None:
        say_once("warning", text)
    use_threads(config.cluster)
    engine = config.generation.vllm_cfg
    given = engine.max_model_len if "max_model_len" in engine.model_fields_set else None
    if config.generation.backend == "hf":
        return _hf_generation(config, tokenizer, given)
    folder = open_model_folder(
        find_policy_weights(config.generation.model_name), max_length=given, length_key=length_key, key="generation.model_name"
    )  # fmt: skip
    if given is None:
        _limit_length(config, max_positions(folder.config))
    dtype = getattr(torch, engine.precision)
    folder = replace(folder, max_length=engine.max_model_len)
    folder = folder.quantised(config.generation.quantization, "generation.quantization")
    folder.check_device(config.cluster.device)
    folder.check_weights()
    model = C.DecoderModel(folder.native(), dtype, False, check_device(config.cluster.device))
    folder.fill(model)
    ends = end_token_ids(folder.path, folder.config, tokenizer)
    return NativeGeneration(
        native_runner(model, config.generation), config.generation, tokenizer, end_token_ids=ends, seed=config.eval.seed
    )


def _hf_generation(config: MasterConfig, tokenizer: TokenizerType, given: int | None) -> BaseEngine:
    name, precision = find_policy_weights(config.generation.model_name), config.generation.vllm_cfg.precision
    folder, module = open_frozen(name, precision, device=check_device(config.cluster.device), longest=given)
    if given is None and folder.positions is not None:
        _limit_length(config, folder.positions)
    ends = end_token_ids(folder.path, folder.raw, tokenizer)
    return HfGeneration(module, config.generation, tokenizer, end_token_ids=ends, seed=config.eval.seed)


def run_env_eval(
    vllm_generation: BaseEngine, dataloader: Iterable[BatchedDataDict], env: Environment, master_config: MasterConfig
) -> EvalResult:
    """Generate `eval.num_tests_per_prompt` responses per prompt, score them (reward 1: correct), save and print the
    result, and return it. Sampling is seeded by (eval.seed, "eval", prompt index, response index), whatever
    num_prompts_per_step is. Raise ValueError for cons@k if the environment extracts no answers."""
    result, samples = measure(vllm_generation, dataloader, env, master_config)
    if master_config.eval.save_path is not None:
        save_evaluation_data(samples, master_config, Path(master_config.eval.save_path))
    show(result, samples, master_config)
    return result


def measure(
    generation: BaseEngine, dataloader: Iterable[BatchedDataDict], env: Environment, config: MasterConfig
) -> tuple[EvalResult, list[dict[str, object]]]:
    """Generate and score the responses to all prompts. Return the result and one sample (dictionary) per response."""
    n = config.eval.num_tests_per_prompt
    samples: list[dict[str, object]] = []
    rounds: list[tuple[int, dict[str, float]]] = []
    start = time.perf_counter()

    def work() -> None:
        with generating(generation):
            for batch in dataloader:
                first = len(samples)
                some, metrics = _answer(repeat_prompts(batch, n, first // n, stream="eval"), generation, env, config)
                samples.extend({**sample, "sample_index": first + i} for i, sample in enumerate(some))
                rounds.append((len(some), metrics))
                seconds = time.perf_counter() - start
                print(f"{len(samples) // n} prompts, {len(samples)} responses, {seconds:.1f} s", flush=True)

    serve(work)
    rewards = [sample["reward"] for sample in samples]
    scores = prompt_scores(rewards, [sample["extracted_answer"] for sample in samples], config)
    rows = len(scores) // config.data.repeat  # a prompt that data.repeat repeats counts once in the interval
    result = EvalResult(
        score=math.fsum(scores) / len(scores),
        interval=interval_of_mean([math.fsum(scores[row::rows]) / config.data.repeat for row in range(rows)]),
        prompts=len(scores),
        mean_reward=math.fsum(rewards) / len(rewards),
        seconds=time.perf_counter() - start,
        metrics=combine_rollout_metrics(rounds),
    )
    return result, samples


def _answer(
    batch: BatchedDataDict, generation: BaseEngine, env: Environment, config: MasterConfig
) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Answer a batch of prompts, and return (one sample per response, metrics of rollouts and environment)."""
    prompts = ["\n".join(message["content"] for message in log) for log in batch["message_log"]]
    conversations = Conversations(batch, generation.tokenizer, config.generation.vllm_cfg.max_model_len)
    answers: list[str | None] = [None] * batch.size
    for _ in range(config.eval.max_rollout_turns):
        if not conversations.active:
            break
        turn, rows = conversations.begin(), conversations.active
        conversations.respond(turn, generation.generate(turn.inputs))
        scored = _score(turn.active, env, config.data.env_name)
        for row, answer in zip(rows, scored.answers or [None] * len(rows)):
            answers[row] = answer
        conversations.observe(turn, scored)
    batch = conversations.finish()
    samples = [
        {
            "prompt": prompts[row],
            "response": assistant_text(log),
            "extracted_answer": answers[row],
            "reward": batch["total_reward"][row].item(),
            "message_log": log,
            "extra_env_info": batch["extra_env_info"][row],
            "truncated": bool(batch["truncated"][row]),
        }
        for row, log in enumerate(map(visible, batch["message_log"]))
    ]
    return samples, rollout_metrics(conversations.stats) | environment_metrics({"": env})


def _score(active: BatchedDataDict, env: Environment, name: str) -> EnvironmentReturn:
    step = getattr(env, "_instance", env).step
    takes_answers = "return_extracted_answer" in inspect.signature(step).parameters
    options = {"return_extracted_answer": True} if takes_answers else {}
    logs = [visible(log) for log in active["message_log"]]
    scored = answer_of(env, call_remote(env, "step", logs, active["extra_env_info"], **options), name)
    return merged_returns([(list(range(len(logs))), checked_return(scored, len(logs), name))], len(logs))


def prompt_scores(rewards: list[float], answers: list[str | None], config: MasterConfig) -> list[float]:
    """Return pass@k or cons@k of each prompt. Raise ValueError for cons@k if no response has an answer."""
    wanted, n = config.eval, config.eval.num_tests_per_prompt
    votes = wanted.metric == "cons@k"
    if votes and all(answer is None for answer in answers):
        raise ValueError(
            "eval.metric=cons@k votes on answers, but no answer was found in any response (environment "
            f"{config.data.env_name}): use an environment that extracts answers, or eval.metric=pass@k"
        )
    of_prompts = [slice(start, start + n) for start in range(0, len(rewards), n)]
    if votes:
        return [cons_at_k(rewards[own], answers[own], wanted.k_value) for own in of_prompts]
    return [pass_at_k(n, rewards[own].count(1), wanted.k_value) for own in of_prompts]
