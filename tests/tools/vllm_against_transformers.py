"""Compares greedy responses of vLLM, which gets a checkpoint's weights by a refit, with those of transformers.

python tests/tools/vllm_against_transformers.py CHECKPOINT/policy/weights VLLM_PYTHON [float32|bfloat16]
"""

import sys
import time

import torch
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tokenizer import get_tokenizer
from nemo_rl_cpp.models.generation.vllm.vllm_generation import vllm_of
from nemo_rl_cpp.models.policy.lm_policy import Policy

TASKS, NEW = 16, 8


def prompts(tokenizer):
    texts = [f"3 + 4 = 7\n12 + 30 = 42\n5 + 20 = 25\n{7 * i % 50 + 1} + {11 * i % 50 + 1} =" for i in range(TASKS)]
    rows = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return rows, {"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in rows])}


def main(folder, python, precision="float32"):
    from transformers import AutoModelForCausalLM

    tokenizer = get_tokenizer({"name": folder, "chat_template": None})
    generation = {
        "backend": "vllm", "vllm_cfg": {"python": python, "enforce_eager": True}, "max_new_tokens": NEW, "stop_token_ids": [],
        "max_batch_size": TASKS,
    }  # fmt: skip
    config = PolicyConfig(model_name=folder, precision=precision, max_total_sequence_length=128, generation=generation)
    config.fill_defaults()
    policy = Policy(None, config, tokenizer, seed=0)
    engine = vllm_of(policy, config, tokenizer, seed=0)
    began = time.perf_counter()
    moved = engine.update_weights(policy.state_dict(), 1)
    print(
        f"refit: digest {moved.digest}, {moved.bytes / 1e6:.0f} MB in {moved.seconds:.2f} s; with vLLM's start {time.perf_counter() - began:.0f} s"
    )
    rows, data = prompts(tokenizer)
    out = engine.generate(data, greedy=True)
    engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()
    equal, gap = 0, 0.0
    for row, prompt in enumerate(rows):
        end = len(prompt) + NEW
        ours = out["output_ids"][row, :end]
        theirs = model.generate(prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        equal += torch.equal(ours, theirs)
        with torch.no_grad():
            chances = torch.log_softmax(model(ours[None]).logits[0].float(), -1)
        scored = chances[torch.arange(len(prompt) - 1, end - 1), ours[len(prompt) :]]
        gap = max(gap, float((scored - out["logprobs"][row, len(prompt) : end]).abs().max()))
    print(
        f"{precision}: {equal} of {TASKS} greedy texts of {NEW} tokens are equal; log-probabilities differ by at most {gap:.2g}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
