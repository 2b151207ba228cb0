import json
import math

import pytest
import tiny
import torch
from nemo_rl_cpp.algorithms.algorithm import AnswerValidator, EqualAdvantages, given_answers
from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.algorithms.hooks import summary
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
from nemo_rl_cpp.algorithms.parts import make_data, make_tokenizer
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.distillation import SFTConfig, SFTLossConfig
from nemo_rl_cpp.config.master import SFTMasterConfig, checked
from nemo_rl_cpp.data.chat_template import PASSTHROUGH
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.data.datasets.response_datasets.response_dataset import ResponseDataset
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.data.processors import sft_processor
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.rollouts.batches import build_train_batch, spoken_by_assistant
from tokenizer_folders import byte_fallback, unigram

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def pieces(tokenizer, *contents, limit=None):
    roles = ("user", "assistant")
    row = {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}
    return sft_processor(row, TaskDataSpec("task"), tokenizer, limit, 0)


def test_sft_trains_only_assistant_messages_and_their_end_tokens():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    log = pieces(tokenizer, "1", "2", "3", "4")["message_log"]
    assert [message["role"] for message in log] == ["user", "assistant"] * 2
    end = tokenizer.eos_token
    assert [m["content"] for m in log] == ["<user>1</>\n<assistant>", "2</>\n", "<user>3</>\n<assistant>", f"4</>{end}"]
    with pytest.raises(ValueError, match="row 1 of the data: .*no answer to train"):
        pieces(tokenizer, "12=")


def test_sft_appends_the_end_token_to_a_plain_text_response():
    tokenizer = make_tokenizer(load_grpo_config("grpo_tiny.yaml").policy)
    log = pieces(tokenizer, "12=", "21")["message_log"]
    assert [m["content"] for m in log] == ["12=", f"21{tokenizer.eos_token}"]
    assert log[1]["token_ids"][-1] == tokenizer.eos_token_id
    cut = pieces(tokenizer, "12=", "21", limit=4)
    assert cut["loss_multiplier"] == 0 and cut["length"] == sum(len(m["token_ids"]) for m in log)


@pytest.mark.parametrize("make", [byte_fallback, unigram])
def test_sft_answers_have_the_tokens_that_they_have_within_the_conversation(make):
    backend = make()
    tokenizer = Tokenizer(backend, {"eos_token": "</s>", "chat_template": TURNS})
    log = pieces(tokenizer, "a cat", "the dog", "a", "dog")["message_log"]
    whole = "".join(message["content"] for message in log)
    assert torch.cat([m["token_ids"] for m in log]).tolist() == backend.encode(whole, add_special_tokens=False).ids


WITH_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "7", "arguments": {"x": 1}}}


@pytest.mark.parametrize("as_completion", [False, True])
@pytest.mark.parametrize("answer, trained", [
    ({"content": "2", "reasoning_content": "1+1"}, "(1+1)2</>"),
    ({"content": None, "tool_calls": [CALL]}, "[7]</>"),
    ({"content": [{"type": "text", "text": "3"}], "tool_calls": [CALL]}, "3[7]</>"),
])  # fmt: skip
def test_sft_trains_the_reasoning_and_the_tool_calls_of_the_last_answer(answer, trained, as_completion, tmp_path):
    asked, said = [{"role": "user", "content": "1"}], [{"role": "assistant", **answer}]
    row = {"prompt": asked, "completion": said} if as_completion else {"messages": asked + said}
    keys = {"input_key": "prompt", "output_key": "completion"} if as_completion else {}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (read,) = ResponseDataset(str(tmp_path / "rows.jsonl"), **keys).dataset
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = WITH_PARTS
    log = sft_processor(read, TaskDataSpec("task"), tokenizer, None, 0)["message_log"]
    assert [m["content"] for m in log] == ["<user>1</>\n<assistant>", trained + tokenizer.eos_token]
    if answer["content"] is None:
        tokenizer.chat_template = PASSTHROUGH
        with pytest.raises(ValueError, match="no answer to train"):
            sft_processor(read, TaskDataSpec("task"), tokenizer, None, 0)


def test_sft_trains_the_last_answer_alone_if_the_template_changes_earlier_ones(capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS.replace("{{ m.content }}", "{% if loop.last %}()\n{% endif %}{{ m.content }}", 1).replace(
        "loop.last", "loop.last and m.role == 'assistant'"
    )  # fmt: skip
    log = pieces(tokenizer, "1", "2", "3", "4")["message_log"]
    asked = "<user>1</>\n<assistant>2</>\n<user>3</>\n<assistant>"
    assert [(m["role"], m["content"]) for m in log] == [
        ("user", asked),
        ("assistant", f"()\n4</>{tokenizer.eos_token}"),
    ]
    assert "only the last answer of such rows is trained" in capsys.readouterr().err
    tokenizer.chat_template = "{{ messages | length }}" + TURNS
    with pytest.raises(ValueError, match="changes the messages before the last answer"):
        pieces(tokenizer, "1", "2", "3", "4")


def batch_of(rows):
    """Return a batch of rows of token ids, in each of which the last three are the response."""
    logs = [[{"role": "user", "token_ids": row[:-3]}, {"role": "assistant", "token_ids": row[-3:]}] for row in rows]
    samples = BatchedDataDict(
        message_log=logs, loss_multiplier=torch.ones(len(rows)), length=[len(row) for row in rows]
    )
    batch = build_train_batch(given_answers(samples)[0], pad_token_id=0, is_trained=spoken_by_assistant)
    EqualAdvantages().add(batch)
    return batch


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 15, (length,), generator=generator) for length in (9, 4, 12, 6, 7, 5)]


def policy_of(*overrides):
    tiny.one_thread()
    config = load_grpo_config("grpo_tiny.yaml", overrides).policy.model_copy(update={"train_global_batch_size": 6})
    return Policy(None, config, tiny_tokenizer(), seed=3, init_reference_model=False)


LOSS = ClippedPGLossFn(SFTLossConfig())


def test_sft_loss_equals_the_loss_of_transformers_on_the_same_samples(rows, tmp_path):
    transformers = pytest.importorskip("transformers")
    policy = policy_of()
    policy.save_checkpoint(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids, labels = torch.zeros(6, 12, dtype=torch.int64), torch.full((6, 12), -100)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
        labels[b, len(row) - 3 : len(row)] = row[-3:]
    attention = (torch.arange(12)[None] < torch.tensor([len(row) for row in rows])[:, None]).long()
    theirs = model(input_ids=ids, attention_mask=attention, labels=labels).loss
    ours = policy.train(batch_of(rows), LOSS, eval_mode=True)["loss"]
    assert ours.tolist() == pytest.approx([float(theirs.detach())], abs=1e-5)
    result = policy.train(batch_of(rows), LOSS)
    assert result["loss"].tolist() == ours.tolist() and result["exactness"] is None
    theirs.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert result["grad_norm"].tolist() == pytest.approx([norm], rel=1e-4)


def test_sft_trains_the_same_weights_with_and_without_sequence_packing(rows):
    packed = policy_of("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=64")
    alone = policy_of("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=1")
    for _ in range(3):
        results = [policy.train(batch_of(rows), LOSS) for policy in (packed, alone)]
        assert results[0]["loss"].tolist() == pytest.approx(results[1]["loss"].tolist(), rel=1e-6)
    for name, weight in packed.state_dict().items():
        torch.testing.assert_close(weight, alone.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batches, counted", [(0, 7), (-1, 7), (2, 6), (3, 7), (9, 7)])
def test_sft_validation_loss_is_the_mean_over_the_tokens_of_all_rows_also_of_a_smaller_last_batch(batches, counted):
    """The loss of a row is its number. Row i has i + 1 trained tokens, and a batch has 3 of the 7 rows."""
    rows = [
        {"message_log": [{"role": "user", "content": "", "token_ids": torch.tensor([3])},
                         {"role": "assistant", "content": "", "token_ids": torch.full((i + 1,), i + 1)}],
         "length": i + 2, "loss_multiplier": 1.0, "extra_env_info": {}, "idx": i}
        for i in range(7)
    ]  # fmt: skip

    class Model:
        skips_prev_logprobs = True

        def train(self, batch, loss_fn, eval_mode, gbs, mbs):
            assert eval_mode and gbs == batch.size and mbs == 1
            return {"loss": batch.input_ids[batch.token_mask != 0].double().mean()}

    loop = SFTConfig(val_batches=batches, val_global_batch_size=3)
    policy = load_grpo_config("grpo_tiny.yaml").policy
    loader = StatefulDataLoader(rows, 3)
    validator = AnswerValidator(None, loader, tiny_tokenizer(), {}, loop, policy, model=Model(), loss_fn=LOSS)
    numbers = [i + 1 for i in range(counted) for _ in range(i + 1)]
    expected = {
        "val_loss": pytest.approx(sum(numbers) / len(numbers)),
        "num_samples": counted,
        "num_tokens": len(numbers),
    }
    assert validator.run(1).metrics == expected


def sft_config(folder, **keys):
    same = load_grpo_config("grpo_tiny.yaml").model_dump()
    policy = {**same["policy"], "train_global_batch_size": 64, "train_micro_batch_size": 64}
    del policy["generation"]
    numbers = {"dataset_name": "reverse_digits", "num_digits": 3}
    data = {"train": numbers, "validation": numbers | {"split": "validation", "seed": 0}}
    section = {
        "max_num_epochs": 1000, "max_num_steps": 40, "val_period": 20, "val_global_batch_size": 20, "val_batches": 3,
        "val_at_end": True,
    }  # fmt: skip
    return {
        "sft": section | keys, "policy": policy, "data": data,
        "checkpointing": {"checkpoint_dir": str(folder / "checkpoints"), "save_period": 20},
        "logger": {"log_dir": str(folder / "logs"), "tensorboard_enabled": False, "monitor_gpus": False},
    }  # fmt: skip


def train(config):
    tiny.one_thread()
    with build_run(config) as run:
        run.train()
    return run


def test_sft_does_not_train_on_rows_longer_than_the_longest_sequence_of_the_policy(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"question": "1=", "answer": "{"2" * length}"}}\n' for length in (3, 30)))
    config = sft_config(tmp_path)
    keys = {"dataset_name": "ResponseDataset", "data_path": str(file), "input_key": "question", "output_key": "answer"}
    config["data"] = {"train": keys}
    config = checked(config, SFTMasterConfig)
    rows = make_data(config, make_tokenizer(config.policy)).train
    assert [rows[i]["loss_multiplier"] for i in range(2)] == [1.0, 0.0]


@pytest.mark.slow
def test_sft_run_lowers_the_loss_and_resumes_bit_identically(tmp_path):
    whole = train(sft_config(tmp_path / "whole"))
    losses = [row["loss"] for row in whole.history]
    assert losses[-1] < 0.8 * losses[0]
    assert [row["step"] for row in whole.validations] == [0, 20, 40]
    assert whole.validations[-1]["val_loss"] < whole.validations[0]["val_loss"]
    assert whole.validations[0]["num_samples"] == 60
    train(sft_config(tmp_path / "parts", max_num_steps=20, val_at_end=False))
    second = train(sft_config(tmp_path / "parts"))
    assert second.policy.weight_digest() == whole.policy.weight_digest()
    assert second.validations[-1]["val_loss"] == whole.validations[-1]["val_loss"]
    assert (whole.log_dir / "report.html").is_file()
    of_rollouts = {
        "reward", "accuracy", "advantages/mean", "baseline_reward/pct_0", "groups/num", "probs_ratio", "probs_ratio_min",
        "approx_entropy", "token_mult_prob_error", "sampling_importance_ratio", "generation_tokens_per_sec",
    }  # fmt: skip
    assert not of_rollouts & whole.history[0].keys()
    report = (whole.log_dir / "report.html").read_text()
    assert "trainer and generator agree" not in report and "entropy collapsed" not in report
    table = summary(whole, 0, 1.0)
    assert "reward" not in table and table["loss"] == f"{losses[0]:.3f} -> {losses[-1]:.3f}"
