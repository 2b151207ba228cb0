"""Scripts that load a file, apply overrides and read it by attribute."""

import copy
import pickle

import pytest

from nemo_rl_cpp.utils.config import (
    OverridesError,
    load_config,
    merge_with_override,
    parse_hydra_overrides,
    resolve_config,
)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "parent.yaml").write_text("common: {value: 1, other: 2}\nbase: 40\nlist: [{a: 1}]\nneeded: ???\n")
    (tmp_path / "child.yaml").write_text("defaults: parent.yaml\ncommon: {value: 3}\nbase: 41\nderived: {twice: '${mul:${base},2}'}\n")
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


def test_assigned_dictionaries_are_read_by_attribute_too(config):
    config.new = {"inner": [{"x": "${base}"}]}
    assert config.new.inner[0].x == 41
    assert merge_with_override(config, {"common": {"value": 9}}).common.other == 2


def test_unknown_keys_and_copies(config):
    with pytest.raises(AttributeError, match="no key 'valeu' here; known: value, other"):
        config.common.valeu
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config and twin.derived.twice == 82 and twin is not config
