"""Every command that our guides and the README print has a configuration and overrides that load."""

import re
import shlex
from pathlib import Path

import pytest
from nemo_rl_cpp.config import load_eval_config, load_grpo_config, load_ppo_config

ROOT = Path(__file__).resolve().parents[3]
LOADERS = {"run_grpo_math": load_grpo_config, "run_ppo": load_ppo_config, "run_eval": load_eval_config}


def commands(text):
    """(script, config or None, overrides) of each line of the bash blocks that runs one of the scripts."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            scripts = [
                i for i, word in enumerate(words) if re.fullmatch(r"(examples/|nemo_rl_cpp\.)(run_\w+)(\.py)?", word)
            ]
            if not scripts:
                continue
            script = re.search(r"run_\w+", words[scripts[0]])[0]
            rest = [word for word in words[scripts[0] + 1 :] if word != "--dry-run"]
            config = rest.pop(rest.index("--config") + 1) if "--config" in rest else None
            yield script, config, [word for word in rest if word != "--config"]


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs" / "guides").glob("*.md")])
PRINTED = [(page.name, *command) for page in PAGES for command in commands(page.read_text())]


def test_commands_are_found():
    assert ("prorlv2.md", "run_grpo_math", "configs/prorlv2.yaml", []) in PRINTED
    assert any(page == "prorlv2.md" and len(overrides) == 5 for page, _, _, overrides in PRINTED)
    assert {"README.md", "grpo.md", "dapo.md", "prorlv2.md"} <= {page for page, *_ in PRINTED}


@pytest.mark.parametrize("page, script, config, overrides", PRINTED)
def test_it_loads(page, script, config, overrides):
    LOADERS[script](*([] if config is None else [config]), overrides=overrides)
