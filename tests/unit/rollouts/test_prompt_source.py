import pytest
from fakes import prompts
from nemo_rl_cpp.algorithms.parts import make_dataloader
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config.data import DataConfig
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.data.interfaces import DatumSpec
from nemo_rl_cpp.rollouts.rollouts import PromptSource


def rows(count):
    batch = prompts([str(i) for i in range(count)], ["t"] * count, [{} for _ in range(count)])
    return [DatumSpec(message_log=batch["message_log"][i], length=1, extra_env_info={}, loss_multiplier=1.0, idx=i, task_name="t")
            for i in range(count)]  # fmt: skip


def source(count=6, batch=2, generations=3, state=None, shuffle=False):
    loader = StatefulDataLoader(rows(count), batch, shuffle=shuffle, drop_last=True)
    return PromptSource(loader, generations, state or TrainState())


def test_prompt_source_repeats_each_prompt_per_group_and_numbers_the_samples_for_seeding():
    batch = source().next()
    assert batch["idx"] == [0, 0, 0, 1, 1, 1]
    assert batch["draw_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["group_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["sample_index"].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["stream"] == ["train"] * 6


def test_prompt_repeated_in_the_next_epoch_gets_a_new_sampling_seed_and_new_samples():
    prompts_of = source(count=4, batch=2, generations=1)
    drawn = [prompts_of.next() for _ in range(4)]
    assert [b["idx"] for b in drawn] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert [b["draw_ids"].tolist() for b in drawn] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_prompt_source_counts_an_epoch_as_finished_after_its_last_batch():
    prompts_of = source(count=5, batch=2)  # two batches an epoch, one row left over
    ended = []
    for _ in range(5):
        prompts_of.next()
        ended.append(prompts_of.finished_epochs)
    assert ended == [0, 1, 1, 2, 2]


def test_resumed_prompt_source_continues_with_the_next_rows_and_sampling_seeds():
    unbroken = source(count=10, batch=3, shuffle=True)
    expected = [unbroken.next() for _ in range(7)]
    state = TrainState()
    first = source(count=10, batch=3, shuffle=True, state=state)
    for _ in range(4):
        first.next()
    saved, counter = first.loader.state_dict(), state.draw_counter
    second = source(count=10, batch=3, shuffle=True, state=TrainState(draw_counter=counter))
    second.loader.load_state_dict(saved)
    for want in expected[4:]:
        got = second.next()
        assert got["idx"] == want["idx"] and got["draw_ids"].tolist() == want["draw_ids"].tolist()


@pytest.mark.parametrize("batch, drawn, ended", [
    (4, [[6, 7, 8, 9], [0, 1, 2, 3], [4, 5, 6, 7]], [1, 1, 2]),
    (5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4]], [1, 2, 2]),
    (10, [list(range(10))] * 2, [2, 3]),
])  # fmt: skip
def test_prompt_source_resumed_with_a_larger_batch_size_skips_an_incomplete_last_batch(batch, drawn, ended):
    first = source(count=10, batch=3, generations=1)
    first.next(), first.next()  # four rows are left
    second = source(count=10, batch=batch, generations=1)
    second.loader.load_state_dict(first.loader.state_dict())
    for rows_of_batch, epochs in zip(drawn, ended, strict=True):
        assert second.next()["idx"] == rows_of_batch
        assert second.finished_epochs == epochs


@pytest.mark.parametrize("section", ["grpo", "ppo"])
def test_error_for_too_few_prompts_names_the_relevant_configuration_section(section):
    wanted = f"{section}.num_prompts_per_step"
    with pytest.raises(ValueError, match=rf"3 rows, fewer than one batch of 4: lower {wanted} \(or {section}.batch"):
        make_dataloader(DataConfig(train={}), rows(3), 4, 0, section)
