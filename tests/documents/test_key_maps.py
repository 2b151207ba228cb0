"""The pages "coming from" name keys that exist, and agree with what an error says about another trainer's key."""

import inspect
import re
import shlex
from functools import cache

import nemo_rl_cpp
import pytest
from documents.snippets import ROOT
from nemo_rl_cpp.api.keywords import OF_TRL
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.foreign_names import FOREIGN
from nemo_rl_cpp.config.keys import fields_of, section_at
from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig

PAGES = {name: (ROOT / "docs" / f"coming-from-{name}.md").read_text() for name in ("trl", "verl")}
SECTIONS = {
    "grpo",
    "ppo",
    "policy",
    "value",
    "loss_fn",
    "value_loss_fn",
    "data",
    "env",
    "checkpointing",
    "logger",
    "cluster",
}
OF_A_DATA_SET = {"data.train.data_path", "data.validation.data_path", "data.train.input_key"}
OF_THE_LIBRARY = ("policy.optimizer.kwargs.", "policy.tokenizer.chat_template_kwargs", "env.reward_functions.")


def rows(page: str) -> list[list[str]]:
    """The cells of the tables that have two or three columns of keys."""
    found = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in PAGES[page].splitlines() if line.startswith("| ")]
    return [cells for cells in found if cells[0].startswith("`")]


@cache
def exists(key: str) -> bool:
    if key in OF_A_DATA_SET or key.startswith(OF_THE_LIBRARY):
        return True
    for master in (GRPOMasterConfig, PPOMasterConfig):
        try:
            parent, _, last = key.rpartition(".")
            if last in dict(fields_of(section_at(master, parent))):
                return True
        except (KeyError, AttributeError, TypeError):
            continue
    return False


def keys_in(cell: str) -> list[str]:
    """The keys of this package that a cell names, without their values."""
    found = (text.partition(":")[0] for text in re.findall(r"`([^`]+)`", cell))
    return [text for text in found if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text) and text.partition(".")[0] in SECTIONS]


@pytest.mark.parametrize("page", PAGES)
def test_keys_exist(page):
    named = {key for cells in rows(page) for key in keys_in(cells[1])}
    assert len(named) > 40
    assert sorted(key for key in named if not exists(key)) == []


def test_a_key_that_is_gone_is_found():
    assert not exists("grpo.num_promts_per_step") and not exists("nobody.knows")
    assert exists("policy.generation.top_p") and exists("ppo.adv_estimator.gae_lambda")


def test_keywords_of_train_grpo_exist():
    parameters = set(inspect.signature(nemo_rl_cpp.train_grpo).parameters)
    wrong = []
    for cells in rows("trl"):
        for name in re.findall(r"`([a-z_]+)(?:=\w+)?`", cells[2]) if len(cells) > 2 else ():
            dotted = name.replace("__", ".") if "__" in name else f"grpo.{name}"
            if name not in parameters and not exists(dotted):
                wrong.append(name)
    assert wrong == []


def test_errors_and_pages_agree():
    """Where `foreign_names` knows what a key is called here, a page says the same."""
    said: dict[str, set[str]] = {}
    for page in PAGES:
        for cells in rows(page):
            for name in re.findall(r"`([^`:]+)[^`]*`", cells[0]):
                said.setdefault(name.rpartition(".")[2], set()).update(keys_in(cells[1]))
    differing = {name: (key, said[name]) for name, key in FOREIGN.items() if name in said and key not in said[name]}
    assert differing == {}
    assert len(FOREIGN.keys() & said.keys()) > 45


def test_the_errors_of_train_grpo_and_the_page_agree():
    """Where `train_grpo` knows what a keyword of TRL's is called here, the page says the same."""
    said: dict[str, str] = {}
    for cells in rows("trl"):
        for name in re.findall(r"`([a-z_0-9]+)", cells[0]) if len(cells) > 2 else ():
            said[name] = said.get(name, "") + cells[2]
    meant = {name: set(re.findall(r"[a-z]\w*(?:__\w+)+|^\w+", text)) for name, text in OF_TRL.items()}
    differing = {name: said[name] for name in OF_TRL if name in said and not any(m in said[name] for m in meant[name])}
    assert differing == {}
    assert len(OF_TRL.keys() & said.keys()) > 35


def test_the_command_for_verl_trains_as_verl_does():
    """Where the file's defaults are others: no KL, the mean of the group, a constant learning rate, dual clip, greedy validation."""
    command = re.search(r"nemo-rl-cpp train --config (\S+) (.*?)```", PAGES["verl"], re.S)
    config = load_grpo_config(command[1], shlex.split(command[2].replace("\\\n", " ")))
    assert config.loss_fn.reference_policy_kl_penalty == 0 and config.loss_fn.ratio_clip_c == 3
    assert config.grpo.adv_estimator.use_leave_one_out_baseline is False and config.policy.effective_scheduler() is None
    assert config.policy.generation.val_temperature == 0
