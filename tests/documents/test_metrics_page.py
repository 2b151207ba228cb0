"""docs/metrics.md explains every metric that runs log."""

import json
import re
from fnmatch import fnmatchcase

import pytest
import tiny
from documents.snippets import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()
GROUPS = ("train/", "validation/", "timing/", "performance/", "memory/")
BROAD = {"train/*/*", "validation/*"}  # they say where names come from, not what a metric is


def names() -> set[str]:
    """The names of the page's first columns."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE, re.M)
    return {
        name for cell in cells for name in re.findall(r"`([^`]+)`", cell) if name.startswith(GROUPS) or name == "step"
    }


def unexplained(logged):
    """Metrics without a row. One of a validation may be explained where training's is."""
    rows = names() - BROAD
    return sorted(
        name
        for name in logged
        if not any(fnmatchcase(name, row) or fnmatchcase(name.replace("validation/", "train/", 1), row) for row in rows)
    )


RUNS = {
    "prorlv2_tiny.yaml": (
        *tiny.SMALL, "grpo.max_num_steps=2", "loss_fn.positive_example_nll_weight=0.1", "grpo.seq_logprob_error_threshold=2",
        "grpo.val_period=1", "grpo.val_num_generations_per_prompt=2", "grpo.max_val_samples=8", "policy.generation.top_p=0.9",
    ),
    "ppo_tiny.yaml": ("ppo.max_num_steps=2", "ppo.val_period=2", "ppo.max_val_samples=8"),
    "grpo_guess_number.yaml": ("grpo.max_num_steps=1", "grpo.val_period=1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", RUNS)
def test_every_metric_that_a_run_logs_has_a_row_on_the_metrics_page(config, tmp_path):
    tiny.train(tmp_path, *RUNS[config], config=config)
    (path,) = tmp_path.rglob("metrics.jsonl")
    logged = {name for line in path.read_text().splitlines() for name in json.loads(line)}
    assert len(logged) > 50
    assert unexplained(logged) == []
