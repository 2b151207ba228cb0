import importlib

import pytest
import torch
from nemo_rl_cpp.compat.algorithms.interfaces import LossFunction, LossType
from nemo_rl_cpp.compat.data.interfaces import DatumSpec, TaskDataSpec
from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.compat.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl_cpp.compat.environments.utils import create_env, register_env
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.environments.remote import shut_down
from nemo_rl_cpp.rollouts.rollouts import calculate_rewards

NAMES = {
    "algorithms.advantage_estimator": "GRPOAdvantageEstimator GeneralizedAdvantageEstimator ReinforcePlusPlusAdvantageEstimator",
    "algorithms.grpo": "MasterConfig ReinforcePlusPlusAdvantageEstimator grpo_train scale_rewards",
    "algorithms.interfaces": "LossFunction LossInputType LossType",
    "algorithms.loss": "ClippedPGLossConfig ClippedPGLossFn LossFunction LossType MseValueLossFn",
    "algorithms.loss.interfaces": "LossFunction LossInputType LossType",
    "algorithms.loss.loss_functions": "ClippedPGLossConfig ClippedPGLossFn MseValueLossFn",
    "algorithms.loss_functions": "ClippedPGLossConfig ClippedPGLossFn MseValueLossFn",
    "algorithms.ppo": "MasterConfig ppo_train",
    "algorithms.reward_functions": "apply_reward_shaping",
    "data.datasets": "AllTaskProcessedDataset extract_necessary_env_names load_response_dataset",
    "data.datasets.raw_dataset": "RawDataset",
    "data.datasets.response_datasets": "ResponseDataset",
    "data.interfaces": "DatumSpec LLMMessageLogType TaskDataProcessFnCallable TaskDataSpec",
    "data.processors": "math_data_processor math_hf_data_processor register_processor",
    "distributed.batched_data_dict": "BatchedDataDict",
    "distributed.virtual_cluster": "RayVirtualCluster",
    "distributed.worker_groups": "RayWorkerGroup",
    "environments.code_environment": "CodeEnvironment",
    "environments.interfaces": "EnvironmentInterface EnvironmentReturn",
    "environments.math_environment": "MathEnvironment",
    "environments.utils": "create_env register_env",
    "models.interfaces": "PolicyInterface ValueInterface",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_imported_in_nemo_rls_guides_exist_in_the_compat_modules(module):
    found = importlib.import_module(f"nemo_rl_cpp.compat.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


class Lengths(EnvironmentInterface):
    """Scores a response by its length, and ends the conversation."""

    def __init__(self, config):
        self.config = config

    def step(self, message_log_batch, metadata):
        count = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=torch.tensor([self.config["weight"] * len(log[-1]["content"]) for log in message_log_batch]),
            terminateds=torch.ones(count, dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"mean": float(batch["total_reward"].mean())}


class Plain(Lengths):
    """Answers with a plain tuple of lists."""

    def step(self, message_log_batch, metadata):
        answer = super().step(message_log_batch, metadata)
        return (*answer[:3], answer.rewards.tolist(), [True] * len(metadata), None)


@pytest.mark.parametrize("name", ["Lengths", "Plain"])
def test_environment_registered_with_nemo_rls_api_scores_responses(monkeypatch, name):
    monkeypatch.setattr("nemo_rl_cpp.environments.loading.ENV_REGISTRY", dict(ENV_REGISTRY))
    register_env(env_name="lengths", actor_class_fqn=f"{__name__}.{name}")
    environment = create_env(env_name="lengths", env_config={"weight": 0.5})
    try:
        logs = [[{"role": "assistant", "content": text}] for text in ("a", "abc")]
        batch = BatchedDataDict(task_name=["l", "l"], message_log=logs, extra_env_info=[{"i": 0}, {"i": 1}])
        result = calculate_rewards(batch, {"l": environment})
        assert result.rewards.tolist() == [0.5, 1.5] and result.terminateds.tolist() == [True, True]
        assert result.metadata == [{"i": 0}, {"i": 1}]
    finally:
        shut_down(environment)


class SimpleAverageLoss(LossFunction):
    """The loss of NeMo RL's page on loss functions."""

    loss_type = LossType.TOKEN_LEVEL

    def __call__(self, next_token_losses, data, total_valid_tokens_or_seqs):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        return (next_token_losses * mask).sum() / (total_valid_tokens_or_seqs + 1e-8)


def test_example_loss_of_nemo_rls_guides_is_independent_of_the_micro_batch_size():
    losses = torch.arange(32.0).reshape(2, 16)
    data = BatchedDataDict(token_mask=torch.tensor([[1] * 10 + [0] * 6, [1] * 6 + [0] * 10]), sample_mask=torch.ones(2))
    count = data["token_mask"].sum()
    parts = [SimpleAverageLoss()(losses[r : r + 1], {k: v[r : r + 1] for k, v in data.items()}, count) for r in (0, 1)]
    torch.testing.assert_close(SimpleAverageLoss()(losses, data, count), parts[0] + parts[1])
    assert parts[0].item() == pytest.approx(45 / 16) and parts[1].item() == pytest.approx((16 * 6 + 15) / 16)


def test_example_data_processor_of_nemo_rls_guides_works_in_a_data_set():
    from nemo_rl_cpp.compat.data.datasets import AllTaskProcessedDataset

    def processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec:
        ids = torch.tensor([ord(c) for c in datum_dict["text"]])
        message = {"role": "user", "content": datum_dict["text"], "token_ids": ids}
        return {"message_log": [message], "length": len(ids), "extra_env_info": {}, "loss_multiplier": 1.0, "idx": idx}

    spec = TaskDataSpec(task_name="letters")
    data = AllTaskProcessedDataset(
        [{"task_name": "letters", "text": "ab"}], tiny_tokenizer(), spec, {"letters": (spec, processor)},
        max_seq_length=8,
    )  # fmt: skip
    assert len(data) == 1 and data[0]["message_log"][0]["token_ids"].tolist() == [97, 98] and data[0]["length"] == 2
