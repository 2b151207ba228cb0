from itertools import permutations

import pytest
from nemo_rl_cpp.rollouts.agent_rollouts import message_log
from nemo_rl_cpp.serving.bodies import ChatBody, CompletionBody, GenerateParams, RequestError
from nemo_rl_cpp.serving.engine import Sample, Sampling
from nemo_rl_cpp.serving.model import ServedModel
from nemo_rl_cpp.serving.rollouts import Call, Rollout, Rollouts, longest_chain


def call(prompt, answer):
    return Call(list(prompt), Sample(list(answer), [-0.5] * len(answer), 1), 0)


def test_training_data_of_a_served_rollout_does_not_depend_on_the_order_of_requests():
    first, second, third = call([1, 2], [3]), call([1, 2, 3, 4], [5, 6]), call([1, 2, 3, 4, 5, 6], [7])
    aside, retry = call([9] * 20, [9] * 5), call([1, 2, 3, 4], [8])
    for order in permutations([first, second, third, aside, retry]):
        assert longest_chain(list(order)) == [first, second, third]
    assert longest_chain([]) == [] and longest_chain([aside]) == [aside]


def test_messages_of_a_served_rollout_contain_the_token_ids_used_by_the_engine():
    class Letters:
        def decode(self, ids, skip_special_tokens=False):
            return "".join("abcdefghij"[i] for i in ids)

    log = message_log([call([1, 2], [3]), call([1, 2, 3, 4], [5, 6]), call([1, 2, 3, 4, 5, 6], [7])], Letters())
    assert [(m["role"], m["content"], m["token_ids"].tolist()) for m in log] == [
        ("user", "bc", [1, 2]), ("assistant", "d", [3]), ("environment", "e", [4]), ("assistant", "fg", [5, 6]), ("assistant", "h", [7])
    ]  # fmt: skip
    logprobs = [m["generation_logprobs"].tolist() for m in log if m["role"] == "assistant"]
    assert logprobs == [[-0.5], [-0.5, -0.5], [-0.5]]


def test_sampling_is_seeded_by_the_rollout_key_the_prompt_and_the_call_index():
    def draws(seed=1):
        rollouts = Rollouts(seed)
        rollouts.register("a", 0, Sampling(1.0, 1.0, 0))
        a, b = rollouts.find("a"), rollouts.find("b")
        return [
            rollouts.draw(a, [1], None), rollouts.draw(a, [1], None), rollouts.draw(a, [1, 2], None), rollouts.draw(b, [1], None)
        ]  # fmt: skip

    first = draws()
    assert draws() == first and len({draw.draw_id for draw in first}) == 4
    assert [draw.stream for draw in first] == [0, 0, 0, 2]
    assert [draw.draw_id for draw in draws(2)] == [draw.draw_id for draw in first] and draws(2) != first
    rollouts, rollout = Rollouts(1), Rollout("c", 1)
    given_up, under_way, another = (rollouts.draw(rollout, [5], None) for _ in range(3))
    rollouts.gave_up(rollout, [5], given_up)
    assert rollouts.draw(rollout, [5], None) == given_up  # a client that asks again gets the same answer
    rollouts.gave_up(rollout, [5], another)
    rollouts.gave_up(rollout, [5], given_up)
    again = [rollouts.draw(rollout, [5], None) for _ in range(3)]
    assert again[:2] == [given_up, another] and again[2].number == 3  # never that of the one under way
    assert under_way not in again


def test_responses_of_a_served_training_rollout_are_limited_to_max_new_tokens_of_the_run():
    rollouts = Rollouts(1)
    rollouts.register("a", 0, Sampling(1.0, 1.0, 0))
    model = ServedModel(("m",), None, None, 100, 512, (), rollouts, default=Sampling(max_new_tokens=8))
    trained, other = rollouts.find("a"), rollouts.find("b")
    for asked, tokens, tokens_of_others in ((None, 8, 502), (5, 5, 5), (100, 8, 100)):
        chat = ChatBody(messages=[{"role": "user", "content": "x"}], max_completion_tokens=asked)
        for body in (CompletionBody(prompt="x", max_tokens=asked), GenerateParams(max_tokens=asked), chat):
            assert model.sampling(body, None, 10, trained).max_new_tokens == tokens
            assert model.sampling(body, None, 10, other).max_new_tokens == tokens_of_others
    # OpenAI's 16 tokens of a completion are no limit of the run's
    model.default = Sampling(max_new_tokens=64)
    assert model.sampling(CompletionBody(prompt="x"), 16, 10, trained).max_new_tokens == 64


def test_server_rejects_requests_of_an_ended_rollout_and_does_not_reuse_its_key():
    """A repeated validation gets the same sampling seeds under new keys."""
    rollouts, sampling = Rollouts(1), Sampling(1.0, 1.0, 0)
    first = rollouts.register("0-val-0-1", 1, sampling, "val-0-1")
    rollout = rollouts.find(first)
    draw = rollouts.draw(rollout, [1], None)
    taken = rollouts.take(first)
    rollouts.answered(rollout, call([1], [2]))  # too late
    assert first == "0-val-0-1" and taken.calls == []
    with pytest.raises(RequestError, match="has ended") as error:
        rollouts.find(first)
    assert error.value.status == 410
    second = rollouts.register("0-val-0-1", 1, sampling, "val-0-1")
    assert second != first and rollouts.draw(rollouts.find(second), [1], None) == draw
