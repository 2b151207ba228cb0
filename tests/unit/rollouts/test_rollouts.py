import pytest
import torch
from fakes import ByteTokenizer, EchoEnvironment, FakeGeneration, prompts
from nemo_rl_cpp.distributed.worker_calls import Future
from nemo_rl_cpp.environments.arithmetic_environment import ArithmeticEnvironment
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.rollouts.batches import build_train_batch
from nemo_rl_cpp.rollouts.rollouts import calculate_rewards, repeat_prompts, run_multi_turn_rollout

TOKENIZER = ByteTokenizer()


def add(prompt, key):
    a, b = prompt.rstrip("=").split("+")
    return f"{int(a) + int(b) + key[2]}\n"  # sample 0 is right, the others are off by their index


def test_single_turn_arithmetic_rollout_has_expected_rewards_tokens_and_metrics():
    batch = prompts(["1+2=", "10+20="], ["sum", "sum"], [{"ground_truth": "3"}, {"ground_truth": "30"}])
    batch = repeat_prompts(batch, 3, first_draw_id=40)
    batch["stop_strings"] = [["\n"]] * 6
    engine = FakeGeneration(add)
    result, metrics = run_multi_turn_rollout(engine, batch, TOKENIZER, {"sum": ArithmeticEnvironment.remote()}, 100)
    assert result["total_reward"].tolist() == [1, 0, 0, 1, 0, 0]
    assert result["truncated"].tolist() == [False] * 6
    assert result["group_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert [log[1]["content"] for log in result["message_log"]] == ["3\n", "4\n", "5\n", "30\n", "31\n", "32\n"]
    # ids and logprobs of a response are the engine's, slice by slice; the empty observation adds no token
    log = result["message_log"][4]
    assert log[1]["token_ids"].tolist() == list(b"31\n") and log[1]["generation_logprobs"].tolist() == [-5 / 8] * 3
    assert log[2]["role"] == "environment" and log[2]["token_ids"].tolist() == []
    assert log[2]["token_ids"].dtype == torch.int64
    assert metrics["mean_gen_tokens_per_sample"] == pytest.approx((3 * 2 + 3 * 3) / 6)
    assert metrics["total_turns"] == 6 and metrics["natural_termination_rate"] == 1.0
    assert metrics["well_formed"] == 1.0
    sent = engine.calls[0]
    assert sent["draw_ids"].tolist() == [40, 40, 40, 41, 41, 41]
    assert sent["sample_index"].tolist() == [0, 1, 2, 0, 1, 2]
    assert sent["stream"] == ["train"] * 6 and sent["stop_strings"] == [["\n"]] * 6
    assert sent["input_ids"][0].tolist() == [*b"1+2=", TOKENIZER.pad_token_id, TOKENIZER.pad_token_id]


def echo_batch(turns):
    return prompts([f"p{i}" for i in range(len(turns))], ["echo"] * len(turns), [{"turns": n} for n in turns])


def test_multi_turn_rollout_has_hand_computed_messages_rewards_and_token_masks():
    engine = FakeGeneration(lambda prompt, key: "ab", max_new_tokens=8)
    env = EchoEnvironment({"next_stop_strings": ["b"]})
    result, metrics = run_multi_turn_rollout(engine, echo_batch([1, 3]), TOKENIZER, {"echo": env}, 100)
    # turn 1 ends with eos (3 tokens), later turns with the stop string (2 tokens): the environment set it
    assert [m["content"] for m in result["message_log"][1]] == ["p1", "ab", "AB", "ab", "AB", "ab", "AB"]
    assert [len(m["token_ids"]) for m in result["message_log"][1]] == [2, 3, 2, 2, 2, 2, 2]
    assert result["total_reward"].tolist() == pytest.approx([0.02, 0.06])
    assert result["extra_env_info"] == [{"turns": 1}, {"turns": 1}]  # of ended conversations: as before the last turn
    assert [len(call["input_lengths"]) for call in engine.calls] == [2, 1, 1]
    assert engine.calls[1]["stop_strings"] == [["b"]]
    # what was generated, was generated after exactly these tokens
    ids = torch.cat([m["token_ids"] for m in result["message_log"][1]])
    for call, cut in zip(engine.calls[1:], (2 + 3 + 2, 2 + 3 + 2 + 2 + 2)):
        assert call["input_ids"][0].tolist() == ids[:cut].tolist()
    assert metrics["total_turns"] == 4 and metrics["max_turns_per_sample"] == 3 and metrics["avg_turns_per_sample"] == 2
    assert metrics["mean_gen_tokens_per_sample"] == (3 + 7) / 2 and metrics["max_gen_tokens_per_sample"] == 7
    assert metrics["mean_env_tokens_per_sample"] == (2 + 6) / 2
    assert metrics["mean_total_tokens_per_sample"] == (5 + 13) / 2


def test_conversation_ends_after_max_rollout_turns():
    result, metrics = run_multi_turn_rollout(
        FakeGeneration(lambda p, k: "x"), echo_batch([1, 9]), TOKENIZER, {"echo": EchoEnvironment()}, 100,
        max_rollout_turns=2,
    )  # fmt: skip
    assert metrics["max_turns_reached_rate"] == 0.5 and metrics["natural_termination_rate"] == 0.5
    assert result["truncated"].tolist() == [False, False]


@pytest.mark.parametrize(("room", "observed", "flag"), [(8, 2, False), (7, 2, True), (6, 1, True), (5, 0, True)])
def test_conversation_is_truncated_if_an_environment_message_fills_the_context(room, observed, flag):
    # prompt 2 + response 3 (with eos) + observation 2 = 7
    result, _ = run_multi_turn_rollout(
        FakeGeneration(lambda p, k: "ab"), echo_batch([2]), TOKENIZER, {"echo": EchoEnvironment()}, room,
        max_rollout_turns=1,
    )  # fmt: skip
    assert len(result["message_log"][0][2]["token_ids"]) == observed
    assert result["message_log"][0][2]["content"] == "AB"
    assert result["truncated"].tolist() == [flag]


def test_response_longer_than_the_maximum_sequence_length_is_an_error():
    with pytest.raises(ValueError, match="more than max_seq_len 4: set data.max_input_seq_length and .*max_total"):
        run_multi_turn_rollout(
            FakeGeneration(lambda p, k: "ab"), echo_batch([2]), TOKENIZER, {"echo": EchoEnvironment()}, 4
        )


def test_conversation_continues_after_a_response_truncated_at_max_new_tokens():
    engine = FakeGeneration(lambda p, k: "abcdef", max_new_tokens=4)
    result, metrics = run_multi_turn_rollout(engine, echo_batch([2]), TOKENIZER, {"echo": EchoEnvironment()}, 100)
    assert result["truncated"].tolist() == [True] and metrics["truncation_rate"] == 1.0
    assert [m["content"] for m in result["message_log"][0]][1::2] == ["abcd", "abcd"]


class Fixed(EnvironmentInterface):
    """An environment that returns the reward, or the reward components, in the metadata of each row."""

    def step(self, message_log_batch, metadata):
        assert all(set(m) == {"role", "content"} for log in message_log_batch for m in log)
        rewards = [info["r"] for info in metadata]
        if isinstance(rewards[0], dict):
            rewards = {name: torch.tensor([r[name] for r in rewards]) for name in rewards[0]}
        else:
            rewards = torch.tensor(rewards)
        done = torch.ones(len(metadata))
        seen = [{"role": "environment", "content": str(info["r"])} for info in metadata]
        return EnvironmentReturn(seen, metadata, [None] * len(metadata), rewards, done, [str(i["r"]) for i in metadata])


def test_rollout_with_several_environments_returns_rewards_in_the_order_of_the_batch():
    batch = prompts(list("abcde"), ["x", "y", "x", "z", "y"], [{"r": float(i)} for i in range(5)])
    envs = {"x": Fixed(), "y": Fixed.remote(), "z": Fixed()}
    answer = calculate_rewards(batch, envs)
    assert answer.rewards.tolist() == [0, 1, 2, 3, 4] and answer.rewards.dtype == torch.float32
    assert answer.answers == ["0.0", "1.0", "2.0", "3.0", "4.0"]
    assert [o["content"] for o in answer.observations] == answer.answers
    with pytest.raises(ValueError, match="task type: z"):
        calculate_rewards(batch, {"x": Fixed(), "y": Fixed()})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("observations", None, "NoneType as observations"),
        ("observations", [None], "None as observation 0: expected {'role': 'environment', 'content': text}"),
        ("observations", [{"role": "environment"}], "a dict as observation 0"),
        ("rewards", torch.ones(1, 1), r"rewards with the shape \(1, 1\): expected one number a conversation"),
        ("rewards", {"f": [None]}, "f with None: expected one number"),
        ("terminateds", None, "NoneType as terminateds"),
        ("terminateds", [True, True], "2 terminateds for 1 conversations"),
    ],
)
def test_invalid_result_of_an_environment_is_an_error_that_names_task_and_field(field, value, said):
    class Wrong(Fixed):
        def step(self, message_log_batch, metadata):
            return super().step(message_log_batch, metadata)._replace(**{field: value})

    with pytest.raises(ValueError, match=f"the environment of task x returned .*{said}"):
        calculate_rewards(prompts(["a"], ["x"], [{"r": 1.0}]), {"x": Wrong()})


def test_total_reward_of_a_rollout_is_the_sum_of_its_reward_components():
    batch = prompts(["a", "b"], ["x", "y"], [{"r": {"f": 1.0, "g": 0.5}}, {"r": {"f": 2.0, "g": 0.0}}])
    result, _ = run_multi_turn_rollout(FakeGeneration(), batch, TOKENIZER, {"x": Fixed(), "y": Fixed()}, 100)
    assert result["reward/f"].tolist() == [1, 2] and result["reward/g"].tolist() == [0.5, 0]
    assert result["total_reward"].tolist() == [1.5, 2.0]
    batch["extra_env_info"] = [{"r": 1.0}, {"r": {"f": 1.0}}]
    with pytest.raises(ValueError, match="dictionary"):
        calculate_rewards(batch, {"x": Fixed(), "y": Fixed()})


def test_exception_in_an_environment_is_raised_by_the_rollout():
    class Broken(Fixed):
        def step(self, message_log_batch, metadata):
            raise KeyError("my own mistake")

    for env in (Broken(), Broken.remote()):
        with pytest.raises(KeyError, match="my own mistake"):
            calculate_rewards(prompts(["a"], ["x"], [{}]), {"x": env})


def test_rollout_metrics_of_several_environments_are_prefixed_with_the_task_name():
    batch = prompts(["a", "b"], ["x", "y"], [{"ground_truth": "1"}, {"ground_truth": "2"}])
    envs = {"x": ArithmeticEnvironment(), "y": ArithmeticEnvironment()}
    _, metrics = run_multi_turn_rollout(FakeGeneration(lambda p, k: "1"), batch, TOKENIZER, envs, 100)
    assert metrics["x/accuracy_of_well_formed"] == 1.0 and metrics["y/accuracy_of_well_formed"] == 0.0


class Actor:
    """A handle like Ray's: its methods only start calls, and it has no other attributes."""

    def __init__(self, instance):
        for name in ("step", "pop_metrics"):
            if hasattr(instance, name):
                setattr(self, name, _ActorMethod(getattr(instance, name)))


class _ActorMethod:
    def __init__(self, method):
        self._method = method

    def remote(self, *args, **kwargs):
        future = Future()
        future.run(lambda: self._method(*args, **kwargs))
        return future

    def __call__(self, *args, **kwargs):
        raise TypeError("Actor methods cannot be called directly")


def test_multi_turn_rollout_accepts_environments_that_are_ray_actors():
    batch = prompts(["a"], ["x"], [{"ground_truth": "1"}])
    generation, actor = FakeGeneration(lambda p, k: "1"), Actor(ArithmeticEnvironment())
    _, metrics = run_multi_turn_rollout(generation, batch, TOKENIZER, {"x": actor}, 100)
    assert metrics["accuracy_of_well_formed"] == 1.0
    batch = prompts(["a"], ["x"], [{"r": 1.0}])
    _, metrics = run_multi_turn_rollout(FakeGeneration(), batch, TOKENIZER, {"x": Actor(Fixed())}, 100)
    assert metrics["total_turns"] == 1


def test_names_of_reward_components_get_the_reward_prefix_only_once():
    batch = prompts(["a", "b"], ["x", "y"], [{"r": {"reward/f": 1.0}}, {"r": {"f": 2.0}}])
    result, _ = run_multi_turn_rollout(FakeGeneration(), batch, TOKENIZER, {"x": Fixed(), "y": Fixed()}, 100)
    assert [key for key in result if key.startswith("reward/")] == ["reward/f"]
    assert result["reward/f"].tolist() == result["total_reward"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("section", "env"), [
    ({"dataset_name": "arithmetic", "num_samples": 4}, "arithmetic"),
    ({"dataset_name": "reverse_digits", "num_samples": 4}, "reverse_digits"),
    pytest.param(
        {"dataset_name": "reasoning_gym", "task": "chain_sum", "num_samples": 4},
        "reasoning_gym",
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_correct_answer_to_a_row_of_each_data_set_gets_full_reward_from_its_environment(section, env):
    if env == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    from nemo_rl_cpp.data.dataloader import rl_collate_fn
    from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, load_response_dataset

    raw = load_response_dataset(section)
    dataset = AllTaskProcessedDataset(raw.dataset, TOKENIZER, raw.task_spec, raw.processor, max_seq_length=4096)
    batch = repeat_prompts(rl_collate_fn([dataset[i] for i in range(4)]), 2)
    rows = [raw.dataset[i]["messages"] for i in range(4)]
    answers = {log[0]["content"]: row[1]["content"] for log, row in zip(batch["message_log"][::2], rows)}
    engine = FakeGeneration(lambda prompt, key: answers[prompt] + "\n" if key[2] == 0 else "none\n", max_new_tokens=64)
    environment = create_env(env, {"num_workers": 1} if env == "reasoning_gym" else {})
    result, metrics = run_multi_turn_rollout(engine, batch, TOKENIZER, {raw.task_name: environment}, 4096)
    assert result["total_reward"][::2].tolist() == [1.0] * 4
    assert (result["total_reward"][1::2] < 0.5).all() and not result["truncated"].any()
    assert metrics.get("verifier_timeouts", 0) == 0
    environment.shutdown()


class Unsure(EchoEnvironment):
    """An environment that sets `mask_sample` to the next value of the list `masks` in a row's metadata, unless it is
    None."""

    def step(self, message_log_batch, metadata):
        answer = super().step(message_log_batch, metadata)
        said = [info["masks"][info["turns"] - 1] for info in metadata]
        states = [
            state if word is None else {**state, "mask_sample": word} for state, word in zip(answer.metadata, said)
        ]
        return answer._replace(metadata=states)


def masked(masks):
    infos = [{"turns": len(each), "masks": each[::-1]} for each in masks]
    batch = prompts([f"p{i}" for i in range(len(masks))], ["echo"] * len(masks), infos)
    return run_multi_turn_rollout(FakeGeneration(lambda p, k: "ab"), batch, TOKENIZER, {"echo": Unsure()}, 100)[0]


def test_sample_flagged_with_mask_sample_by_its_environment_is_not_trained():
    assert "mask_sample" not in masked([[None], [None]])
    rolled = masked([[True], [None], [False], [None, True]])
    assert rolled["mask_sample"].tolist() == [True, False, False, True]
    batch = build_train_batch(rolled, pad_token_id=0)
    assert batch.sample_mask.tolist() == [0, 1, 1, 0]
    assert masked([[True, False]])["mask_sample"].tolist() == [False]  # the last word counts
    with pytest.raises(ValueError, match="metadata has mask_sample 'no': give True or False"):
        masked([["no"]])
