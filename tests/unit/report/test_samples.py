import json

from nemo_rl_cpp.report.samples import BUDGET, MAX_ANSWERS, MAX_TOKENS, Answer, SampleBook, read_groups
from synthetic_run import messages


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(reward, length=3, prompt="p"):
    mask = {} if length is None else {"token_loss_mask": [1] * length}
    return Answer({"content": messages(prompt, "r"), "rewards": reward} | mask)


def test_report_reads_training_and_validation_samples_from_their_files(tmp_path):
    turns = [*messages("p", "a"), {"role": "environment", "content": "correct"}]
    rows = [
        {
            "content": messages("prompt", "answer"),
            "rewards": 0.5,
            "token_loss_mask": [0, 0, 1, 1, 1],
            "truncated": True,
        },
        {"content": turns, "rewards": "nan", "ground_truth": 7},
    ]
    path = tmp_path / "train_data_step1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn": ')
    (first,), (second,) = read_groups(path)
    assert (first.prompt, first.response, first.reward, first.length) == ("prompt", "answer", 0.5, 3)
    assert (second.prompt, second.response, second.reward, second.length) == ("p", "a\n\ncorrect", None, None)


def test_responses_in_the_report_are_grouped_by_group_id_or_by_prompt(tmp_path):
    rows = [{"content": messages(f"q{g}", "a"), "rewards": g, "group_id": g} for g in (0, 1, 0, 1)]
    groups = read_groups(write(tmp_path / "a", rows))
    assert [[a.prompt for a in group] for group in groups] == [["q0", "q0"], ["q1", "q1"]]
    for row in rows:
        del row["group_id"]
    groups = read_groups(write(tmp_path / "b", sorted(rows, key=lambda row: row["rewards"])))
    assert [len(group) for group in groups] == [2, 2]


def row(text, mask, logprobs, **more):
    tokens = list(text.encode())
    return {
        "content": messages("q", text), "rewards": 1.0, "token_ids": tokens, "token_loss_mask": mask, "generation_logprobs": logprobs,
        "advantages": [0.5] * len(tokens),
    } | more  # fmt: skip


def test_report_shows_each_sampled_token_with_text_logprob_and_ratio(tmp_path):
    # a prompt's token, "ä" in two tokens, an environment's text, a last token
    mask = [0, 1, 1, 0, 1]
    given = row("qä b", mask, [0, -0.5, -0.25, 0, -2.0], prev_logprobs=[0, -0.5, -0.25, 0, -1.99])
    write(tmp_path / "train_data_step1.jsonl", [given])
    (step,) = SampleBook(tmp_path, lambda token: bytes([token])).samples()
    (shown,) = step["groups"][0]["answers"]
    assert shown["tokens"] == ["", "ä", " ", "b"] and shown["env"] == [2]
    assert shown["lp"] == [-50, -25, None, -200] and shown["ratio"] == [0, 0, None, 100]
    assert "adv" not in shown and shown["a"] == 0.5
    # the page can be made again without the tokenizer
    assert SampleBook(tmp_path).samples() == [step]


def test_report_shows_samples_whose_tokens_cannot_be_decoded_as_text(tmp_path):
    given = row("ab", [0, 1], [0, -1.0], prev_logprobs=[0, -1.0])
    write(tmp_path / "train_data_step1.jsonl", [given])
    (step,) = SampleBook(tmp_path).samples()
    assert step["groups"][0]["answers"][0]["text"] == "ab"
    (step,) = SampleBook(tmp_path, lambda token: b"\xff").samples()
    shown = {"i": 0, "r": 1.0, "n": 1, "a": 0.5, "tokens": ["\ufffd"], "lp": [-100], "ratio": 0}
    assert step["groups"][0]["answers"][0] == shown


def test_report_omits_samples_of_some_middle_steps_if_samples_exceed_the_size_limit(tmp_path):
    long = row("x" * 700, [1] * 700, [-1.0] * 700)
    for step in range(1, 12):
        rows = [long | {"group_id": n // 17, "rewards": n // 17} for n in range(34)]
        write(tmp_path / f"train_data_step{step}.jsonl", rows)
    steps = SampleBook(tmp_path, lambda token: bytes([token])).samples()
    shown = [step["step"] for step in steps]
    assert shown[0] == 1 and shown[-1] == 11 and len(shown) < 11
    tokens = [len(a["tokens"]) for step in steps for group in step["groups"] for a in group["answers"]]
    assert set(tokens) == {MAX_TOKENS} and sum(tokens) <= BUDGET
    group = steps[0]["groups"][0]
    assert group["of"] == 17 and len(group["answers"]) == MAX_ANSWERS and group["answers"][0]["gap"] == [192, 444]
