"""What a rollout's calls come to, and which draws they get."""

from itertools import permutations

from nemo_rl_cpp.experience.agent_rollouts import message_log
from nemo_rl_cpp.serving.requests import Sample
from nemo_rl_cpp.serving.rollouts import Call, Rollout, Rollouts, TrainedSampling, longest_chain


def call(prompt, answer):
    return Call(list(prompt), Sample(list(answer), [-0.5] * len(answer), 1), 0)


def test_the_longest_conversation_is_found_in_whatever_order_calls_come():
    first, second, third = call([1, 2], [3]), call([1, 2, 3, 4], [5, 6]), call([1, 2, 3, 4, 5, 6], [7])
    aside, retry = call([9] * 20, [9] * 5), call([1, 2, 3, 4], [8])
    for order in permutations([first, second, third, aside, retry]):
        assert longest_chain(list(order)) == [first, second, third]
    assert longest_chain([]) == [] and longest_chain([aside]) == [aside]


def test_messages_hold_the_ids_that_went_through_the_engine():
    class Letters:
        def decode(self, ids, skip_special_tokens=False):
            return "".join("abcdefghij"[i] for i in ids)

    log = message_log([call([1, 2], [3]), call([1, 2, 3, 4], [5, 6]), call([1, 2, 3, 4, 5, 6], [7])], Letters())
    assert [(m["role"], m["content"], m["token_ids"].tolist()) for m in log] == [
        ("user", "bc", [1, 2]), ("assistant", "d", [3]), ("environment", "e", [4]), ("assistant", "fg", [5, 6]), ("assistant", "h", [7])
    ]  # fmt: skip
    assert [m["generation_logprobs"].tolist() for m in log if m["role"] == "assistant"] == [
        [-0.5],
        [-0.5, -0.5],
        [-0.5],
    ]


def test_draws_follow_from_key_prompt_and_number():
    def draws(seed=1):
        rollouts = Rollouts(seed)
        rollouts.register("a", 0, TrainedSampling(1.0, 1.0, 0))
        a, b = rollouts.find("a"), rollouts.find("b")
        return [
            rollouts.draw(a, [1], None), rollouts.draw(a, [1], None), rollouts.draw(a, [1, 2], None), rollouts.draw(b, [1], None)
        ]  # fmt: skip

    first = draws()
    assert draws() == first and len({draw.draw_id for draw in first}) == 4
    assert [draw.stream for draw in first] == [0, 0, 0, 2]
    assert [draw.draw_id for draw in draws(2)] == [draw.draw_id for draw in first] and draws(2) != first
    rollouts, rollout = Rollouts(1), Rollout("c", 1)
    given_up = rollouts.draw(rollout, [5], None)
    rollouts.gave_up(rollout, [5])
    assert rollouts.draw(rollout, [5], None) == given_up  # a client that asks again gets the same answer
