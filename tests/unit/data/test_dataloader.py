import json
from itertools import islice

import pytest
from nemo_rl_cpp.config.data import DataConfig
from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader
from nemo_rl_cpp.data.random_order import Draws, is_held_out, permutation
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict


def loader(n=10, batch_size=3, **options):
    return StatefulDataLoader(list(range(n)), batch_size, collate_fn=list, **options)


def test_shuffled_row_order_depends_only_on_seed_and_epoch():
    orders = {(seed, epoch): permutation(50, seed, epoch) for seed in range(5) for epoch in range(5)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 25
    assert permutation(50, 3, 2) == orders[3, 2] and permutation(0, 1, 1) == []


def test_seeded_random_numbers_are_reproducible_and_distinct_draws_contain_no_duplicates():
    draws, again = Draws(1, 2), Draws(1, 2)
    assert [draws.below(10) for _ in range(5)] == [again.below(10) for _ in range(5)] != [draws.below(10)] * 5
    assert sorted(Draws(0).distinct(4, 5, exclude=2)) == [0, 1, 3, 4]
    with pytest.raises(ValueError, match="cannot draw"):
        Draws(0).distinct(5, 5, exclude=0)
    share = sum(is_held_out(str(i), 0.15) for i in range(4000)) / 4000
    assert abs(share - 0.15) < 0.03


@pytest.mark.parametrize("drop_last, sizes", [(True, [3, 3, 3]), (False, [3, 3, 3, 1])])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_data_loader_visits_every_row_once_per_epoch_in_a_seeded_order(drop_last, sizes, num_workers):
    plain = loader(drop_last=drop_last, num_workers=num_workers)
    batches = list(plain)
    assert [len(batch) for batch in batches] == sizes and len(plain) == len(sizes)
    assert sum(batches, []) == list(range(sum(sizes)))
    assert list(plain) == batches, "without shuffling every epoch is alike"
    shuffled = loader(drop_last=drop_last, shuffle=True, seed=7, num_workers=num_workers)
    epochs = [sum(shuffled, []) for _ in range(3)]
    assert epochs == [permutation(10, 7, e)[: sum(sizes)] for e in range(3)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader_resumes_with_the_next_batch_from_every_position(num_workers):
    options = {"shuffle": True, "drop_last": True, "seed": 3}
    whole = loader(**options)
    expected = [batch for _ in range(3) for batch in whole]
    for taken in range(8):
        first = loader(**options, num_workers=num_workers)
        seen = list(islice((batch for _ in range(3) for batch in first), taken))
        state = json.loads(json.dumps(first.state_dict()))
        second = loader(**options)
        second.load_state_dict(state)
        rest = [batch for _ in range(3) for batch in second]
        assert (seen + rest)[:9] == expected, taken


def test_data_loader_resumes_at_the_next_row_if_the_batch_size_changed():
    first = loader(batch_size=2)
    iterator = iter(first)
    next(iterator), next(iterator)
    second = loader(batch_size=3)
    second.load_state_dict(first.state_dict())
    assert list(second) == [[4, 5, 6], [7, 8, 9]]


def test_new_iteration_over_a_data_loader_restarts_an_unfinished_epoch():
    validation = loader()
    for _ in validation:
        break
    assert sum(validation, []) == list(range(10)), "an early stop must not shift the next validation"


def test_data_loader_iterator_raises_after_a_newer_iterator_was_used():
    data = loader()
    old = iter(data)
    next(old)
    next(iter(data))
    with pytest.raises(RuntimeError, match="left behind"):
        next(old)
    unused = loader(shuffle=True)
    iter(unused)
    assert sum(unused, []) == permutation(10, 42, 0), "an iterator that gave nothing leaves the epoch as it is"
    old = iter(unused)
    unused.load_state_dict(unused.state_dict())
    with pytest.raises(RuntimeError, match="left behind"):
        next(old)


def test_position_in_other_data_or_another_order_is_an_error():
    for other, said in (
        (loader(n=11), "data.train has 11 rows, not 10, so this is another run than the checkpoint's: set it back"),
        (loader(seed=1), "has seed 1, not 42"), (loader(shuffle=True), "has shuffle True, not False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            other.load_state_dict(loader().state_dict())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_processor_error_is_raised_to_the_user_of_the_data_loader(num_workers):
    class Bad(list):
        def __getitem__(self, i):
            if i == 4:
                raise KeyError("row 4 is bad")
            return i

    data = StatefulDataLoader(Bad(range(6)), 2, collate_fn=list, num_workers=num_workers)
    iterator = iter(data)
    assert [next(iterator), next(iterator)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match="row 4"):
        next(iterator)


class Rows:
    """Processed rows whose idx tells the task and the place."""

    def __init__(self, task, n):
        self.task, self.n = task, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        common = {"message_log": [], "loss_multiplier": 1.0, "extra_env_info": None}
        return {**common, "length": i + 1, "idx": i, "task_name": self.task}


def several(expected=4, each=2, **config):
    sizes = {"a": 4, "b": 6, "c": 2}
    loaders = {task: StatefulDataLoader(Rows(task, n), each, drop_last=True) for task, n in sizes.items()}
    return MultipleDataloaderWrapper(expected, DataConfig(**config), loaders)


def taken(batch):
    return [f"{task}{i}" for task, i in zip(batch["task_name"], batch["idx"])]


def test_several_data_loaders_are_read_round_robin_and_exhausted_ones_restart():
    batches = several()
    expected = ["a0 a1 b0 b1", "c0 c1 a2 a3", "b2 b3 c0 c1", "a0 a1 b4 b5"]
    assert [" ".join(taken(next(batches))) for _ in range(4)] == expected
    batch = next(batches)
    assert batch["batch_max_length"].tolist() == [int(batch["length"].max())] * 4


def test_several_data_loaders_resume_with_the_next_batch():
    whole = several()
    expected = [taken(next(whole)) for _ in range(9)]
    for done in range(6):
        first, second = several(), several()
        for _ in range(done):
            next(first)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [taken(next(second)) for _ in range(9 - done)] == expected[done:], done


def a_and_b(data_iterators, dataloaders):
    return BatchedDataDict.from_batches([next(data_iterators[name]) for name in "ab"]), data_iterators


def test_custom_dataloader_function_selects_the_batches_and_resumes():
    custom = f"{__name__}.a_and_b"
    batches = several(custom_dataloader=custom)
    assert taken(next(batches)) == ["a0", "a1", "b0", "b1"]
    again = several(custom_dataloader=custom)
    again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    assert taken(next(batches)) == taken(next(again)) == ["a2", "a3", "b2", "b3"]
    with pytest.raises(ValueError, match="custom_dataloader gives 4 prompts, not 6"):
        next(several(expected=6, custom_dataloader=custom))
    with pytest.raises(ValueError, match="has no none"):
        several(custom_dataloader=f"{__name__}.none")
    with pytest.raises(ValueError, match="num_prompts_per_dataloader gives 6 prompts, not 5"):
        next(several(expected=5))
