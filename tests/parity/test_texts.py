"""The text of a response is transformers' text of prompt and response together, for eight kinds of tokenizers."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeGeneration
from nemo_rl_cpp.data.texts import text_of
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.rollouts.rollouts import Conversations, EarlyScoring
from nemo_rl_cpp.serving.answers import ChatAnswer, CompletionAnswer, Header
from nemo_rl_cpp.serving.bodies import ChatBody, CompletionBody
from nemo_rl_cpp.serving.engine import LENGTH, Progress, Sample
from nemo_rl_cpp.serving.model import ServedModel
from tokenizer_folders import byte_fallback, byte_level, unigram, words
from tokenizers import decoders, pre_tokenizers

UNFINISHED = "\ufffd"


def sentence_piece(prepend: str, strips: bool):
    """Return a tokenizer like SentencePiece's of Llama 3.2 Vision or Gemma, with Metaspace marks and byte fallback."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    return tokenizer


CLEANS = {"clean_up_tokenization_spaces": True}
MADE = {
    "byte level": (lambda: byte_level(["<s>", "</s>"]), {}),
    "byte level, clean-up on": (lambda: byte_level(["<s>", "</s>"], bos="<s>"), CLEANS),
    "byte level, Qwen's": (lambda: byte_level(["<s>", "</s>"], qwen=True), {}),
    "byte fallback": (byte_fallback, {}),
    "byte fallback, clean-up on": (lambda: sentence_piece("first", True), CLEANS),
    "byte fallback without a first mark": (lambda: sentence_piece("never", False), {}),
    "pieces, clean-up on": (unigram, CLEANS),
    "words": (lambda: words(None), {}),
}
TEXTS = [
    "if x != y : print( 's' , 1)", "the fine day", "is it not ? It is n't .", "42", "\u00e9\u4e2d\u6587 x", "\U0001f642 there",
    "a  b\n\n c", " plus", "The answer is \\boxed{ 42 } .", "\U0001f469\u200d\U0001f4bb",
]  # fmt: skip


def rows(tokenizer, count, seed):
    """Yield `count` random pairs (prompt, response ids); responses are parts of texts or any ids."""
    draw = random.Random(seed)
    for n in range(count):
        prompt = draw.choice(["the fine day", "Hello there, what is", "user", "12 plus 30?"])
        if n % 3:
            ids = tokenizer(draw.choice(TEXTS) + draw.choice(TEXTS), add_special_tokens=False)["input_ids"]
            ids = ids[draw.randrange(2) : len(ids) - draw.randrange(3)]
        else:
            ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(1, 20))]
        yield prompt, ids or [draw.randrange(len(tokenizer))]


class Engine(FakeGeneration):
    """An engine that returns the responses it was created with."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.tokenizer = answers, SimpleNamespace(pad_token_id=0)

    def _new_tokens(self, data, i, prompt, greedy):
        return self.answers[i]

    max_new_tokens = property(lambda self: 10**6, lambda self, value: None)


def rollout_texts(tokenizer, prompts, answers):
    """Return the response texts that environments receive: (those scored early, those at the end of the turn)."""
    logs = [[{"role": "user", "content": "", "token_ids": torch.tensor(ids)}] for ids in prompts]
    batch = BatchedDataDict(message_log=logs, extra_env_info=[None] * len(logs), task_name=["x"] * len(logs))
    conversations = Conversations(batch, tokenizer, 10**6)
    turn, read = conversations.begin(), []

    class Environment:
        scores_rows_alone = True

        class step:
            remote = staticmethod(lambda logs, infos: read.extend(log[-1]["content"] for log in logs))

    EarlyScoring(turn.active, tokenizer, {"x": Environment()}).finished(list(range(len(logs))), answers)
    inputs = turn.inputs
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)
    data = BatchedDataDict(input_ids=padded, input_lengths=inputs.lengths, stop_strings=[None] * len(logs))
    conversations.respond(turn, Engine(answers).generate(data))
    return read, [log[-1]["content"] for log in turn.active["message_log"]]


def generated(tokenizer, prompt, ids):
    """Return the text of `TextGenerator.generate`, and check that its pieces add up to it."""

    def generate(prompt, on_token, **settings):
        for token in ids:
            on_token(token)
        return "length"

    generator, pieces = TextGenerator.__new__(TextGenerator), []
    generator.tokenizer, generator._model = tokenizer, SimpleNamespace(generate=generate)
    generator.max_length, generator._end_token_ids, generator._encode = None, [], lambda text: prompt
    done = generator.generate("x", on_text=pieces.append)
    assert "".join(pieces) == done.text and done.token_ids == ids
    return done.text


def served(model, kind, body, ids):
    """Return the text of a server's answer. Check that the streamed answer and the texts of its log-probabilities are
    equal."""
    sample = Sample(list(ids), [-1.0] * len(ids), LENGTH, [((token, -1.0),) for token in ids])
    answer = kind(model, body, None, "1")
    header, chat = Header("1", "m", 0), kind is ChatAnswer
    (choice,) = answer.whole(header, [sample])["choices"]
    parts = []
    answer = kind(model, body, None, "1")
    for n, token in enumerate(ids):
        reason = LENGTH if n == len(ids) - 1 else 0
        progress = Progress(0, Sample([token], [-1.0], reason, [((token, -1.0),)]))
        parts += [part["choices"][0] for part in answer.chunk(header, progress)]
    if chat:
        text, streamed = choice["message"]["content"], [part["delta"].get("content", "") for part in parts]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert [entry for part in parts for entry in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert UNFINISHED in text or raw.decode() == text
    else:
        text, streamed, told = choice["text"], [part["text"] for part in parts], choice["logprobs"]
        tokens = told["tokens"]
        for name in told:
            assert [value for part in parts for value in part["logprobs"][name]] == told[name]
        assert all(text[at : at + len(token)] == token for at, token in zip(told["text_offset"], tokens, strict=True))
        assert all(token in found for token, found in zip(tokens, told["top_logprobs"], strict=True))
    assert "".join(streamed) == "".join(tokens) == text and len(tokens) == len(ids)
    assert sum((part["token_ids"] for part in parts), []) == list(ids)
    return text


@pytest.mark.parametrize("name", MADE)
def test_response_texts_of_rollouts_and_server_equal_those_decoded_by_transformers(name, tmp_path):
    from transformers import AutoTokenizer

    make, settings = MADE[name]
    make().save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": "{{ messages[0].content }} there", **settings}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    model = ServedModel(("m",), ours, None, len(ours), 10**6, (), None)
    drawn = list(rows(ours, 25, seed=len(name)))

    def expected(prompt_ids, ids):
        before, both = (
            theirs.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for part in (prompt_ids, [*prompt_ids, *ids])
        )
        assert both.startswith(before)
        return both[len(before) :]

    prompts = [ours(prompt)["input_ids"] for prompt, _ in drawn]
    rights = [expected(prompt, ids) for prompt, (_, ids) in zip(prompts, drawn)]
    early, late = rollout_texts(ours, prompts, [ids for _, ids in drawn])
    assert early == late == rights
    for (prompt, ids), prompt_ids, right in zip(drawn, prompts, rights):
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert text_of(theirs, ids, prompt_ids) == generated(ours, prompt_ids, ids) == right
        ask = {"max_tokens": 9, "return_token_ids": True}
        body = CompletionBody(prompt=prompt_ids, logprobs=1, **ask)
        assert served(model, CompletionAnswer, body, ids) == right
        body = ChatBody(messages=[{"role": "user", "content": prompt}], logprobs=True, top_logprobs=1, **ask)
        chat_ids = ChatAnswer(model, body, None, "1").prompts[0]
        assert served(model, ChatAnswer, body, ids) == expected(chat_ids, ids)


@pytest.mark.parametrize("skip", [True, False])
def test_utf8_character_split_between_prompt_and_response_appears_in_the_response_text(skip):
    for make in (lambda: byte_level([]), byte_fallback):
        backend = make()
        ids = backend.encode("the \U0001f642!", add_special_tokens=False).ids
        whole = backend.decode(ids)
        for cut in range(1, len(ids)):
            told = backend.decode(ids[:cut]).rstrip(UNFINISHED)
            assert told + text_of(SimpleNamespace(backend_tokenizer=backend), ids[cut:], ids[:cut], skip) == whole
