"""The errors that docs/troubleshooting.md quotes are those that one gets, and the tests that it names are there."""

import re

import pytest
from documents.snippets import ROOT
from nemo_rl_cpp import cli

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TINY = ("check", "--config", "grpo_tiny.yaml")
ERRORS = {
    "... is unknown; did you mean ...?": (*TINY, "grpo.num_promts_per_step=3"),
    "other trainers' max_completion_length is ...": (*TINY, "+grpo.max_completion_length=3"),
    "there is a tab in this line": ("check", "--config", "tab.yaml"),
    "the configuration file ... does not exist": ("check", "--config", "child.yaml"),
    "must be an integer, not ...": (*TINY, "grpo.max_num_steps=many"),
    "does not divide the ... samples of a step": (*TINY, "policy.train_global_batch_size=100"),
    "needs loss_fn.token_level_loss: false": (*TINY, "loss_fn.sequence_level_importance_ratios=true"),
    "is 2 but no truncation is chosen": (*TINY, "loss_fn.truncated_importance_sampling_ratio=2"),
    "has no section env.maths": (*TINY, "data.train.env_name=maths"),
    "data.train.dataset_name gsm9k is unknown": (*TINY, "data.train.dataset_name=gsm9k"),
    "has positions for 8192 tokens": ("check", "--config", "grpo_arithmetic_smollm2.yaml", "policy.max_total_sequence_length=100000"),
    "needs engines with weights of their own": (*TINY, "grpo.async_grpo.enabled=true"),
    "a response ends where that is reached": (*TINY, "policy.generation.max_new_tokens=1000"),
    "unknown option --grpo.max_num_steps": (*TINY, "--grpo.max_num_steps", "10"),
    "of which there is no folder here; did you mean ...?": (*TINY, "policy.model_name=smollm2-135m-instrct"),
    "FP8 is not supported": (*TINY, "policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "policy.megatron_cfg.fp8_cfg.enabled=true"),
    "num_generations_per_prompt is 1": (*TINY, "grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"),
    "which cannot be written": (*TINY, "checkpointing.enabled=true", "checkpointing.checkpoint_dir=/proc/nothing"),
    "makes the file a configuration of a GRPO run, not of an evaluation": ("check", "--kind", "eval", "--config", "grpo_tiny.yaml"),
    "cannot be imported: there is no module my_rewards": ("check", "--config", "rewards.yaml"),
    "data.train FILE, row 3: the key 'answer' is missing": ("check", "--config", "rows.yaml"),
}  # fmt: skip
FILES = {
    "tab.yaml": "defaults: grpo_tiny.yaml\ngrpo:\n\tmax_num_steps: 3\n",
    "child.yaml": "defaults: nowhere.yaml\n",
    "rewards.yaml": "defaults: grpo_tiny.yaml\nenv:\n  _override_: true\n  reward_functions: {functions: [my_rewards.right]}\n"
    "data:\n  default: {env_name: reward_functions}\n",
    "rows.jsonl": '{"question": "1", "answer": "1"}\n{"question": "2", "answer": "2"}\n{"question": "3"}\n',
    "rows.yaml": "defaults: grpo_tiny.yaml\ndata:\n  _override_: true\n  max_input_seq_length: 16\n  train: {dataset_name: ResponseDataset, data_path: rows.jsonl, "
    "input_key: question, output_key: answer}\n  default: {env_name: reverse_digits}\n",
}


def parts(quoted: str) -> list[str]:
    """What of a quoted error is always there: not the dots, nor the placeholder FILE."""
    return [part.strip() for part in re.split(r"\.\.\.\??|FILE", quoted) if part.strip()]


@pytest.mark.parametrize("quoted", ERRORS)
def test_the_error_is_the_one_on_the_page(quoted, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert f"| `{quoted}`" in PAGE
    cli.main(list(ERRORS[quoted]))
    said = capfd.readouterr().err
    assert [part for part in parts(quoted) if part not in said] == [], said


def test_the_tests_that_are_named_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 10
    gone = [f"{file}::{test}" for file, test in named if not re.search(rf"def {test}\(", (ROOT / file).read_text())]
    assert gone == []
