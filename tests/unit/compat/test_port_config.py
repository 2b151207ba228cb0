"""Scripts that load a file, apply overrides and read it by attribute."""

import collections
import copy
import pickle
import sys
import types

import pytest
from nemo_rl_cpp.compat.utils.config import (
    OverridesError,
    load_config,
    merge_with_override,
    parse_hydra_overrides,
    resolve_config,
)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "parent.yaml").write_text("common: {value: 1, other: 2}\nbase: 40\nlist: [{a: 1}]\nneeded: ???\n")
    (tmp_path / "child.yaml").write_text(
        "defaults: parent.yaml\ncommon: {value: 3}\nbase: 41\nderived: {twice: '${mul:${base},2}'}\n"
    )
    return load_config(tmp_path / "child.yaml")


def test_attributes_and_items_read_the_same_tree(config):
    assert config.common.value == config["common"]["value"] == 3
    assert config.common.other == 2 and config.list[0].a == 1 and config.needed == "???"
    assert config == dict(config) and "common" in config and config.get("absent") is None


def test_an_interpolation_has_its_value_by_attribute_and_its_text_as_an_item(config):
    assert config.derived.twice == 82 and config["derived"]["twice"] == "${mul:${base},2}"
    config.base = 5
    assert config.derived.twice == 10
    assert resolve_config(config)["derived"]["twice"] == 10


def test_overrides_give_a_new_tree(config):
    changed = parse_hydra_overrides(config, ["common.value=7", "+added.deep=[1,2]", "~list"])
    assert changed.common.value == 7 and changed.added.deep == [1, 2] and "list" not in changed
    assert config.common.value == 3 and "added" not in config
    assert parse_hydra_overrides(config, []) == config
    with pytest.raises(OverridesError, match="absent"):
        parse_hydra_overrides(config, ["absent.key=1"])


class OmegaTree(collections.abc.Mapping):
    """As OmegaConf's DictConfig: a mapping, no dictionary, that resolves an interpolation when it is read."""

    def __init__(self, content):
        self.content = content

    def __getitem__(self, key):
        raise AssertionError("read without to_container, so interpolations are lost")

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


def test_trees_of_omegaconf_take_overrides(config, monkeypatch):
    def to_container(tree, resolve):
        assert not resolve
        return tree.content

    omegaconf = types.SimpleNamespace(
        OmegaConf=types.SimpleNamespace(is_config=lambda tree: isinstance(tree, OmegaTree), to_container=to_container)
    )
    monkeypatch.setitem(sys.modules, "omegaconf", omegaconf)
    tree = OmegaTree({"a": {"b": 1}, "c": "${a.b}"})
    changed = parse_hydra_overrides(tree, ["a.b=2"])
    assert changed == {"a": {"b": 2}, "c": "${a.b}"} and changed.c == 2
    assert resolve_config(tree) == {"a": {"b": 1}, "c": 1}
    assert merge_with_override(tree, OmegaTree({"a": {"d": 3}})).a == {"b": 1, "d": 3}
    assert parse_hydra_overrides(collections.ChainMap({"a": (1, 2)}), "a=3") == {"a": 3}


@pytest.mark.parametrize("tree", [None, 3, [1], "a", object(), {1: 2}, {"a": 10**30}])
def test_what_is_no_tree_is_refused_in_a_sentence(tree):
    for function in (
        lambda: parse_hydra_overrides(tree, []),
        lambda: resolve_config(tree),
        lambda: merge_with_override(tree, {}),
    ):
        with pytest.raises(ValueError, match="must be a mapping|must be texts|more than 64 bits"):
            function()
    with pytest.raises(OverridesError, match="an override is a text such as 'grpo.seed=1', not 3"):
        parse_hydra_overrides({}, [3])


def test_a_generation_section_is_configured_as_nemo_rls_scripts_do():
    from nemo_rl_cpp.compat.models.generation import configure_generation_config
    from nemo_rl_cpp.config import GRPOMasterConfig, load_grpo_config

    config = GRPOMasterConfig(**load_grpo_config("grpo_tiny.yaml").model_dump())
    tokenizer = types.SimpleNamespace(pad_token_id=5, eos_token_id=6)
    config.policy["generation"] = configure_generation_config(config.policy["generation"], tokenizer)
    assert config["policy"]["generation"]["_pad_token_id"] == 5 and config.policy.generation.stop_token_ids == [6]


def test_assigned_dictionaries_are_read_by_attribute_too(config):
    config.new = {"inner": [{"x": "${base}"}]}
    assert config.new.inner[0].x == 41
    assert merge_with_override(config, {"common": {"value": 9}}).common.other == 2


def test_unknown_keys_and_copies(config):
    with pytest.raises(AttributeError, match="no key 'valeu' here; known: value, other"):
        config.common.valeu
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config and twin.derived.twice == 82 and twin is not config
