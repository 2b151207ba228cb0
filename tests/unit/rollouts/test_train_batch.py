import torch
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.rollouts.batches import build_train_batch, spoken_by_assistant


def message(role, ids, logprobs=None):
    made = {"role": role, "content": "", "token_ids": torch.tensor(ids, dtype=torch.int64)}
    if logprobs is not None:
        made["generation_logprobs"] = torch.tensor(logprobs)
    return made


def samples():
    """Return two samples: one with two sampled responses and an observation between them, one with a scripted assistant
    message in its prompt."""
    logs = [
        [
            message("user", [1, 2]),
            message("assistant", [3], [-0.5]),
            message("environment", [4]),
            message("assistant", [5, 6], [-1.0, -2.0]),
        ],
        [message("user", [1]), message("assistant", [7]), message("user", [8]), message("assistant", [9], [-3.0])],
    ]
    return BatchedDataDict(
        message_log=logs, length=torch.tensor([2, 3]), loss_multiplier=torch.tensor([1.0, 1.0]),
        truncated=torch.tensor([False, True]), total_reward=torch.tensor([1.0, 0.0]), group_id=torch.tensor([4, 4]),
    )  # fmt: skip


def test_grpo_trains_only_on_tokens_sampled_by_the_policy():
    batch = build_train_batch(samples(), pad_token_id=99)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6], [1, 7, 8, 9, 99, 99]]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0]]
    assert batch["generation_logprobs"].tolist() == [[0, 0, -0.5, 0, -1, -2], [0, 0, 0, -3, 0, 0]]
    assert batch["input_lengths"].tolist() == [6, 4]
    assert batch["rewards"].tolist() == [1.0, 0.0] and batch["group_id"].tolist() == [4, 4]


def test_ppo_trains_on_tokens_of_every_assistant_message():
    batch = build_train_batch(samples(), pad_token_id=0, is_trained=spoken_by_assistant)
    assert batch["token_mask"].tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 0, 1, 0, 0]]
    assert (
        batch.lacks_generation_logprobs and not build_train_batch(samples(), pad_token_id=0).lacks_generation_logprobs
    )


def test_training_batch_rows_are_padded_to_a_multiple_of_make_sequence_length_divisible_by():
    assert build_train_batch(samples(), pad_token_id=0, divisible_by=4)["input_ids"].shape == (2, 8)


def test_sample_mask_combines_loss_multiplier_overlong_filtering_and_environment_mask():
    rolled = samples()
    rolled["loss_multiplier"] = torch.tensor([0.5, 1.0])
    assert build_train_batch(rolled, pad_token_id=0)["sample_mask"].tolist() == [0.5, 1.0]
    assert build_train_batch(rolled, pad_token_id=0, overlong_filtering=True)["sample_mask"].tolist() == [0.5, 0.0]
    rolled["mask_sample"] = [True, False]
    assert build_train_batch(rolled, pad_token_id=0)["sample_mask"].tolist() == [0.0, 1.0]
    assert rolled["loss_multiplier"].tolist() == [0.5, 1.0]  # the samples stay as they were
