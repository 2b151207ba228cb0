import json

import pytest
import tiny
import torch
from fakes import ByteTokenizer, FakeGeneration, prompts
from nemo_rl_cpp import run_eval
from nemo_rl_cpp.config import load_eval_config
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.evals import eval as evaluation
from nemo_rl_cpp.evals.results import pass_at_k
from nemo_rl_cpp.files.durable import seal_folder
from nemo_rl_cpp.hub.sources import find_policy_weights

REVERSE = [
    "tokenizer.chat_template=null", "data.dataset_name=reverse_digits", "data.env_name=reverse_digits", "data.processor=null",
    "++env.reverse_digits={}", "generation.max_new_tokens=3", "generation.vllm_cfg.max_model_len=16",
    "generation.vllm_cfg.precision=float32", "++data.num_digits=3", "++data.num_samples=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a folder with the checkpoints step_2 and step_10, which have different weights."""
    folder = tmp_path_factory.mktemp("run")
    for step, seed in ((2, 1), (10, 2)):
        run = tiny.make(folder / "logs", f"grpo.seed={seed}")
        run.policy.save_checkpoint(folder / "results" / f"step_{step}" / "policy" / "weights")
    return folder / "results"


def evaluate(model, *overrides):
    torch.set_num_threads(1)
    return evaluation.main(
        load_eval_config("evals/eval.yaml", [f"generation.model_name={model}", *REVERSE, *overrides])
    )


def test_evaluation_of_a_run_folder_loads_the_newest_checkpoint(checkpoints, tmp_path):
    newest = str(checkpoints / "step_10" / "policy" / "weights")
    assert find_policy_weights(str(checkpoints)) == newest
    assert find_policy_weights(str(checkpoints / "step_10")) == newest
    assert find_policy_weights(str(checkpoints / "step_10" / "policy")) == newest
    assert find_policy_weights(newest) == newest
    assert find_policy_weights("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert find_policy_weights(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "short", "empty"])
def test_evaluation_of_a_run_folder_skips_a_checkpoint_with_incomplete_weights(tmp_path, damage):
    for step in (2, 10):
        weights = tmp_path / f"step_{step}" / "policy" / "weights"
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_bytes(bytes(100))
        (tmp_path / f"step_{step}" / "optimizer.pt").write_bytes(bytes(100))
        seal_folder(tmp_path / f"step_{step}")
        (tmp_path / f"step_{step}" / "optimizer.pt").unlink()  # not needed for an evaluation
    assert find_policy_weights(str(tmp_path)) == str(weights)
    if damage == "short":
        (weights / "model.safetensors").write_bytes(bytes(50))
    else:
        (weights / "model.safetensors").unlink()
    if damage == "empty":  # a copy that begins
        (tmp_path / "step_10" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step_10 is passed over: "):
        assert find_policy_weights(str(tmp_path)) == str(tmp_path / "step_2" / "policy" / "weights")
    assert find_policy_weights(str(tmp_path / "step_10")) == str(weights)


def test_evaluation_score_can_be_recomputed_from_the_saved_samples(checkpoints, tmp_path, capsys):
    sampled = ("generation.temperature=1.0", "eval.num_tests_per_prompt=4", "eval.k_value=2")
    result = evaluate(checkpoints, *sampled, f"eval.save_path={tmp_path / 'out'}")
    samples = json.loads((tmp_path / "out" / "evaluation_data.json").read_text())["evaluation_data"]
    assert len(samples) == 80 and [s["sample_index"] for s in samples] == list(range(80))
    right = [sum(s["reward"] == 1 for s in samples[i : i + 4]) for i in range(0, 80, 4)]
    assert result.score == pytest.approx(sum(pass_at_k(4, n, 2) for n in right) / 20)
    assert result.mean_reward == pytest.approx(sum(s["reward"] for s in samples) / 80)
    for sample in samples:
        truth = sample["extra_env_info"]["ground_truth"]
        assert sample["prompt"] == truth[::-1] + "="
        right = sum(a == b for a, b in zip(sample["response"].strip(), truth)) / 3
        assert sample["reward"] == pytest.approx(right)
        assert sample["message_log"][1] == {"role": "assistant", "content": sample["response"]}
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["metric"] == "pass@k" and described["k_value"] == 2 and described["temperature"] == 1.0
    printed = capsys.readouterr().out
    assert f"score={result.score:.4f}" in printed and "95 % interval" in printed


def test_evaluation_responses_depend_on_the_seed_but_not_on_the_batch_size(checkpoints, tmp_path):
    sampled = ("generation.temperature=1.0", "eval.num_tests_per_prompt=3")
    texts = []
    for size, seed in ((-1, 42), (7, 42), (-1, 43)):
        folder = tmp_path / f"{size}-{seed}"
        keys = (f"generation.num_prompts_per_step={size}", f"eval.seed={seed}", f"eval.save_path={folder}")
        evaluate(checkpoints, *sampled, *keys)
        samples = json.loads((folder / "evaluation_data.json").read_text())["evaluation_data"]
        texts.append([sample["response"] for sample in samples])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert len(set(texts[0][:3])) > 1  # responses to one prompt differ


def test_evaluation_of_a_policy_gives_the_same_responses_as_evaluation_of_its_checkpoint(tmp_path):
    torch.set_num_threads(1)
    with tiny.make(tmp_path / "logs", "grpo.seed=3", "grpo.max_num_steps=1") as run:
        run.train()
        run.policy.save_checkpoint(tmp_path / "weights")
        sampled = ("generation.temperature=1.0", "eval.num_tests_per_prompt=3", "generation.num_prompts_per_step=7")
        texts = []
        for name in ("policy", "checkpoint"):
            out = tmp_path / name
            folders = f"generation.model_name={tmp_path / 'weights'}", f"eval.save_path={out}"
            config = load_eval_config("evals/eval.yaml", [*folders, *REVERSE, *sampled])
            result = run.evaluate(config) if name == "policy" else evaluation.main(config)
            saved = json.loads((out / "evaluation_data.json").read_text())["evaluation_data"]
            texts.append((result.score, [(sample["response"], sample["reward"]) for sample in saved]))
    assert texts[0] == texts[1] and len(texts[0][1]) == 60


def test_eval_command_can_repeat_the_data_set_and_supports_dry_run(checkpoints, capsys):
    arguments = ["--config", "evals/eval.yaml", f"generation.model_name={checkpoints}", *REVERSE, "data.repeat=2"]
    assert run_eval.main(arguments) == 0
    assert "40 prompts" in capsys.readouterr().out
    assert run_eval.main([*arguments, "--dry-run"]) == 0
    assert "num_tests_per_prompt: 1" in capsys.readouterr().out
    assert run_eval.main([*arguments, "eval.k_value=3"]) == 2


def test_repetitions_of_a_data_set_do_not_narrow_the_confidence_interval(checkpoints):
    once, repeated = evaluate(checkpoints), evaluate(checkpoints, "data.repeat=4")
    assert (repeated.prompts, repeated.score, repeated.interval) == (80, once.score, once.interval)


def sums(metric, *overrides):
    """Return the evaluation of a fake model whose responses to two sums are correct in half of the cases."""
    sampled = [f"eval.metric={metric}", "eval.num_tests_per_prompt=3", "eval.k_value=3", "generation.temperature=1"]
    config = load_eval_config("evals/arithmetic_smollm2.yaml", [*sampled, *overrides])
    row = {"length": 1, "loss_multiplier": 1.0, "task_name": "arithmetic", "stop_strings": ["\n"]}
    tokenizer = ByteTokenizer()
    rows = []
    for i, text in enumerate(["1 + 1 = ", "2 + 0 = "]):
        log = [{"role": "user", "content": text, "token_ids": torch.tensor(tokenizer.encode(text))}]
        rows.append({**row, "idx": i, "message_log": log, "extra_env_info": {"ground_truth": "2"}})
    answers = {"1": ["2\n", "3\n", "2\n"], "2": ["no idea", "no idea", "2\n"]}
    generation = FakeGeneration(lambda prompt, key: answers[prompt[0]][key[2]])
    loader = StatefulDataLoader(rows, 2)
    return evaluation.run_env_eval(generation, loader, create_env("arithmetic", {}), config)


def test_majority_vote_cons_at_k_scores_the_most_frequent_answer(capsys):
    assert sums("cons@k").score == 0.5  # 2, 3, 2 elect 2; two responses without an answer outvote the right one
    assert sums("pass@k").score == 1.0
    assert sums("pass@k", "eval.k_value=1").score == 0.5
    assert "metric=cons@3" in capsys.readouterr().out


def test_evaluation_prints_environment_metrics_and_incorrect_responses(capsys):
    result = sums("pass@k")
    assert result.metrics["well_formed"] == pytest.approx(4 / 6)
    printed = capsys.readouterr().out
    names = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert names == [
        "model", "data", "pass@3", "mean reward", "tokens a response", "cut off", "well_formed", "accuracy_of_well_formed", "time"
    ]  # fmt: skip
    assert printed.endswith("wrong: 1 + 1 =\n  3\nwrong: 2 + 0 =\n  no idea\nwrong: 2 + 0 =\n  no idea\n")


def test_majority_vote_cons_at_k_without_extracted_answers_is_an_error():
    config = load_eval_config("evals/gsm8k.yaml", ["eval.metric=cons@k"])
    with pytest.raises(ValueError, match="cons@k votes on answers"):
        evaluation.prompt_scores([0.0] * 4, [None] * 4, config)


@pytest.mark.parametrize("turns, score", [(3, 1.0), (2, 3 / 7), (1, 1 / 7)])
def test_multi_turn_evaluation_scores_conversations_of_at_most_max_rollout_turns(turns, score, capsys):
    """The player uses binary search: one guess for 4, two for 2 and 6, three for the others."""
    path = {"?4": "+", "?4+": "6", "?4-": "2", "?4+6+": "7", "?4+6-": "5", "?4-2+": "3", "?4-2-": "1"}
    config = load_eval_config(
        "evals/reverse_digits.yaml",
        [f"eval.max_rollout_turns={turns}", "data.dataset_name=guess_number", "~data.num_digits", "data.env_name=guess_number",
         "++env.guess_number={}", "generation.vllm_cfg.max_model_len=64"],
    )  # fmt: skip
    tokenizer = ByteTokenizer()
    rows = [
        {"length": 1, "loss_multiplier": 1.0, "idx": i, "task_name": "guess_number", "stop_strings": list("0123456789"), "extra_env_info": {"secret": i + 1},
         "message_log": [{"role": "user", "content": "?", "token_ids": torch.tensor(tokenizer.encode("?"))}]}
        for i in range(7)
    ]  # fmt: skip
    environment = create_env("guess_number", {"higher": "+", "lower": "-", "stop_strings": list("0123456789")})
    generation = FakeGeneration(lambda prompt, key: path.get(prompt, "4"))
    result = evaluation.run_env_eval(generation, StatefulDataLoader(rows, 7), environment, config)
    assert result.score == pytest.approx(score)
    assert result.metrics["avg_turns_per_sample"] == pytest.approx({3: 17, 2: 13, 1: 7}[turns] / 7)
    assert ("turns" in capsys.readouterr().out) == (turns > 1)


def long(completions, **columns):
    return [float(len(text.strip()) == 3) for text in completions]


def digits(completions, **columns):
    return [float(text.strip().isdigit()) for text in completions]


@pytest.mark.parametrize("as_parts", [True, False])
def test_evaluation_applies_the_reward_weights_of_training_to_reward_components(as_parts):
    """As in training, a response that gets both components has reward 0.9 + 0.1 and is correct."""
    environment = RewardFunctionEnvironment([long, digits], [0.9, 0.1], as_parts=as_parts)
    config = load_eval_config("evals/eval.yaml", ["generation.model_name=none", *REVERSE])
    answers = {"a": "123", "b": "abc", "c": "1"}
    batch = prompts(list(answers), ["reverse_digits"] * 3, [{}, {}, {}])
    result, samples = evaluation.measure(
        FakeGeneration(lambda prompt, key: answers[prompt]), [batch], environment, config
    )
    assert [sample["reward"] for sample in samples] == pytest.approx([1.0, 0.9, 0.1])
    assert result.score == pytest.approx(1 / 3) and samples[0]["reward"] == 1.0


def test_evaluation_of_a_file_is_saved_and_shown_under_the_name_of_the_file(tmp_path, capsys):
    folder = tmp_path / "out"
    sums("pass@k", "data.dataset_name=sums.jsonl", "~data.max_number", "~data.num_shots", f"eval.save_path={folder}")
    assert json.loads((folder / "config.json").read_text())["dataset_name"] == "sums.jsonl"
    assert "sums.jsonl, 2 prompts" in capsys.readouterr().out
