"""The result of a training with `train_grpo` or `train_ppo`."""

import tempfile
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from nemo_rl_cpp.api.model import TextWriter
from nemo_rl_cpp.argument_checks import folder_path
from nemo_rl_cpp.checkpoints.model_card import CardFacts, write_card
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.models.hub_upload import push_to_hub
from nemo_rl_cpp.models.policy.lm_policy import Policy


@dataclass(repr=False)
class TrainResult(TextWriter):
    """The result of `train_grpo` and `train_ppo`. It prints as one line, and displays as the run's report in a
    notebook.

    Attributes:
        history: one dictionary per step: `step`, `reward`, `loss`, `seconds`, all other metrics, and
            `rewards/<function>` if there are several rewards.
        validations: one dictionary per validation: `step`, `accuracy` and more; empty without validation prompts.
        policy, tokenizer, config: the trained `Policy`, its tokenizer and the run's configuration.
        log_dir: the folder with metrics.jsonl, rollouts and report.html."""

    history: list[dict[str, float]]
    validations: list[dict[str, float]]
    policy: Policy
    tokenizer: Tokenizer
    config: TrainMasterConfig
    log_dir: Path
    generation: NativeGeneration = field(repr=False)
    _facts: CardFacts = field(repr=False)

    limit_name = "max_length of the training"

    def save(self, folder: str | Path) -> Path:
        """Save the policy as a Hugging Face folder with a model card, and return the folder."""
        folder = folder_path(folder, "folder")
        self.policy.save_checkpoint(str(folder))
        write_card(folder, self.config, self._facts)
        return folder

    def push_to_hub(self, repo_id: str, *, private: bool = True, client: object = None) -> str:
        """Upload the policy to the Hub (see `nemo_rl_cpp.push_to_hub`), and return its address."""
        with tempfile.TemporaryDirectory(prefix="nemo_rl_cpp_") as folder:
            message = f"{self.config.title}, {self._facts.step} steps, by nemo_rl_cpp"
            return push_to_hub(self.save(folder), repo_id, private=private, message=message, client=client)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [row["reward"] for row in self.history]

    def __repr__(self) -> str:
        learnt = f", reward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}" if self.history else ""
        steps = f"{len(self.history)} step{'s' if len(self.history) != 1 else ''}"
        return f"TrainResult({self.config.policy.model_name!r}, {steps}{learnt}, log_dir={str(self.log_dir)!r})"

    def _repr_html_(self) -> str:
        """Return the run's report as HTML for a notebook, or one line if there is no report."""
        report = self.log_dir / "report.html"
        if report.is_file():
            page = escape(report.read_text(encoding="utf-8"), quote=True)
            return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0"></iframe>'
        return f"<p>{escape(repr(self))}</p>"
