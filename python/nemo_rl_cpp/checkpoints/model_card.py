"""README.md of a model folder: what the model is, how it was trained, and how to load it, with front matter for the
Hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp import __version__
from nemo_rl_cpp.config.data import datasets_of
from nemo_rl_cpp.files.durable import write_atomic
from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig

CARD = "README.md"
_MARK = "<!-- written by nemo_rl_cpp"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")
_PACKAGED = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_GIVEN = "nemo_rl_cpp.api.Rows"  # the data set name of rows passed from Python


class CardFacts(NamedTuple):
    """The facts of a model card that are not in the configuration.

    Attributes:
        step: the number of finished steps.
        rewards: the names of the environments or reward functions.
        results: metric -> value, from the last step or validation.
        components: names of losses and estimators that were passed as objects, keyed by the configuration section that
            each replaces.
    """

    step: int
    rewards: list[str]
    results: Mapping[str, float]
    components: Mapping[str, str]


def write_card(folder: Path, config: TrainMasterConfig, facts: CardFacts) -> None:
    """Write README.md into a model folder, unless it has a README.md of another program."""
    path = folder / CARD
    if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    write_atomic(path, card_text(config, facts), durable=False)


def card_text(config: TrainMasterConfig, facts: CardFacts) -> str:
    """Return the text of README.md. It shows only the last part of a local folder's path."""
    base = _PACKAGED.get(config.policy.model_name.lower(), config.policy.model_name)
    named = datasets_of(config.data.train, "data.train")
    sets = [(each.dataset_name, getattr(each, "data_path", None)) for _, each in named]
    front: dict[str, Plain] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", config.algorithm, "nemo_rl_cpp"],
    }
    if _is_repository(base):
        front["base_model"] = base
    if names := [path for _, path in sets if path is not None and _is_repository(path)]:
        front["datasets"] = list(dict.fromkeys(names))
    title = f"{_shown(base)}, trained with {config.algorithm.upper()}"
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in _rows(config, facts, base, sets).items())
    return (
        f"---\n{dump_yaml(front).strip()}\n---\n\n{_MARK} {__version__} -->\n\n# {title}\n\n"
        f"This model was trained by reinforcement learning with nemo_rl_cpp. Its terms of use are those of the base model.\n\n"
        f"| | |\n|---|---|\n{table}\n{_LOADING}"
    )


def _cell(value: object) -> str:
    """Escape a text for a cell of a Markdown table."""
    return re.sub(r"([\\|<`*])", r"\\\1", " ".join(str(value).split()))


_LOADING = """
## How to load it

With transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER OR REPOSITORY")
model = AutoModelForCausalLM.from_pretrained("FOLDER OR REPOSITORY")
```

With nemo_rl_cpp:

```python
import nemo_rl_cpp

model = nemo_rl_cpp.load("FOLDER OR REPOSITORY")
print(model.chat("Hello"))
```
"""


def _rows(
    config: TrainMasterConfig, facts: CardFacts, base: str, sets: list[tuple[str, str | None]]
) -> dict[str, object]:
    loop, policy = config.loop, config.policy
    estimator = facts.components.get("adv_estimator", loop.adv_estimator.name)
    loss = facts.components.get("loss_fn", config.loss_fn.name)
    data = [
        "rows given from Python" if name == _GIVEN else _shown(name) if path is None else f"{name}, {_shown(path)}"
        for name, path in sets
    ]
    rows: dict[str, object] = {
        "base model": _shown(base),
        "algorithm": f"{config.algorithm.upper()}, advantage estimator {estimator}, loss {loss}",
        "steps": f"{facts.step}, of {loop.num_prompts_per_step} prompts with {loop.num_generations_per_prompt} responses each",
        "data": ", ".join(data),
        "rewards": ", ".join(facts.rewards) or "not known",
        "learning rate": f"{policy.effective_optimizer().lr:g}",
        "KL weight": f"{config.loss_fn.reference_policy_kl_penalty:g}",
        "longest sequence": f"{policy.max_total_sequence_length} tokens",
        "precision": policy.precision,
        "seed": loop.seed,
    }
    rows |= {name: f"{value:.4g}" for name, value in facts.results.items()}
    return rows | {"made with": f"nemo_rl_cpp {__version__}"}


def _is_repository(name: str) -> bool:
    return bool(_REPOSITORY.fullmatch(name)) and Path(name).suffix not in _DATA_FILES and not Path(name).exists()


def _shown(name: str) -> str:
    """Return a repository's name unchanged, or the last part of a path."""
    return name if _is_repository(name) or "/" not in name else Path(name).name
