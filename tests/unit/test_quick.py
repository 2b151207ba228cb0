"""train_grpo: the forms of prompts and rewards, overrides, what comes back."""

import os
import subprocess
import sys

import pytest
import torch

import nemo_rl_cpp

ROWS = [{"prompt": f"{a}{b}=", "answer": f"{a}" * 3} for a in range(10) for b in range(2)]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def share_right(completions, answer):
    return [sum(c == a for c, a in zip(text, right)) / 3 for text, right in zip(completions, answer)]


def run(tmp_path, prompts=ROWS, reward=share_right, **options):
    settings = dict(num_steps=2, num_prompts_per_step=4, num_generations=4, max_new_tokens=3, max_length=16, log_dir=tmp_path)
    return nemo_rl_cpp.train_grpo("tiny-random", prompts, reward, **settings | options)


def test_rows_with_columns_for_the_reward(tmp_path):
    result = run(tmp_path, validation=ROWS[:3])
    assert [row["step"] for row in result.history] == [1, 2]
    assert len(result.rewards) == 2 and all(0 <= reward <= 1 for reward in result.rewards)
    assert [row["step"] for row in result.validations] == [0, 2] and result.validations[0]["num_samples"] == 3
    assert all(row["token_mult_prob_error"] == 1.0 for row in result.history)
    assert result.log_dir.is_relative_to(tmp_path) and "<iframe" in result._repr_html_()


def test_texts_are_continued_as_they_are(tmp_path):
    seen = []

    def reward(prompts, completions):
        seen.extend(prompts)
        return [float(len(text)) for text in completions]

    result = run(tmp_path, ["12=", "34="], reward, num_steps=1)
    assert sorted(set(seen)) == ["12=", "34="] and len(seen) == 8  # two prompts, although four were asked for
    assert result.config.grpo.num_prompts_per_step == 2


def test_conversations_go_through_the_chat_template(tmp_path):
    seen = []

    def reward(prompts, completions):
        seen.extend(prompts)
        return [1.0 for _ in completions]

    run(tmp_path, [[{"role": "user", "content": "12="}]], reward, num_steps=1)
    assert set(seen) == {"12="}  # the tiny tokenizer's template joins the contents


def test_answers_of_the_trained_policy(tmp_path):
    result = run(tmp_path, num_steps=1)
    answers = result.generate(["12=", "3="])
    assert len(answers) == 2 and answers == result.generate(["12=", "3="])
    assert result.generate("12=") == answers[:1]
    assert len(set(result.generate(["12="] * 8, greedy=False))) > 1


def test_overrides_reach_the_configuration(tmp_path):
    result = run(tmp_path, num_steps=1, overlong_filtering=True, loss_fn__ratio_clip_max=0.3, policy__optimizer__kwargs__weight_decay=0.5,
                 loss_fn__reference_policy_kl_penalty=0.01)  # fmt: skip
    config = result.config
    assert config.grpo.overlong_filtering and config.loss_fn.ratio_clip_max == 0.3
    assert config.policy.optimizer.kwargs.weight_decay == 0.5
    assert "kl_penalty" in result.history[0] and result.policy.reference is not None


def test_several_reward_functions_add_up(tmp_path):
    def constant(completions):
        return [0.25] * len(completions)

    def other(completions):
        return [0.5] * len(completions)

    assert run(tmp_path, ["1="], [constant, other], num_steps=1).rewards == [0.75]


def test_the_policy_is_saved_as_a_folder_that_loads_again(tmp_path):
    result = run(tmp_path, num_steps=1)
    folder = result.save(tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    again = nemo_rl_cpp.train_grpo(str(folder), ROWS, share_right, num_steps=0, max_new_tokens=3, max_length=16, log_dir=tmp_path / "again")
    assert again.policy.weight_digest() == result.policy.weight_digest()
    assert again.generate(["12="]) == result.generate(["12="])


def test_a_checkpoint_folder_resumes(tmp_path):
    run(tmp_path, num_steps=2, checkpoint_dir=tmp_path / "c")
    result = run(tmp_path, num_steps=3, checkpoint_dir=tmp_path / "c")
    assert [row["step"] for row in result.history] == [3]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [{"question": "1="}]}, "row 0 of prompts has no key 'prompt', it has \\['question'\\]"),
        ({"reward": None}, "reward_funcs is missing"),
        ({"prompts": ["1" * 40]}, "prompt 0 has 40 tokens, which leaves no room to answer within max_length=16"),
        ({"use_dynamic_samplin": True}, "use_dynamic_samplin is unknown; did you mean use_dynamic_sampling"),
        ({"num_generations": 0}, "num_generations_per_prompt"),
    ],
)
def test_mistakes_are_named(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, **arguments)


def test_a_reward_function_that_fails_says_so(tmp_path):
    def broken(completions):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(tmp_path, reward=broken)


def test_a_temporary_log_folder_goes_with_its_process(tmp_path):
    program = (
        "import os, sys\nfrom nemo_rl_cpp.quick import _temporary_folder\nfolder = _temporary_folder()\n(folder / 'x').write_text('')\n"
        "child = os.fork()\nif not child: sys.exit()\nos.waitpid(child, 0)\nprint((folder / 'x').exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.stdout == "True\n" and list(tmp_path.glob("nemo_rl_cpp_*")) == []
