"""Prompt ids and end tokens of eight kinds of tokenizers, in transformers and in every command of this package."""

import json
import warnings

import nemo_rl_cpp
import pytest
import torch
from nemo_rl_cpp.config import load_eval_config
from nemo_rl_cpp.data.tokenizer import get_tokenizer
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.evals import eval as evaluation
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.hub.sources import find_policy_weights
from nemo_rl_cpp.models.generation.interfaces import Responses
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.rollouts.rollouts import repeat_prompts
from tokenizer_folders import KINDS, TEXT, write

MESSAGES = [{"role": "user", "content": TEXT}]
NEW = 40


def transformers_answer(folder, prompt):
    """Return (prompt ids, response ids) of transformers for a text or a conversation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
    )
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    given = torch.tensor([ids])
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False)
    return ids, out[0, len(ids) :].tolist()


def generates(folder, prompt, monkeypatch):
    """Return (prompt ids, response ids) of `nemo-rl-cpp generate`."""
    generator = TextGenerator(folder, precision="float32")
    seen, encode = [], generator._encode
    monkeypatch.setattr(generator, "_encode", lambda given: seen.append(encode(given)) or seen[-1])
    done = generator.generate(prompt, greedy=True, max_new_tokens=NEW)
    assert done.finish_reason == ("stop" if len(done.token_ids) < NEW else "length")
    return seen[0], done.token_ids


def evaluates(folder, tmp_path):
    """Return (prompt ids, response ids) of an evaluation of the unchanged text."""
    (tmp_path / "eval.jsonl").write_text(json.dumps({"input": TEXT, "output": "42"}) + "\n")
    config = load_eval_config(
        "evals/eval.yaml",
        [f"generation.model_name={find_policy_weights(str(folder))}", "data.dataset_name=ResponseDataset", f"++data.data_path={tmp_path / 'eval.jsonl'}",
         "data.processor=raw_completion_data_processor", "data.env_name=arithmetic", "++env.arithmetic={}",
         f"generation.max_new_tokens={NEW}", "generation.vllm_cfg.max_model_len=200", "generation.vllm_cfg.precision=float32"],
    )  # fmt: skip
    tokenizer = get_tokenizer(config.tokenizer)
    loader = evaluation.make_loader(config, tokenizer)
    generation = evaluation.make_generation(config, tokenizer)
    batch = repeat_prompts(next(iter(loader)), 1, 0, stream="eval")
    ids = batch["message_log"][0][0]["token_ids"]
    out = generation.generate({"input_ids": ids[None], "input_lengths": torch.tensor([len(ids)]), "stream": "eval"})
    return ids.tolist(), out["output_ids"][0, len(ids) : out["unpadded_sequence_lengths"][0]].tolist()


class Watched:
    """A record of the prompts and responses of a run's engine, by stream."""

    def __init__(self, monkeypatch):
        self.calls = []
        generate = NativeGeneration.generate

        def watched(engine, data, *args, **kwargs):
            out = generate(engine, data, *args, **kwargs)
            self.calls.append((data, out, engine))
            return out

        monkeypatch.setattr(NativeGeneration, "generate", watched)

    def of(self, stream):
        """Yield (prompt ids, response ids, end tokens) of all rows of a stream."""
        for data, out, engine in self.calls:
            if list(data["stream"])[0] == stream:
                prompts, responses = (
                    RaggedBatch.of(data),
                    Responses.of(out, torch.as_tensor(data["input_lengths"]).long()),
                )
                of_rows = zip(
                    prompts.rows(prompts.tokens["input_ids"]), responses.rows(responses.token_ids), strict=True
                )
                for prompt, response in of_rows:
                    yield prompt.tolist(), response.tolist(), set(engine._stop_token_ids)


def train(folder, prompt, out):
    return nemo_rl_cpp.train_grpo(
        str(folder), [prompt], lambda completions: [float(len(text)) for text in completions], 1, validation=[prompt], num_generations=4,
        max_new_tokens=NEW, max_length=200, learning_rate=1e-7, temperature=1.0, log_dir=out / "logs", checkpoint_dir=out / "run",
        policy__generation__val_temperature=0.0,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore:the model's end tokens are:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_prompt_ids_and_end_tokens_match_transformers_in_every_command(name, tmp_path, monkeypatch):
    kind, folder = KINDS[name], write(KINDS[name], tmp_path / "base")
    prompts = [TEXT] + [MESSAGES] * ("chat_template" in kind.settings)
    expected = [transformers_answer(folder, prompt) for prompt in prompts]
    tokenizer = get_tokenizer({"name": str(folder)})
    ends = {tokenizer.convert_tokens_to_ids(text) for text in kind.ends}
    assert expected[0][1][-1] == tokenizer.convert_tokens_to_ids(kind.end) and 4 < len(expected[0][1]) < NEW
    # before training
    assert [generates(folder, prompt, monkeypatch) for prompt in prompts] == expected
    assert evaluates(folder, tmp_path) == expected[0]
    for number, (prompt, (ids, answer)) in enumerate(zip(prompts, expected)):
        # in training and validation
        engine = Watched(monkeypatch)
        result = train(folder, prompt, tmp_path / str(number))
        assert all(given == ids and stops == ends for given, _, stops in engine.of("train"))
        assert next(engine.of("val")) == (ids, answer, ends)
        # after training
        result.generate([prompt])
        after = list(engine.of("eval"))[-1]
        weights = tmp_path / str(number) / "run" / "step_1" / "policy" / "weights"
        assert after == (*transformers_answer(weights, prompt), ends) and after[0] == ids
        assert generates(weights, prompt, monkeypatch) == after[:2]
        if prompt is TEXT:
            assert evaluates(tmp_path / str(number) / "run", tmp_path) == after[:2]
        assert_same_files(folder, weights, ends)


def assert_same_files(base, weights, ends):
    """Check that transformers reads the same tokenizer and generation settings from both folders."""
    from transformers import AutoTokenizer, GenerationConfig

    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(weights)
    assert before.chat_template == after.chat_template and before.get_vocab() == after.get_vocab()
    assert before.special_tokens_map == after.special_tokens_map
    for text in (TEXT, "<|im_start|>user\nx <|im_end|> y<tool>z", ""):
        assert (
            before(text)["input_ids"]
            == after(text)["input_ids"]
            == get_tokenizer({"name": str(base)})(text)["input_ids"]
        )
    saved = GenerationConfig.from_pretrained(weights)
    assert set(torch.tensor(saved.eos_token_id).view(-1).tolist()) == ends
    if (base / "generation_config.json").exists():
        assert json.loads((base / "generation_config.json").read_text()) == json.loads(
            (weights / "generation_config.json").read_text()
        )


def test_model_end_tokens_without_the_tokenizers_end_token_give_a_warning(tmp_path):
    folder = write(KINDS["other_end"], tmp_path)
    with pytest.warns(
        UserWarning, match=r"end tokens are \[4\].*'<eos>' \(3\) is not among them.*stop_token_ids=\[4, 3\]"
    ):
        TextGenerator(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TextGenerator(write(KINDS["qwen"], tmp_path / "qwen"))
