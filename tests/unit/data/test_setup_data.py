import pytest
from nemo_rl_cpp.config.data import DataConfig
from nemo_rl_cpp.data.dataloader import StatefulDataLoader, load_dataloader_state, save_dataloader_state
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset
from nemo_rl_cpp.environments.response_data import load_response_data

ARITHMETIC = {"dataset_name": "arithmetic", "num_samples": 12, "env_name": "math"}
REVERSE = {"dataset_name": "reverse_digits", "num_samples": 8, "env_name": "digits"}


@pytest.fixture
def environments(monkeypatch):
    """Stands in for the environments, which start processes: records what is created and shut down."""
    log = []

    class Environment:
        def __init__(self, name, config):
            self.name, self.config = name, config

        def shutdown(self):
            log.append(f"shutdown {self.name}")

    def create_env(env_name, env_config, actors):
        log.append(f"create {env_name}")
        return Environment(env_name, env_config)

    monkeypatch.setattr("nemo_rl_cpp.environments.response_data.create_env", create_env)
    return log


def data(**sections):
    return DataConfig(max_input_seq_length=512, **sections)


def test_validation_rows_are_split_from_a_single_data_set(smollm2):
    made = load_response_data(smollm2, data(train={**ARITHMETIC, "split_validation_size": 5}))
    train, val = made.train, made.validation
    assert isinstance(train, AllTaskProcessedDataset) and (len(train), len(val)) == (12, 5)
    assert train.max_seq_length == 512
    datum = train[3]
    assert datum["task_name"] == "arithmetic" and datum["idx"] == 3 and datum["stop_strings"] == ["\n"]
    assert val[0]["message_log"][0]["content"].endswith(" = ") and val[0]["extra_env_info"]["ground_truth"].isdigit()


def test_several_data_sets_are_merged_and_each_environment_is_created_once(smollm2, environments):
    config = data(
        train=[ARITHMETIC, {**REVERSE, "split_validation_size": 3}],
        default={"env_name": "unused", "seed": 3},
        validation={"dataset_name": "arithmetic", "split": "validation", "num_samples": 4, "env_name": "math"},
    )
    before = repr(config)
    made = load_response_data(smollm2, config, {"math": {"a": 1}, "digits": {}})
    train, val, environments_of = made.train, made.validation, made.environments
    task_to_env, val_task_to_env = environments_of.train, environments_of.validation
    assert repr(config) == before
    assert environments == ["create math", "create digits"], "each environment once"
    assert (len(train), len(val)) == (20, 7)
    for each in (task_to_env, val_task_to_env):
        assert {name: env.name for name, env in each.items()} == {"arithmetic": "math", "reverse_digits": "digits"}
    assert task_to_env["arithmetic"] is val_task_to_env["arithmetic"] and task_to_env["arithmetic"].config == {"a": 1}
    assert {train[i]["task_name"] for i in range(20)} == {"arithmetic", "reverse_digits"}


def test_use_multiple_dataloader_gives_one_data_set_per_task(smollm2):
    made = load_response_data(smollm2, data(train=[ARITHMETIC, REVERSE], use_multiple_dataloader=True))
    train, val = made.train, made.validation
    assert {name: len(rows) for name, rows in train.items()} == {"arithmetic": 12, "reverse_digits": 8} and val is None
    assert train["reverse_digits"][0]["task_name"] == "reverse_digits"


def test_keys_of_a_data_section_take_precedence_over_keys_of_data_default(smollm2, tmp_path):
    (tmp_path / "p.txt").write_text("Q {}")
    default = {"prompt_file": str(tmp_path / "p.txt"), "processor": "math_hf_data_processor"}
    train = load_response_data(smollm2, data(train=ARITHMETIC, default=default)).train
    assert "<|im_start|>user\nQ " in train[0]["message_log"][0]["content"]
    own = {**ARITHMETIC, "prompt_file": None, "processor": "raw_completion_data_processor"}
    train = load_response_data(smollm2, data(train=own, default=default)).train
    assert train[0]["message_log"][0]["content"][0].isdigit()


def test_data_set_without_an_environment_to_score_it_is_an_error(smollm2, environments):
    with pytest.raises(ValueError, match="data.train.env_name is missing"):
        load_response_data(smollm2, data(train={"dataset_name": "arithmetic"}), {"math": {}})


def test_environments_are_shut_down_if_the_data_cannot_be_loaded(smollm2, environments):
    sections = {"train": [ARITHMETIC, {**REVERSE, "num_digits": 99}]}
    with pytest.raises(ValueError, match="num_digits"):
        load_response_data(smollm2, data(**sections), {"math": {}, "digits": {}})
    assert environments == ["create math", "create digits", "shutdown math", "shutdown digits"]


def test_data_sections_with_the_same_task_but_different_processors_are_an_error(smollm2):
    train = load_response_data(smollm2, data(train=[ARITHMETIC, {**ARITHMETIC, "max_number": 9}])).train
    assert len(train) == 24
    with pytest.raises(ValueError, match="task name 'arithmetic'"):
        load_response_data(smollm2, data(train=[ARITHMETIC, {**ARITHMETIC, "processor": "math_hf_data_processor"}]))


def test_data_sections_with_the_same_task_but_different_environments_are_an_error(smollm2, environments):
    sections = data(train=[ARITHMETIC, {**ARITHMETIC, "env_name": "digits"}])
    with pytest.raises(ValueError, match="task name 'arithmetic' but different prompts, processors or environments"):
        load_response_data(smollm2, sections, {"math": {}, "digits": {}})
    assert environments[2:] == ["shutdown math", "shutdown digits"]


def test_data_loader_batches_contain_prompt_lengths_and_resume_at_the_next_batch(smollm2, tmp_path):
    train = load_response_data(smollm2, data(train=ARITHMETIC)).train
    batches = StatefulDataLoader(train, 4, shuffle=True, drop_last=True, seed=42, num_workers=1)
    iterator = iter(batches)
    batch = next(iterator)
    assert batch.size == 4 and batch["length"].tolist() == [len(log[0]["token_ids"]) for log in batch["message_log"]]
    save_dataloader_state(batches, tmp_path)
    expected = next(iterator)["idx"]
    again = StatefulDataLoader(train, 4, shuffle=True, drop_last=True, seed=42)
    load_dataloader_state(again, tmp_path)
    assert next(iter(again))["idx"] == expected
