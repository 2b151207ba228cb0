"""What code written for NeMo RL relies on beyond names: error types and their words, batches of other data, item access."""

import re
import warnings

import pytest
import torch
from nemo_rl_cpp.compat.algorithms.advantage_estimator import GeneralizedAdvantageEstimator
from nemo_rl_cpp.compat.algorithms.grpo import dynamic_sampling
from nemo_rl_cpp.compat.algorithms.loss import ClippedPGLossConfig
from nemo_rl_cpp.compat.algorithms.reward_functions import RewardShapingConfig, apply_reward_shaping
from nemo_rl_cpp.compat.data.interfaces import TaskDataSpec
from nemo_rl_cpp.compat.data.llm_message_utils import batched_message_log_to_flat_message, get_formatted_message_log
from nemo_rl_cpp.compat.data.multimodal_utils import PackedTensor
from nemo_rl_cpp.compat.data.packing import get_packer
from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.compat.experience.rollouts import calculate_rewards
from nemo_rl_cpp.compat.utils.checkpoint import CheckpointManager


@pytest.mark.parametrize("rows, arguments, words", [
    ({"x": torch.arange(10)}, {"shards": 2, "batch_size": 3}, "Total batch size 10 is not a multiple of batch_size 3"),
    ({"x": torch.arange(8)}, {"shards": 3, "batch_size": 4}, "Batch size 4 is not a multiple of shards 3"),
    ({"x": torch.arange(4), "y": [1, 2]}, {"shards": 2}, "Batch sizes are not the same across the rollout batch"),
    ({"x": torch.arange(4)}, {"shards": 2, "dynamic_batching_args": {}, "sequence_packing_args": {}},
     "dynamic_batching_args and sequence_packing_args cannot be passed together"),
])  # fmt: skip
def test_a_batch_that_cannot_be_sharded_is_both_kinds_of_error(rows, arguments, words):
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match=words):
            BatchedDataDict(rows).shard_by_batch_size(**arguments)


def images(*counts):
    return PackedTensor(
        [None if n is None else torch.full((n, 2), float(i)) for i, n in enumerate(counts)], dim_to_pack=0
    )


def test_packed_tensors_go_with_their_rows():
    batch = BatchedDataDict(ids=torch.arange(4), pixel_values=images(2, 3, 1, 5), token_type_ids=torch.zeros(4, 2))
    first, second = batch.shard_by_batch_size(shards=2)
    assert len(first["pixel_values"]) == 2
    assert first["pixel_values"].as_tensor()[:, 0].tolist() == [0.0] * 2 + [1.0] * 3
    assert second["pixel_values"].as_tensor()[:, 0].tolist() == [2.0] + [3.0] * 5
    assert batch.select_indices([3, 0])["pixel_values"].as_tensor()[:, 0].tolist() == [3.0] * 5 + [0.0] * 2
    joined = BatchedDataDict.from_batches([second, first])
    assert joined["pixel_values"].as_tensor().shape == (11, 2) and joined["ids"].tolist() == [2, 3, 0, 1]
    joined.reorder_data([2, 3, 0, 1])
    assert torch.equal(joined["pixel_values"].as_tensor(), batch["pixel_values"].as_tensor())
    found = batch.get_multimodal_dict(as_tensors=True, pixel_dtype=torch.bfloat16)
    assert set(found) == {"pixel_values", "token_type_ids"} and found["pixel_values"].dtype == torch.bfloat16
    assert isinstance(batch.get_multimodal_dict()["pixel_values"], PackedTensor)


def test_more_shards_than_rows_leave_empty_ones_with_every_key():
    shards = BatchedDataDict(ids=torch.ones(2, 3), pixel_values=images(1, 2), names=["a", "b"]).shard_by_batch_size(
        shards=4, allow_uneven_shards=True
    )
    assert [shard["ids"].shape[0] for shard in shards] == [1, 1, 0, 0]
    assert shards[3]["names"] == [] and shards[3]["pixel_values"].as_tensor() is None


def test_repeated_packed_tensors_are_copies_unless_shared():
    batch = BatchedDataDict(pixel_values=images(1, None))
    copies, shared = (
        batch.repeat_interleave(2)["pixel_values"],
        batch.repeat_interleave(2, share_immutable_media=True)["pixel_values"],
    )
    assert [tensor is None for tensor in copies.tensors] == [False, False, True, True]
    assert copies.tensors[0].data_ptr() != copies.tensors[1].data_ptr()
    assert shared.tensors[0] is shared.tensors[1]


def test_a_batch_may_lack_packed_tensors_only_when_asked():
    text, picture = BatchedDataDict(ids=torch.arange(2)), BatchedDataDict(ids=torch.arange(1), pixel_values=images(3))
    with pytest.raises(KeyError, match="pixel_values"):
        BatchedDataDict.from_batches([text, picture])
    joined = BatchedDataDict.from_batches([text, picture], allow_missing_packed_tensors=True)
    assert [tensor is None for tensor in joined["pixel_values"].tensors] == [True, True, False]


def test_packed_tensor_mistakes():
    with pytest.raises(ValueError, match="at least one sample"):
        PackedTensor([], 0)
    with pytest.raises(ValueError, match="not str"):
        PackedTensor("x", 0)
    with pytest.raises(ValueError, match="different dim_to_pack"):
        PackedTensor.concat([PackedTensor(torch.ones(1), 0), PackedTensor(torch.ones(1), 1)])
    with pytest.raises(TypeError, match="sliced by a range"):
        images(1)[0]
    assert PackedTensor.flattened_concat([images(1, 2), images(3)]).tensors[0].shape == (3, 2)
    assert PackedTensor.empty_like(images(1, 2)).as_tensor() is None


def test_a_batch_of_texts_alone_has_no_lengths():
    batch, lengths = batched_message_log_to_flat_message(
        [[{"text": "a"}, {"text": "b"}], [{"text": "c", "role": "user"}]]
    )
    assert batch["text"] == ["a", "c"] and batch["role"] == [None, "user"] and lengths.numel() == 0


@pytest.mark.parametrize("other, words", [
    (torch.ones(2), "expected consistent types"),
    (torch.ones(2, dtype=torch.long, device="meta"), "expected tensors on the same device"),
])  # fmt: skip
def test_mixed_tensors_under_one_key(other, words):
    with pytest.raises(RuntimeError, match=f"key='ids': {words}"):
        batched_message_log_to_flat_message([[{"ids": torch.tensor([1, 2])}], [{"ids": other}]])


class ChatTokens:
    """A template of the form <role>content<end> and a line break; a token is a character."""

    bos_token, eos_token = None, "<end>"

    def apply_chat_template(self, messages, add_generation_prompt=False, **_):
        text = "".join(f"<{m['role']}>{m['content']}<end>\n" for m in messages)
        return text + ("<assistant>\n" if add_generation_prompt else "")

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([[ord(c) for c in text]])}


def test_line_breaks_after_the_last_message_stay():
    log = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no BOS token
        pieces = [m["content"] for m in get_formatted_message_log(log, ChatTokens(), TaskDataSpec())]
        opened = get_formatted_message_log(
            log[:1], ChatTokens(), TaskDataSpec(), add_eos_token=False, add_generation_prompt=True
        )
    assert pieces == ["<user>1<end>\n", "<assistant>2<end>\n"]
    assert opened[0]["content"] == "<user>1<end>\n<assistant>\n", (
        "the assistant's opening is part of the prompt to the last byte"
    )


def shaping_batch(**extra):
    log = [{"role": "user", "content": "q", "token_ids": torch.arange(3)}]
    return BatchedDataDict({"message_log": [log], "total_reward": torch.tensor([1.0]), **extra})


OVERLONG = {"enabled": True, "overlong_buffer_length": 5, "overlong_buffer_penalty": 0.1, "max_response_length": 25}


@pytest.mark.parametrize("config, batch, kind, words", [
    (OVERLONG | {"max_response_length": None}, {}, ValueError, "DAPO reward shaping is currently supported"),
    (OVERLONG, {}, AssertionError, "Assistant response not found during reward shaping"),
    (OVERLONG, {"response_token_lengths": [1, 2]}, AssertionError,
     "The number of messages in the batch must match the number of rewards"),
    ({"enabled": True, "stop_properly_penalty_coef": 0.5}, {}, AssertionError, "truncated field not found"),
    ({"enabled": True, "stop_properly_penalty_coef": 1.5}, {"truncated": [True]}, AssertionError,
     "stop_properly_penalty_coef must be in"),
])  # fmt: skip
def test_reward_shaping_says_what_is_missing(config, batch, kind, words):
    with pytest.raises(kind, match=words):
        apply_reward_shaping(shaping_batch(**batch), RewardShapingConfig(**config))


def test_settings_can_be_read_and_written_as_items():
    config = RewardShapingConfig(enabled=True)
    config["max_response_length"] = 7
    assert config.max_response_length == config["max_response_length"] == config.get("max_response_length") == 7
    assert "enabled" in config and "unheard_of" not in config and config.get("unheard_of", 3) == 3
    with pytest.raises(KeyError):
        config["unheard_of"]
    assert ClippedPGLossConfig(ratio_clip_min=0.1)["ratio_clip_min"] == 0.1


def manager(folder, **extra):
    return CheckpointManager({"checkpoint_dir": str(folder), "metric_name": "loss", "higher_is_better": False, **extra})


def save(checkpoints, step, **info):
    checkpoints.finalize_checkpoint(checkpoints.init_tmp_checkpoint(step, info))


def test_a_manager_ranks_by_any_metric_and_every_step_without_a_period(tmp_path):
    checkpoints = manager(tmp_path, keep_top_k=2)
    for step, loss in enumerate([0.5, 0.3, 0.7, 0.2, 0.4], start=1):
        save(checkpoints, step, loss=loss)
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_2", "step_4", "step_5"}
    with pytest.raises(AssertionError, match="write train:NAME or val:NAME"):
        checkpoints.checkpoint_metric({"loss": 1.0}, None)


@pytest.mark.parametrize("losses, best, words", [
    ([0.5, None, 0.3], "step_3", [r"Ignoring 1 checkpoint\(s\) without metric 'loss'.*val_at_end"]),
    ([None, None], "step_2", [r"Ignoring 2 checkpoint\(s\)", "No checkpoints contain metric 'loss'. Returning latest checkpoint.*val_at_end"]),
])  # fmt: skip
def test_best_checkpoint_warns_of_missing_metrics(tmp_path, losses, best, words):
    checkpoints = manager(tmp_path)
    for step, loss in enumerate(losses, start=1):
        save(checkpoints, step, **({} if loss is None else {"loss": loss}))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert checkpoints.get_best_checkpoint_path().endswith(best)
    assert len(warned) == len(words)
    assert all(re.search(expected, str(warning.message)) for expected, warning in zip(words, warned))


class TupleEnvironment:
    """Answers as many environments written for NeMo RL do: a plain tuple of lists."""

    def step(self, message_logs, metadata):
        count = len(message_logs)
        return (
            [{"role": "environment", "content": "x"}] * count,
            metadata,
            [None] * count,
            [1.0, 2.0],
            [True] * count,
            [None] * count,
        )


def test_environments_may_answer_with_plain_tuples_and_a_batch_may_be_empty():
    log = [{"role": "user", "content": "q", "token_ids": torch.arange(2)}]
    batch = BatchedDataDict(task_name=["a", "a"], message_log=[log, log], extra_env_info=[{"i": 0}, {"i": 1}])
    result = calculate_rewards(batch, {"a": TupleEnvironment()})
    assert result.rewards.tolist() == [1.0, 2.0] and result.terminateds.tolist() == [True, True]
    assert result.metadata == [{"i": 0}, {"i": 1}]
    nothing = calculate_rewards(BatchedDataDict(task_name=[], message_log=[], extra_env_info=[]), {})
    assert [len(part) for part in nothing] == [0] * 6
    with pytest.raises(ValueError, match="No environment found for task type: a"):
        calculate_rewards(batch, {})


def test_dynamic_sampling_without_group_numbers_goes_by_std():
    config = {
        "grpo": {
            "use_dynamic_sampling": True,
            "num_prompts_per_step": 1,
            "num_generations_per_prompt": 2,
            "dynamic_sampling_max_gen_batches": 1,
        }
    }
    std = torch.tensor([0.0, 0.0, 0.5, 0.5])
    batch = BatchedDataDict(total_reward=torch.tensor([1.0, 1.0, 1.0, 0.0]), name=list("abcd"))
    kept, complete, cache, metrics = dynamic_sampling(batch, std, torch.zeros(4), 1, config, None)
    assert complete and kept["name"] == ["c", "d"] and metrics == {"dynamic_sampling_num_discarded_valid_samples": 0}
    grouped = BatchedDataDict(total_reward=torch.tensor([1.0, 0.0, 0.0, 0.0]), name=list("abcd"), idx=[0, 0, 1, 1])
    kept, *_ = dynamic_sampling(grouped, std, torch.zeros(4), 1, config, None)
    assert kept["name"] == ["a", "b"], "where the groups are known, their rewards decide"


def test_packers_that_cannot_be_made_or_cannot_fill_their_bins():
    with pytest.raises(ValueError, match="must be one of concatenative"):
        get_packer(object(), 100)
    for wish in ({"min_bin_count": 3}, {"bin_count_multiple": 3}):
        with pytest.raises(ValueError, match="Cannot create 3 bins with only 2 sequences"):
            get_packer("concatenative", 100, **wish).pack([50, 50])


GAE = {
    "gae_lambda": 1.0,
    "gae_gamma": 1.0,
    "normalize_advantages": False,
    "gae_lambda_value": None,
    "gae_lambda_policy": None,
    "length_adaptive_alpha": 0.05,
}


def test_the_lambda_that_adapts_is_the_one_that_is_used():
    mask = torch.zeros(2, 60)
    mask[0, :3], mask[1, :50] = 1, 1
    rewards, values = torch.tensor([1.0, 2.0]), torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    estimator = GeneralizedAdvantageEstimator(GAE, {})
    lambdas = estimator._resolve_lambda_policy(mask)
    assert lambdas.tolist() == pytest.approx([0.0, 1 - 1 / 2.5])
    adaptive, _ = estimator.compute_advantage(None, rewards, mask, values)
    for row, value in enumerate(lambdas.tolist()):
        plain = GeneralizedAdvantageEstimator(GAE | {"gae_lambda": value, "length_adaptive_alpha": 0.0}, {})
        assert plain._resolve_lambda_policy(mask) == value
        torch.testing.assert_close(adaptive[row], plain.compute_advantage(None, rewards, mask, values)[0][row])


def test_a_missing_key_of_an_estimator_is_both_kinds_of_error():
    for kind in (KeyError, ValueError):
        with pytest.raises(kind, match="^the configuration has no 'gae_gamma'; add the key"):
            GeneralizedAdvantageEstimator({"gae_lambda": 1.0}, {})
