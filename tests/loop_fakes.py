"""Stand-ins for policy, engine and environment with which a whole training loop runs in milliseconds."""

import json

import torch
from fakes import ByteTokenizer, EchoEnvironment, FakeGeneration, prompts
from nemo_rl_cpp.algorithms import build
from nemo_rl_cpp.algorithms.checkpointing import find_resume
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.data.interfaces import DatumSpec
from nemo_rl_cpp.environments.group import Environments

TOKENIZER = ByteTokenizer()


class Digits(EchoEnvironment):
    """Reward 1 when the response begins with an even digit."""

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
    """Counts its training calls in its weights."""

    skips_prev_logprobs = True
    learning_rate = 1e-3

    def __init__(self):
        self.events, self.version, self.trained = [], 0, []

    def weight_digest(self):
        return f"{self.version:016x}"

    def prepare_for_lp_inference(self):
        self.events.append("logprobs")

    def prepare_for_training(self):
        pass

    def finish_training(self):
        pass

    def get_logprobs(self, data):
        self.events.append("get_logprobs")
        return {"logprobs": data["generation_logprobs"].clone()}

    def train(self, data, loss_fn, timer=None):
        self.events.append("train")
        self.trained.append(data)
        self.version += 1
        valid = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        metrics = {
            "loss": [0.5],
            "token_mult_prob_error": [1.0],
            "global_valid_toks": [float(valid)],
            "lr": [1e-3],
            "num_valid_samples": [1.0],
        }
        return {
            "loss": torch.tensor([0.5]),
            "grad_norm": torch.tensor([1.0]),
            "all_mb_metrics": metrics,
            "prev_logprobs": data["generation_logprobs"],
        }

    def keep_bad_batches(self, folder):
        pass

    def non_finite_parameters(self):
        return []

    def checkpoint_bytes(self, optimizer):
        return 0

    def performance(self):
        return {}

    def save_checkpoint(self, weights_path, optimizer_path=None, *, checkpointing_cfg=None):
        self.events.append("save")
        for path in filter(None, (weights_path, optimizer_path)):
            path.mkdir(parents=True)
            (path / "version").write_text(str(self.version))


def rows(count):
    batch = prompts([f"prompt {i}:" for i in range(count)], ["t"] * count, [{} for _ in range(count)])
    return [DatumSpec(message_log=batch["message_log"][i], length=int(batch["length"][i]), extra_env_info={}, loss_multiplier=1.0,
                      idx=i, task_name="t") for i in range(count)]  # fmt: skip


def fake_run(config, policy, engine, value=None, num_rows=8):
    """A run of these stand-ins on `num_rows` prompts, resumed from its folder's newest checkpoint; nothing is printed."""
    checkpoints = CheckpointManager(config.checkpointing)
    resume = find_resume(checkpoints)
    loader = StatefulDataLoader(rows(num_rows), config.loop.prompts_per_round, drop_last=True)
    resume.load_data_position(loader, config.data)
    env = {"t": Digits()}
    run = build.assemble(config, build.Parts(
        policy=policy, generation=engine, value=value, tokenizer=TOKENIZER, loader=loader, val_loader=StatefulDataLoader(rows(3), 3),
        environments=Environments(env, env), loss_fn=None, value_loss_fn=None, logger=build.make_logger(config, resume.state),
        checkpoints=checkpoints, state=resume.state,
    ))  # fmt: skip
    run.services.progress.close()
    run.services.progress = None
    return run


def logged(run, prefix="train/"):
    merged = {}
    for line in (run.log_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        merged.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k.startswith(prefix)})
    return {step: row for step, row in merged.items() if row}
