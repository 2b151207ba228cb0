"""YAML typing, inheritance and interpolation. Expected values are OmegaConf 2.3's."""

import math

import pytest
from nemo_rl_cpp import _config


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text, resolve=False):
    with open("t.yaml", "w", encoding="utf-8") as file:
        file.write(text)
    return resolved("t.yaml") if resolve else _config.load_file("t.yaml")


def resolved(path):
    """The file's tree with its interpolations. ValueError lists those that fail."""
    data, _, problems = _config.load(path, [], [], set())
    if problems:
        raise ValueError("\n".join(f"{key}: {message}" for _, key, _, message in problems))
    return data


SCALARS = {
    "1": 1, "-1": -1, "010": 8, "08": "08", "0x1F": 31, "0b101": 5, "1_000": 1000, "1e-8": 1e-8, "1e8": 1e8, "1.": 1.0, ".5": 0.5,
    "-.5": "-.5", "1_0.5": 10.5, "12:30:45": 45045, "2024-01-01": "2024-01-01", "inf": "inf", "nan": "nan", ".inf": math.inf,
    "-.INF": -math.inf, "yes": True, "off": False, "y": "y", "tRue": "tRue", "~": None, "NULL": None, "": None, "'1'": "1", '"q"': "q",
    "!!str 5": "5", "!!float 5": 5.0, "a b": "a b", "[1, two]": [1, "two"], "{a: 1}": {"a": 1}, "|\n  block\n  text\n": "block\ntext\n",
    "größe": "größe", "0o17": "0o17", "1e400": math.inf,
}  # fmt: skip


@pytest.mark.parametrize("text", SCALARS)
def test_yaml_scalars_are_read_as_the_expected_types(text):
    got = load(f"a: {text}\n")["a"]
    assert got == SCALARS[text]
    assert (dict if isinstance(got, dict) else type(got)) is type(SCALARS[text])


def test_yaml_anchors_and_merge_keys_are_resolved():
    first = {"p": 1, "q": 2}
    assert load("x: &x {p: 1, q: 2}\ny:\n  <<: *x\n  q: 3\nz: *x\n") == {"x": first, "y": {"p": 1, "q": 3}, "z": first}


def test_empty_configuration_file_loads_as_an_empty_mapping():
    assert load("# nothing\n") == {}


RESOLVED = {
    "absolute": ("a: 3\nb: ${a}\n", {"a": 3, "b": 3}),
    "chain": ("a: ${b}\nb: ${c}\nc: 7\n", {"a": 7, "b": 7, "c": 7}),
    "sibling and uncle": ("s:\n  x: 1\n  y: ${.x}\n  z: {w: '${..x}'}\n", {"s": {"x": 1, "y": 1, "z": {"w": 1}}}),
    "in a text": ("a: 3\nb: pre-${a}-post\nc: ${a}${a}\n", {"a": 3, "b": "pre-3-post", "c": "33"}),
    "words in a text": ("t: true\nn: null\nf: 1e-8\nb: ${t} ${n} ${f}\n", {"t": True, "n": None, "f": 1e-8, "b": "True None 1e-08"}),
    "whole section": ("d: {p: 1, q: {r: 2}}\ne: ${d}\nf: ${e.q.r}\n", {"d": {"p": 1, "q": {"r": 2}}, "e": {"p": 1, "q": {"r": 2}}, "f": 2}),
    "relative inside a referred section": ("d: {p: 1, q: '${.p}'}\ne: ${d}\n", {"d": {"p": 1, "q": 1}, "e": {"p": 1, "q": 1}}),
    "list elements": ("l: [1, 2, {x: 3}]\na: ${l[1]}\nb: ${l.2.x}\n", {"l": [1, 2, {"x": 3}], "a": 2, "b": 3}),
    "arithmetic": (
        "a: 3\nb: ${mul:${a},2}\nc: ${mul:${a}, ${mul:2, ${a}}}\nd: ${div:8,2}\ne: ${max:${a},9}\nf: ${add:1.5,${a}}\n",
        {"a": 3, "b": 6, "c": 18, "d": 4.0, "e": 9, "f": 4.5},
    ),
    "texts in resolvers": ("b: ${mul:3,ab}\nc: ${add:x,y}\nd: ${add:'1','2'}\n", {"b": "ababab", "c": "xy", "d": "12"}),
    "environment": ("a: ${oc.env:CFG_X}\nb: ${oc.env:CFG_NO,dflt}\nc: ${oc.env:CFG_NO,5}\nd: ${oc.env:CFG_NO,null}\n", {"a": "8", "b": "dflt", "c": "5", "d": None}),
    "escaped": ("a: 1\nb: '\\${a}'\nc: 'x\\${a}y${a}'\n", {"a": 1, "b": "${a}", "c": "x${a}y1"}),
    "nested key": ("k: a\na: 5\nb: ${${k}}\n", {"k": "a", "a": 5, "b": 5}),
    "through a referred section": ("p: {q: '${r}'}\nr: {s: 4}\nt: ${p.q.s}\n", {"p": {"q": {"s": 4}}, "r": {"s": 4}, "t": 4}),
    "missing stays": ("a: ???\n", {"a": "???"}),
}  # fmt: skip


@pytest.mark.parametrize("case", RESOLVED)
def test_interpolation_in_a_configuration_resolves_to_the_expected_value(case, monkeypatch):
    monkeypatch.setenv("CFG_X", "8")
    monkeypatch.delenv("CFG_NO", raising=False)
    text, want = RESOLVED[case]
    got = load(text, resolve=True)
    assert got == want
    assert repr(got) == repr(want)


UNRESOLVED = {
    "unknown key": ("a: ${zzz}\n", "there is no key zzz"), "circle": ("a: ${b}\nb: ${a}\n", "refers to itself"),
    "itself": ("a: ${a}\n", "refers to itself"), "its own section": ("a: {b: '${a}'}\n", "refers to itself"),
    "mandatory": ("a: ???\nb: ${a}\n", "was not set"),
    "unknown resolver": ("a: ${foo:1}\n", "known: mul, add, sub, div, max, oc.env"),
    "one argument": ("a: ${mul:2}\n", "two values"), "division by zero": ("a: ${div:1,0}\n", "division by zero"),
    "two texts": ("a: ${mul:x,y}\n", "not possible"), "no variable": ("a: ${oc.env:CFG_NO}\n", "CFG_NO is not set"),
    "not closed": ("a: ${b\n", "not closed"), "above the top": ("a: ${...x}\n", "above the top"),
    "section in a text": ("d: {x: 1}\na: x${d}\n", "cannot stand inside a text"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNRESOLVED)
def test_failing_interpolation_is_reported_with_its_key(case, monkeypatch):
    monkeypatch.delenv("CFG_NO", raising=False)
    text, words = UNRESOLVED[case]
    with pytest.raises(ValueError, match="a: |b: ") as caught:
        load(text, resolve=True)
    assert words in str(caught.value)


def test_all_failing_interpolations_are_reported():
    with pytest.raises(ValueError) as caught:
        load("a: ${x}\nb: 1\nc: ${y}\n", resolve=True)
    assert str(caught.value).splitlines() == ["a: ${x}: there is no key x", "c: ${y}: there is no key y"]


def write(**files):
    for name, text in files.items():
        with open(f"{name}.yaml", "w", encoding="utf-8") as file:
            file.write(text)


def test_child_file_overrides_parent_files_and_later_parents_override_earlier_parents():
    write(
        one="a: 1\nb: {x: 1, y: 1}\nl: [1, 2, 3]\nn: {k: 1}\ns: 5\n",
        two="a: 2\nb: {y: 2}\n",
        child="defaults: [one.yaml, two.yaml]\nb: {z: 3}\nl: [9]\nn: null\ns: {k: 1}\n",
    )
    assert _config.load_file("child.yaml") == {
        "a": 2, "b": {"x": 1, "y": 2, "z": 3}, "l": [9], "n": None, "s": {"k": 1},
    }  # fmt: skip


def test_paths_of_parent_files_are_relative_to_the_including_file(folder):
    (folder / "sub").mkdir()
    write(root="a: 1\n")
    (folder / "sub/middle.yaml").write_text("defaults: ../root.yaml\nb: 2\n")
    write(child=f"defaults: {folder}/sub/middle.yaml\nc: 3\n")
    assert _config.load_file("child.yaml") == {"a": 1, "b": 2, "c": 3}
    (folder / "sub/other.yaml").write_text("defaults: root.yaml\n")
    assert _config.load_file("sub/other.yaml", base_dir=".") == {"a": 1}


def test_override_true_in_a_top_level_section_replaces_the_section_instead_of_merging():
    write(
        parent="s: {a: 1, t: {b: 2}}\nu: {a: 1}\n",
        child="defaults: parent.yaml\ns: {_override_: true, c: 3}\nu: {_override_: false, d: 4}\n",
    )
    assert _config.load_file("child.yaml") == {"s": {"c": 3}, "u": {"a": 1, "_override_": False, "d": 4}}
    write(deep="defaults: parent.yaml\ns: {t: {_override_: true, c: 3}}\n")
    assert _config.load_file("deep.yaml")["s"]["t"] == {"b": 2, "_override_": True, "c": 3}


def test_interpolation_uses_values_after_merging_child_and_parent_files():
    write(parent="x: 1\ny: ${x}\n", child="defaults: parent.yaml\nx: 2\n")
    assert resolved("child.yaml") == {"x": 2, "y": 2}


def test_parent_files_that_share_a_parent_are_not_reported_as_a_cycle():
    write(root="a: 1\n", child="defaults: [left.yaml, right.yaml]\n")
    write(left="defaults: root.yaml\nl: 1\n", right="defaults: root.yaml\nr: 1\n")
    assert _config.load_file("child.yaml") == {"a": 1, "l": 1, "r": 1}


def test_each_configuration_value_records_its_file_and_line_or_its_override():
    write(parent="a:\n  b: 1\n  c: [1, {d: 2}]\n", child="defaults: parent.yaml\na:\n  e: 5\n")
    _, positions, problems = _config.load("child.yaml", ["a.b=7", "+n.m={k: 1}"], [], set())
    assert problems == []
    assert positions == {
        "a": "child.yaml:2", "a.b": "override 'a.b=7'", "a.c": "parent.yaml:3", "a.c.0": "parent.yaml:3",
        "a.c.1": "parent.yaml:3", "a.c.1.d": "parent.yaml:3", "a.e": "child.yaml:3", "n": "override '+n.m={k: 1}'",
        "n.m": "override '+n.m={k: 1}'", "n.m.k": "override '+n.m={k: 1}'",
    }  # fmt: skip
