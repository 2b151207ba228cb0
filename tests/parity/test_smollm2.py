import pytest
import torch
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.models.policy.lm_policy import Policy

TEXTS = [
    "The capital of France is", "Once upon a time", "3 + 4 = 7\n8 + 5 =", "def fibonacci(n):", "Water boils at", "The three primary colours are",
    "In 1969,", "Dear Sir or Madam,",
]  # fmt: skip


@pytest.fixture(scope="module")
def models():
    from nemo_rl_cpp.hub.sources import resolve_model
    from transformers import AutoModelForCausalLM

    folder = str(resolve_model("smollm2-135m-instruct"))
    config = PolicyConfig(
        model_name=folder,
        precision="float32",
        max_total_sequence_length=128,
        generation={"max_new_tokens": 64, "stop_token_ids": []},
    )
    config.fill_defaults()
    tokenizer = Tokenizer.from_pretrained(folder)
    policy = Policy(None, config, tokenizer, init_reference_model=False)
    return policy, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def test_logits_and_greedy_text_of_smollm2_match_transformers(models):
    policy, hf, tokenizer = models
    rows = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    with torch.inference_mode():
        expected = hf(input_ids=rows[0][None]).logits[0]
    torch.testing.assert_close(policy.trainer.logits(rows[0]), expected, rtol=1e-3, atol=1e-3)

    inputs = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "input_lengths": torch.tensor([len(r) for r in rows]),
    }
    outputs = policy.create_generation().generate(inputs, greedy=True)
    for text, row, total, prompt in zip(
        TEXTS, outputs["output_ids"], outputs["unpadded_sequence_lengths"], rows, strict=True
    ):
        with torch.inference_mode():  # greedy text is equal when every token is the likeliest after those before it
            theirs = hf(input_ids=row[None, :total]).logits[0].argmax(-1)
        assert total == len(prompt) + 64
        assert torch.equal(row[len(prompt) : total], theirs[len(prompt) - 1 : total - 1]), text
