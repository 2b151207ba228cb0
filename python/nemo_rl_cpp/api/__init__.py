"""The notebook functions `train_grpo`, `train_ppo`, `evaluate` and `load`. Importing this package does not import
torch."""


class Rows:
    """A placeholder for the data set in grpo_notebook.yaml and ppo_notebook.yaml; a call passes its rows instead."""

    def __init__(self, **kwargs: object) -> None:
        raise ValueError(
            "the notebook's configurations have no data of their own: call nemo_rl_cpp.train_grpo(prompts=...), or set data.train"
        )
