import pytest
import torch
from nemo_rl_cpp.algorithms.reward_functions import apply_reward_penalties
from nemo_rl_cpp.config.penalties import RewardPenaltyConfig
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

OPEN, CLOSE = 12, 13


def tokenizer(text, add_special_tokens):
    assert add_special_tokens is False
    return {"input_ids": {"<think>": [OPEN], "</think>": [CLOSE]}.get(text, list(range(len(text))))}


def spelled(text, add_special_tokens):
    return {"input_ids": list(range(len(text)))}


def message(role, ids, content="x"):
    return {"role": role, "token_ids": torch.tensor(ids), "content": content}


def penalised(log, tokenizer=tokenizer, **config):
    """Return (the reward, the metrics) of a conversation whose reward was 1 before the penalties."""
    batch = BatchedDataDict(message_log=[log], total_reward=torch.tensor([1.0]), **{"reward/form": torch.tensor([0.5])})
    metrics = apply_reward_penalties(batch, RewardPenaltyConfig(**config), tokenizer)
    assert float(batch["reward/form"]) == 0.5 * float(batch["total_reward"])
    return float(batch["total_reward"]), metrics


@pytest.mark.parametrize(
    "text, reward",
    [("<think>same</think> same", 0.0), ("<think>same</think>other", 1.0), ("same", 1.0), ("<think> </think> ", 1.0)],
)
def test_response_whose_answer_repeats_its_reasoning_gets_zero_reward(text, reward):
    log = [message("user", [1]), message("assistant", [2], text)]
    result = penalised(log, penalize_duplicated_reasoning=True)
    assert result == (reward, {"reasoning_equal_to_final_answer_rate": 1.0 - reward})


@pytest.mark.parametrize("prompt, texts, reward", [
    ("x", ["a</think>  "], 0.0), ("x", ["<think>cut"], 0.0), ("x", [""], 0.0), ("x", ["", "b"], 1.0), ("x", ["b", ""], 0.0),
    ("What?\n<think>\n", ["cut"], 0.0), ("What?\n<think>\n", ["a</think>b"], 1.0),
])  # fmt: skip
def test_conversation_whose_last_response_has_no_answer_gets_zero_reward(prompt, texts, reward):
    log = [m for text in texts for m in (message("user", [1], prompt), message("assistant", [2], text))]
    assert penalised(log, penalize_empty_final_answer=True) == (reward, {"empty_final_answer_rate": 1.0 - reward})


@pytest.mark.parametrize("special", [False, True])
def test_thinking_tags_that_are_special_tokens_separate_reasoning_from_answer(special):
    """Environments' texts lack special tokens, so a good response after a prompt that ends with <think> had no answer."""
    backend = Backend(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = Whitespace()
    backend.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>", "<end>")])
    tags = Tokenizer(backend, {"eos_token": "<end>"})
    for text, duplicated, reward in (
        ("a </think> b <end>", False, 1.0),
        ("b </think> b <end>", True, 1.0),
        ("a </think> <end>", False, 0.0),
    ):
        ids = tags(text)["input_ids"]
        log = [message("user", [0], "<think>"), message("assistant", ids, tags.decode(ids, skip_special_tokens=True))]
        assert penalised(log, tags, penalize_empty_final_answer=True)[0] == reward
        assert penalised(log, tags, penalize_duplicated_reasoning=True)[0] == 1.0 - duplicated


def test_forbidden_token_gives_zero_reward_in_a_response_but_not_in_a_prompt():
    section = {"penalize_unwanted_tokens": True, "token_ids": {"unwanted": [7, 8]}}
    assert penalised([message("user", [7]), message("assistant", [1, 2])], **section)[0] == 1.0
    assert penalised([message("user", [1]), message("assistant", [1, 8])], **section)[0] == 0.0


@pytest.mark.parametrize(
    "prompt, response, reward",
    [
        ([1, OPEN], [5, CLOSE, 6], 1.0),  # the prompt opens, the response closes
        ([1, OPEN], [5, 6], 0.0),
        ([1, OPEN], [CLOSE, CLOSE], 0.0),
        ([1, OPEN, CLOSE], [5], 1.0),  # thinking is switched off
        ([1, OPEN, CLOSE], [CLOSE], 0.0),
        ([1], [OPEN, 5, CLOSE], 0.0),  # a response never opens
        ([1, CLOSE], [5], 0.0),
        ([1, OPEN, OPEN], [CLOSE], 0.0),
    ],
)
def test_unbalanced_thinking_tags_over_prompt_and_response_give_zero_reward(prompt, response, reward):
    section = {"penalize_malformed_think_tag": True}
    for log in (
        [message("user", prompt), message("assistant", response)],
        [message("system", prompt[:1]), message("user", prompt[1:]), message("assistant", response)],
        [
            message("user", [OPEN]),
            message("assistant", [CLOSE]),
            message("user", prompt),
            message("assistant", response),
        ],
    ):
        assert penalised(log, **section) == (reward, {"malformed_think_tag_rate": 1.0 - reward})
    given = section | {"token_ids": {"think_open": OPEN, "think_close": CLOSE}}
    assert penalised(log, tokenizer=spelled, **given)[0] == reward
    assert penalised(log, tokenizer=spelled, **section)[0] == 1.0  # no single tokens: the text decides


@pytest.mark.parametrize("text, reward", [("a</think>b", 1.0), ("<think>a", 0.0), ("a</think></think>", 0.0)])
def test_thinking_tags_split_into_several_tokens_are_found_in_the_response_text(text, reward):
    log = [message("user", [1]), message("assistant", [2], text)]
    assert penalised(log, tokenizer=spelled, penalize_malformed_think_tag=True)[0] == reward


def test_every_reward_penalty_is_disabled_by_default():
    assert penalised([message("user", [1]), message("assistant", [OPEN], "<think>")]) == (1.0, {})


@pytest.mark.parametrize(
    "section, text",
    [
        ({"penalize_unwanted_tokens": True}, "needs token_ids.unwanted"),
        ({"token_ids": {"think_open": 3}}, "needs think_open and think_close together"),
    ],
)
def test_reward_penalty_without_its_required_token_ids_is_an_error(section, text):
    with pytest.raises(ValueError, match=text):
        RewardPenaltyConfig(**section)
