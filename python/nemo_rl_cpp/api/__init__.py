"""The notebook functions `train_grpo`, `train_ppo`, `evaluate` and `load`, without importing torch."""


class Rows:
    """The placeholder that grpo_notebook.yaml and ppo_notebook.yaml name as their data set. Constructing it raises
    ValueError, because the prompts are arguments of `train_grpo` or `train_ppo`."""

    def __init__(self, **kwargs: object) -> None:
        raise ValueError("a notebook's configuration has no data: call nemo_rl_cpp.train_grpo, or set data.train")
