"""Fakes of policy, engine and environment, with which a whole training loop runs in milliseconds."""

import json
import warnings
from unittest.mock import patch

import torch
from fakes import ByteTokenizer, EchoEnvironment, FakeGeneration, prompts
from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.algorithms.parts import RunData
from nemo_rl_cpp.algorithms.step import Critic, NoCritic
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.data.interfaces import DatumSpec
from nemo_rl_cpp.environments.loading import Environments

TOKENIZER = ByteTokenizer()


class Digits(EchoEnvironment):
    """An environment with reward 1 if the response begins with an even digit."""

    def step(self, message_log_batch, metadata):
        answer = super().step(message_log_batch, [{"turns": 1}] * len(metadata))
        said = [log[-1]["content"] for log in message_log_batch]
        rewards = torch.tensor([float(text[:1] in ("0", "2", "4", "6", "8")) for text in said])
        return answer._replace(
            observations=[{"role": "environment", "content": ""}] * len(said), rewards=rewards, metadata=metadata
        )


class Engine(FakeGeneration):
    events: list

    def prepare_for_generation(self, *args, **kwargs):
        self.events.append("prepare_for_generation")
        return True

    def generate(self, data, greedy=False):
        self.events.append("generate")
        return super().generate(data, greedy)

    def finish_generation(self, *args, **kwargs):
        self.events.append("finish_generation")
        return True

    def weight_digest(self):
        return self.policy.weight_digest()


class Policy:
    """A policy whose only weight is the number of its training calls."""

    skips_prev_logprobs = True
    learning_rate = 1e-3

    def __init__(self):
        self.events, self.version, self.trained = [], 0, []

    def weight_digest(self):
        return f"{self.version:016x}"

    def train(self, data, loss_fn):
        self.events.append("train")
        self.trained.append(data)
        self.version += 1
        valid = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        metrics = {
            "loss": [0.5], "token_mult_prob_error": [1.0], "global_valid_toks": [float(valid)], "lr": [1e-3],
            "num_valid_samples": [1.0],
        }  # fmt: skip
        loss, norm = torch.tensor([0.5]), torch.tensor([1.0])
        prev = data["generation_logprobs"]
        return {"loss": loss, "grad_norm": norm, "all_mb_metrics": metrics, "prev_logprobs": prev}

    def keep_bad_batches(self, folder):
        pass

    def non_finite_parameters(self):
        return []

    def checkpoint_bytes(self, optimizer):
        return 0

    def performance(self):
        return {}

    def save_checkpoint(self, weights_path, optimizer_path=None):
        self.events.append("save")
        for path in filter(None, (weights_path, optimizer_path)):
            path.mkdir(parents=True)
            (path / "version").write_text(str(self.version))


def rows(count):
    batch = prompts([f"prompt {i}:" for i in range(count)], ["t"] * count, [{} for _ in range(count)])
    return [DatumSpec(message_log=batch["message_log"][i], length=int(batch["length"][i]), extra_env_info={}, loss_multiplier=1.0,
                      idx=i, task_name="t") for i in range(count)]  # fmt: skip


class Warns:
    """A progress line that shows nothing and issues its warnings as Python warnings."""

    def step(self, step, metrics):
        pass

    def print(self, text):
        if text.startswith("warning: "):
            warnings.warn(text, stacklevel=2)

    def finish(self, rows, title):
        pass


def fake_run(folder, section, *overrides, policy=None, critic=None, respond=None, num_rows=8):
    """Return a run of these fakes with 2 prompts x 4 generations a step, on `num_rows` prompts, resumed from its newest
    checkpoint. Nothing is printed."""
    load = {"grpo": load_grpo_config, "ppo": load_ppo_config}[section]
    config = load(
        f"{section}_tiny.yaml",
        [
            f"{section}.num_prompts_per_step=2", f"{section}.num_generations_per_prompt=4", f"{section}.max_num_steps=3",
            "policy.train_global_batch_size=8", "policy.max_total_sequence_length=64", f"{section}.val_period=0",
            f"{section}.val_at_end=false", f"logger.log_dir={folder / 'logs'}",
            f"checkpointing.checkpoint_dir={folder / 'checkpoints'}", "checkpointing.save_period=2",
            "checkpointing.metric_name=null", *overrides,
        ],
    )  # fmt: skip
    env, policy = {"t": Digits()}, policy or Policy()
    engine = Engine(respond=respond, tokenizer=TOKENIZER, max_new_tokens=4)
    engine.events, engine.policy = policy.events, policy
    policy.create_generation = lambda config, seed: engine
    stand_ins = {
        "make_tokenizer": lambda policy: TOKENIZER,
        "make_dataloader": lambda data, rows, size, *more: StatefulDataLoader(rows, size, drop_last=True),
        "make_critic": lambda *parts: NoCritic() if critic is None else Critic(critic(policy.events), None),
    }
    data = RunData(rows(num_rows), rows(3), Environments(env, env))
    with (
        patch.multiple("nemo_rl_cpp.algorithms.parts", **stand_ins),
        patch("nemo_rl_cpp.algorithms.build.make_loss", lambda *given: None),
        patch("nemo_rl_cpp.algorithms.checkpointing.announce"),
    ):
        run = build_run(config, data=lambda config, tokenizer: data, policy_factory=lambda **given: policy)
    run.terminal.progress.close()
    run.terminal.progress = Warns()
    return run


def train(run):
    run.train()
    return run


def logged(run, prefix="train/"):
    merged = {}
    for line in (run.log_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        merged.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k.startswith(prefix)})
    return {step: row for step, row in merged.items() if row}
