"""The functions for a notebook: `train_grpo`, `train_ppo`, `evaluate`, `load`. Importing the folder imports no torch."""


class Rows:
    """Takes the place of a data set in grpo_notebook.yaml and ppo_notebook.yaml, whose rows a call is given."""

    def __init__(self, **kwargs: object) -> None:
        raise ValueError(
            "the notebook's configurations have no data of their own: call nemo_rl_cpp.train_grpo(prompts=...), or set data.train"
        )
