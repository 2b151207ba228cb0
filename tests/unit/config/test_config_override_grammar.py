"""Hydra's override grammar: what each form does to a configuration, and what fails. Values as Hydra 1.3 gives them."""

import math

import pytest
from nemo_rl_cpp import _config
from nemo_rl_cpp.config import load_grpo_config


def applied(overrides):
    """The tree with the overrides, of which none may fail."""
    tree, problems = _config.apply_overrides(base(), overrides)
    assert problems == []
    return tree


def failures(overrides):
    """(where, message) of every override that fails."""
    return [(where, message) for _, _, where, message in _config.apply_overrides(base(), overrides)[1]]


def base():
    return {
        "a": 1, "b": {"c": 3, "d": [1, 2, 3], "e": "text", "n": None, "m": {"k": 1, "l": 2}}, "f": 1.5, "h": "${b.c}",
    }  # fmt: skip


VALUES = {
    "a=2": 2, "a=-3": -3, "a=+5": 5, "a=1_000": 1000, "a=010": "010", "a=1e-5": 1e-5, "a=5.0e-6": 5e-6, "a=1.": 1.0, "a=.5": 0.5,
    "a=1.5.2": "1.5.2", "a=inf": math.inf, "a=-inf": -math.inf, "a=info": "info", "a=TRUE": True, "a=False": False, "a=null": None,
    "a=nullable": "nullable", "a=": "", "a=  5": 5, "a=a-b": "a-b", "a=a/b/c.txt": "a/b/c.txt", "a=http://x.y:80/z": "http://x.y:80/z",
    "a=50%": "50%", "a=a b": "a b", "a='quoted, text'": "quoted, text", 'a="dq"': "dq", r"a='it\'s'": "it's", r"a='a\\b'": r"a\\b",
    "a='1'": "1", "a=yes": "yes", "a=[1, two, 3.0, null, true, [x]]": [1, "two", 3.0, None, True, ["x"]], "a=[]": [], "a={}": {},
    "a={c:9}": {"c": 9}, "a={x: 1, y: [2, {z: 3}]}": {"x": 1, "y": [2, {"z": 3}]}, "a=${b.c}": "${b.c}", "a=pre${b.c}post": "pre${b.c}post",
    "a='${mul:${b.c},3}'": "${mul:${b.c},3}", "a=int(3.7)": 3, 'a=int("3")': 3, "a=float(3)": 3.0, "a=str(1.0)": "1.0", "a=str(true)": "true",
    "a=str([1,2])": ["1", "2"], "a=bool(0)": False, "a=bool('false')": False, r"a=a\,b": "a,b", r"a=b\=c": "b=c", r"a=\[x\]": "[x]",
    r"a=a\b": r"a\b", "a=???": "???", "++a.b=5": {"b": 5},
}  # fmt: skip


@pytest.mark.parametrize("override", VALUES)
def test_command_line_override_is_parsed_to_the_expected_value_and_type(override):
    got = applied([override])["a"]
    assert got == VALUES[override]
    assert (dict if isinstance(got, dict) else type(got)) is type(VALUES[override])


def test_nan_in_a_command_line_override_is_parsed_as_a_float():
    assert math.isnan(applied(["a=nan"])["a"])


CHANGES = {
    "b={c:9}": lambda c: c["b"].update(c=9), "+b={z:9}": lambda c: c["b"].update(z=9),
    "+b.z=9": lambda c: c["b"].update(z=9), "++b.c=9": lambda c: c["b"].update(c=9),
    "+b.n=5": lambda c: c["b"].update(n=5), "+x.y.z=1": lambda c: c.update(x={"y": {"z": 1}}),
    "b.m={k:5}": lambda c: c["b"]["m"].update(k=5), "b.m=null": lambda c: c["b"].update(m=None),
    "b.d.1=10": lambda c: c["b"].update(d=[1, 10, 3]), "b.d=[9]": lambda c: c["b"].update(d=[9]),
    "+b.d=[9]": lambda c: c["b"].update(d=[9]), "~b.c": lambda c: c["b"].pop("c"), "~b.c=3": lambda c: c["b"].pop("c"),
    "~b": lambda c: c.pop("b"), "h=5": lambda c: c.update(h=5),
}  # fmt: skip


@pytest.mark.parametrize("override", CHANGES)
def test_command_line_override_changes_the_configuration_as_expected(override):
    want = base()
    CHANGES[override](want)
    assert applied([override]) == want


FAILURES = [
    "b.z=9", "b={z:9}", "x.y=1", "b.m={new:5}", "+b.c=9", "~b.c=4", "~b.zzz", "~b.n", "b.d[0]=10", "b.d.7=10", "b.e.f=5", "a", "--a=1", "=5",
    ".a=5", "a.=5", "a..b=5", "1=5", "a@b=1", "db/x=1", "a=1,2", "a=range(1,3)", "a=choice(1,2)", "a=foo(1)", "a=int(abc)", "a=bool(x)",
    "a=str(null)", "a=b=c", "a=größe", "größe=1", "a=[1,2", "a={a:1", "a='x", "a=x'y'", "a=#x", "a=a;b", "a=~x", "a=&", "a=[1,]",
    "a=(x)", "a={'c':1}", "a={c:}", "a=${mul:${b.c},3}", "a=${b.c", "h.x=5",
]  # fmt: skip


@pytest.mark.parametrize("override", FAILURES)
def test_error_for_an_invalid_command_line_override_quotes_the_override(override):
    [(where, _)] = failures([override])
    assert where == f"override '{override}'"


def test_later_command_line_overrides_replace_earlier_overrides_of_the_same_key():
    assert applied(["+x.y=1", "x.y=2", "a=3", "a=4"]) == base() | {"x": {"y": 2}, "a": 4}


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "policy:\n  model_name: m\n  optimizer: null\n  megatron_cfg: {enabled: true}\ndata:\n  train: {dataset_name: arithmetic}\n"
    )
    return "c.yaml"


def test_override_can_set_a_schema_key_that_is_missing_in_the_file(small):
    config = load_grpo_config(
        small,
        ["policy.megatron_cfg.optimizer.lr=1e-3", "+grpo.seed=7", "logger.wandb.project=p", "data.train.max_number=9"],
    )
    assert config.policy.effective_optimizer().lr == 1e-3
    assert (config.grpo.seed, config.logger.wandb.project, config.data.train.max_number) == (7, "p", 9)
    assert config.positions["grpo.seed"] == "override '+grpo.seed=7'"


def test_override_of_a_key_below_a_null_section_replaces_null_by_a_mapping(small):
    config = load_grpo_config(small, ["policy.optimizer.kwargs.lr=1e-3", "policy.megatron_cfg.enabled=false"])
    assert config.policy.effective_optimizer().lr == 1e-3


@pytest.mark.parametrize(
    "overrides",
    [["grpo.dapo_batch_multiplier=3"], ["grpo.batch_multiplier=3"], ["+grpo.dapo_batch_multiplier=3"], ["grpo={dapo_batch_multiplier: 3}"],
     ["grpo.dapo_batch_multiplier=3", "grpo.batch_multiplier=3"]],
)  # fmt: skip
def test_override_accepts_batch_multiplier_and_its_alias_dapo_batch_multiplier(small, overrides):
    config = load_grpo_config(small, ["grpo.use_dynamic_sampling=true", *overrides])
    assert config.grpo.batch_multiplier == 3
