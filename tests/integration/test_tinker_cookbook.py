"""Unchanged recipes of tinker-cookbook run to completion on our Tinker server, with local folders as data sets."""

import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
from nemo_rl_cpp import Engine, Model
from safetensors.torch import load_file, save_file
from tinker_server import KEY, make_model, serving

pytest.importorskip("tinker_cookbook")

STEPS, KL = 2, "optim/kl_sample_train_v1"
SHORT = ["max_steps=2", "behavior_if_log_dir_exists=delete", "eval_every=0"]
CHAT = [*SHORT, "renderer_name=role_colon", "batch_size=4", "max_length=200"]
ROLLOUTS = [*SHORT, "renderer_name=role_colon", "group_size=4", "max_tokens=8"]
RECIPES = {
    "sl_loop": ["batch_size=4", "max_length=200", "lora_rank=2", "max_steps=2"],
    "rl_loop": ["batch_size=2", "group_size=4", "max_tokens=8", "lora_rank=2", "max_steps=2", "loss_fn=importance_sampling"],
    "chat_sl.train": [*CHAT, "lora_rank=2"],
    "math_rl.train": [*ROLLOUTS, "lora_rank=2", "groups_per_batch=4", "loss_fn=importance_sampling"],
    "preference.dpo.train": [o for o in CHAT if not o.startswith("eval_every")],
    "preference.shorter.train": [*ROLLOUTS, "batch_size=2"],
    "multiplayer_rl.guess_number.train": [
        *SHORT, "renderer_name=role_colon", "group_size=2", "batch_size=1", "max_tokens=4",
    ],
    "distillation.on_policy_distillation": [*ROLLOUTS, "lora_rank=2", "groups_per_batch=2", "teacher_model=MODEL"],
    "distillation.on_policy_multi_teacher": [
        *ROLLOUTS, "lora_rank=2", "deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2", "deepmath_teacher_model=MODEL",
        "tulu3_teacher_model=MODEL",
    ],
    "distillation.off_policy_reasoning": [*CHAT, "lora_rank=2", "buffer_size=4", "max_prompts=8"],
    "prompt_distillation.train": [*CHAT, "lora_rank=2", "file_path=conversations.jsonl"],
    "rl_numerics_check.train": [
        *SHORT, "renderer_name=qwen3_instruct", "lora_rank=2", "learning_rate=1e-3", "groups_per_batch=2", "group_size=12",
        "max_tokens=16", "max_trajectory_tokens=2500", "task.num_pages_min=2", "task.num_pages_max=3", "task.page_chars=60",
    ],
}  # fmt: skip
SAMPLER_AND_TRAINER = ("math_rl.train", "preference.shorter.train", "multiplayer_rl.guess_number.train")


def write_rows(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(root: Path) -> None:
    """Write a local folder with the name of each data set that the recipes load."""
    said = [({"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"it is {i}"}) for i in range(8)]
    chats = [{"messages": list(messages)} for messages in said]
    write_rows(root / "conversations.jsonl", chats)
    for split in ("train", "test"):
        write_rows(root / f"HuggingFaceH4/no_robots/{split}.jsonl", chats)
        pairs = [
            {key: f"\n\nHuman: say {i}\n\nAssistant: {said}" for key, said in (("chosen", i), ("rejected", "no"))}
            for i in range(8)
        ]
        write_rows(root / f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
        asked = [{"question": f"what is {i}?", "answer": f"#### {i}"} for i in range(8)]
        write_rows(root / f"openai/gsm8k/main/{split}.jsonl", asked)
    write_rows(root / "allenai/tulu-3-sft-mixture/train.jsonl", chats)
    write_rows(root / "zwhe99/DeepMath-103K/train.jsonl", [{"question": f"what is {i}?"} for i in range(8)])
    said = [{"conversations": [{"from": "human", "value": "say"}, {"from": "gpt", "value": f"{i}"}]} for i in range(8)]
    write_rows(root / "open-thoughts/OpenThoughts3-1.2M/train.jsonl", said)
    words = ["after", "the", "time", "which", "until", "known", "when"]
    text = [{"text": " ".join(words[(i * 7 + j * j) % 7] for j in range(12))} for i in range(400)]
    write_rows(root / "Salesforce/wikitext/wikitext-103-raw-v1/train.jsonl", text)
    for name, config in (("openai/gsm8k", "main"), ("Salesforce/wikitext", "wikitext-103-raw-v1")):
        splits = "".join(
            f"  - split: {file.stem}\n    path: {config}/{file.name}\n"
            for file in sorted((root / name / config).iterdir())
        )
        (root / name / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{splits}---\n")


def make_ending_model(folder: Path) -> Path:
    """Write a tiny model that ends some of its responses early, so that rewards vary."""
    make_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    model = Model(str(folder))
    said = Engine(model, seed=1, max_new_tokens=16).sample([[3 + i] for i in range(8)], n=16).tokens["input_ids"]
    often = [token for token, _ in Counter(said.tolist()).most_common(12)][-1]  # about one token in twenty
    tensors, end = load_file(folder / "model.safetensors"), config["eos_token_id"]
    head = tensors["lm_head.weight"]
    head[[often, end]] = head[[end, often]]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("cookbook")
    write_data(root)
    with serving(root, make_ending_model) as (url, service):
        service.base.names = (str(root / "model"),)
        yield url, root


def run_recipe(name: str, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Run a recipe as its command does, and return the metrics of its steps."""
    import datasets
    from tinker_cookbook import model_info

    url, root = served
    monkeypatch.chdir(root)
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
    # docs/tinker.md: for the loops that have no option `renderer_name`
    monkeypatch.setattr(model_info, "get_recommended_renderer_names", lambda name: ["role_colon"])
    options = [option.replace("MODEL", str(root / "model")) for option in RECIPES[name]]
    monkeypatch.setattr(sys, "argv", [name, f"model_name={root / 'model'}", f"log_path={root / name}", *options])
    runpy.run_module(f"tinker_cookbook.recipes.{name}", run_name="__main__")
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "rl_numerics_check.train"])
def test_tinker_cookbook_recipe_runs_to_completion_on_this_packages_tinker_server(name, served, monkeypatch):
    metrics = run_recipe(name, served, monkeypatch)
    assert len({step.get("step", number) for number, step in enumerate(metrics)}) >= STEPS
    if name in SAMPLER_AND_TRAINER:
        assert {step[KL] for step in metrics if KL in step} == {0.0}


def test_tinker_cookbook_numerics_check_reports_zero_kl_between_sampler_and_trainer(served, monkeypatch):
    steps = [step for step in run_recipe("rl_numerics_check.train", served, monkeypatch) if KL in step]
    assert len(steps) == STEPS
    for step in steps:
        assert step["env/all/by_group/frac_mixed"] > 0 and step["unclipped_grad_l2:mean"] > 0
        assert step[KL] == step["optim/kl_sample_train_v2"] == 0.0
