"""What a run reads: its tokenizer, its data sets with their loaders, and the environments that score the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_cpp.config.data import DataConfig
from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.utils import load_response_data
from nemo_rl_cpp.environments.group import Environments
from nemo_rl_cpp.environments.ray_environment import ActorSettings
from nemo_rl_cpp.models.model_folder import TINY_RANDOM

if TYPE_CHECKING:
    from nemo_rl_cpp.data.utils import Datasets


@dataclass
class RunData:
    """Data sets, several of them by task name, and environments."""

    train: AllTaskProcessedDataset | Mapping[str, AllTaskProcessedDataset]
    validation: AllTaskProcessedDataset | None
    environments: Environments


def make_tokenizer(policy: PolicyConfig) -> TokenizerType:
    """The tokenizer of the section `policy.tokenizer`; tiny-random has a character tokenizer of its own."""
    if policy.model_name == TINY_RANDOM and policy.tokenizer.name in (None, TINY_RANDOM):
        from nemo_rl_cpp.data.template_choice import choose_template
        from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer

        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = choose_template(
            policy.tokenizer.chat_template, tokenizer.chat_template, "policy.tokenizer.chat_template"
        )
        return tokenizer
    from nemo_rl_cpp.data.tokenizer import get_tokenizer

    return get_tokenizer(policy.tokenizer)


def make_data(config: TrainMasterConfig, tokenizer: TokenizerType) -> RunData:
    """Data sets and environments of the sections `data` and `env`; starts the environments' processes."""
    limit = config.policy.max_total_sequence_length
    actors = ActorSettings.of(config.cluster) if config.cluster.executor == "ray" else None
    data = load_response_data(tokenizer, config.data, config.env, limit, actors)
    return RunData(data.train, data.validation, Environments(data.environments, data.val_environments))


def make_dataloader(
    data: DataConfig, dataset: Datasets, num_prompts: int, seed: int, section: str = "grpo"
) -> StatefulDataLoader | MultipleDataloaderWrapper:
    """The training loader, `num_prompts` prompts at a time; with several data sets in a dictionary, one loader each.
    `section` is the training loop's, which messages name."""

    def one(rows: AllTaskProcessedDataset, batch_size: int) -> StatefulDataLoader:
        if 0 < len(rows) < batch_size:
            raise ValueError(
                f"the data set has {len(rows)} rows, fewer than one batch of {batch_size}: lower "
                f"{section}.num_prompts_per_step (or {section}.batch_multiplier), or take more data"
            )
        return StatefulDataLoader(
            rows, batch_size, shuffle=data.shuffle, drop_last=True, seed=seed, num_workers=data.num_workers
        )

    if not isinstance(dataset, dict):
        return one(dataset, num_prompts)
    each = data.num_prompts_per_dataloader or num_prompts
    return MultipleDataloaderWrapper(num_prompts, data, {name: one(rows, each) for name, rows in dataset.items()})


def make_val_dataloader(dataset: AllTaskProcessedDataset | None, loop: LoopConfig) -> StatefulDataLoader | None:
    """The validation loader in the data's own order; None without data."""
    if dataset is None:
        return None
    sizes = [size for size in (loop.val_batch_size, loop.max_val_samples, len(dataset)) if size is not None]
    return StatefulDataLoader(dataset, min(sizes))
