from nemo_rl_cpp.data.datasets import load_response_dataset
from nemo_rl_cpp.data.processors import raw_completion_data_processor


def questions(rows):
    return [row["messages"][0]["content"] for row in rows]


def test_generated_arithmetic_rows_have_correct_sums_and_disjoint_validation_questions():
    data = load_response_dataset({"dataset_name": "arithmetic", "split_validation_size": 256})
    assert data.processor is raw_completion_data_processor and data.task_name == "arithmetic"
    assert len(data.val_dataset) == 256 and len(data.dataset) > 2000
    sides = []
    for rows in (data.dataset, data.val_dataset):
        asked, shown = set(), set()
        for row in rows:
            *shots, last = row["messages"][0]["content"].split("\n")
            assert len(set(shots)) == 3 and row["stop_strings"] == ["\n"]
            for shot in shots:
                a, _, b, _, c = shot.split(" ")
                assert int(a) + int(b) == int(c)
                shown.add(tuple(sorted((int(a), int(b)))))
            a, b = int(last.split(" ")[0]), int(last.split(" ")[2])
            assert last == f"{a} + {b} = " and row["messages"][1]["content"] == str(a + b)
            assert 1 <= min(a, b) <= max(a, b) <= 50
            assert f"{a} + {b} = {a + b}" not in shots
            asked.add(tuple(sorted((a, b))))
        sides.append((asked, shown))
    (train, shown_in_train), (val, shown_in_val) = sides
    assert not val & (train | shown_in_train | shown_in_val), "validation pairs are never asked or shown in training"


def test_arithmetic_training_and_validation_questions_never_overlap():
    def pairs(**options):
        data = load_response_dataset({"dataset_name": "arithmetic", **options})
        return {row["messages"][0]["content"].split("\n")[-1] for row in data.dataset}

    train = pairs(seed=1, max_number=60) | pairs(seed=2)
    for options in ({"seed": 3}, {"max_number": 99, "num_samples": 300}):
        assert not train & pairs(split="validation", **options)
    assert len(pairs(split="validation")) >= 256


def test_generated_arithmetic_prompt_and_answer_tokenize_separately_as_they_do_together(smollm2):
    row = load_response_dataset({"dataset_name": "arithmetic", "num_samples": 1}).dataset[0]
    prompt, answer = (m["content"] for m in row["messages"])
    assert smollm2.encode(prompt) + smollm2.encode(answer + "\n") == smollm2.encode(prompt + answer + "\n")


def test_generated_rows_depend_only_on_the_seed():
    def rows(name, **options):
        return list(load_response_dataset({"dataset_name": name, "num_samples": 20, **options}).dataset)

    for name, options in (("arithmetic", {}), ("reverse_digits", {}), ("reasoning_gym", {"task": "gcd"})):
        assert rows(name, seed=5, **options) == rows(name, seed=5, **options) != rows(name, seed=6, **options)
    first = rows("arithmetic", seed=42)[0]["messages"][0]["content"]
    assert first == "44 + 12 = 56\n18 + 7 = 25\n15 + 46 = 61\n15 + 38 = "


def test_generated_questions_repeat_only_after_all_distinct_questions_were_used():
    data = load_response_dataset({"dataset_name": "reverse_digits", "num_digits": 1, "num_samples": 25})
    asked = questions(data.dataset)
    different = len(set(asked))
    assert 5 <= different <= 10 and len(set(asked[:different])) == different and len(asked) == 25


def test_generated_reverse_digits_rows_are_correct_and_disjoint_from_validation_rows(tiny):
    data = load_response_dataset({"dataset_name": "reverse_digits", "split_validation_size": 0.1})
    assert not set(questions(data.dataset)) & set(questions(data.val_dataset))
    for row in data.dataset:
        question, answer = (m["content"] for m in row["messages"])
        assert question == answer[::-1] + "=" and len(answer) == 3 and 3 not in tiny.encode(question)


def test_reasoning_gym_data_rows_can_be_scored_by_the_reasoning_gym_package():
    import reasoning_gym

    data = load_response_dataset({
        "dataset_name": "reasoning_gym", "task": "letter_counting", "num_samples": 30, "split_validation_size": 10,
        "seed": 1,
    })  # fmt: skip
    assert data.task_name == "reasoning_gym-letter_counting" and (len(data.dataset), len(data.val_dataset)) == (30, 10)
    asked = {
        side: {row["extra_env_info"]["reasoning_gym_entry"]["question"] for row in rows}
        for side, rows in (("train", data.dataset), ("val", data.val_dataset))
    }
    assert len(asked["train"]) == 30 and not asked["train"] & asked["val"]
    score = reasoning_gym.get_score_answer_fn("letter_counting")
    for row in data.dataset:
        entry = row["extra_env_info"]["reasoning_gym_entry"]
        prompt = row["messages"][0]["content"]
        assert prompt.count("Question: ") == 4 and prompt.endswith(f"Question: {entry['question']}\nAnswer:")
        assert score(row["messages"][1]["content"], entry) == 1.0 and row["stop_strings"] == ["\n"]


def test_multi_line_reasoning_gym_answers_are_not_truncated_to_the_first_line():
    data = load_response_dataset(
        {"dataset_name": "reasoning_gym", "task": "mini_sudoku", "num_samples": 4, "num_shots": 1}
    )
    assert data.dataset[0]["stop_strings"] == ["\n\nQuestion:"] and "\n" in data.dataset[0]["messages"][1]["content"]


def test_reference_solutions_of_the_python_functions_data_set_pass_their_test_cases():
    train = load_response_dataset({"dataset_name": "python_functions"}).dataset
    held_out = load_response_dataset({"dataset_name": "python_functions", "split": "validation"}).dataset
    for row in [*train, *held_out]:
        info, answer = row["extra_env_info"], row["messages"][1]["content"]
        assert row["messages"][0]["content"].endswith(info["code_prefix"])
        space = {}
        exec(info["code_prefix"] + answer, space)
        for statement in info["ground_truth"]:
            exec(statement, space)
    names = [{row["extra_env_info"]["code_prefix"] for row in rows} for rows in (train, held_out)]
    assert not names[0] & names[1] and min(map(len, names)) > 20
