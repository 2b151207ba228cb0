"""What no configuration needs and an attack or a slip may hold: a sentence with its place, within seconds, never a crash."""

import os
import re

import pytest
from nemo_rl_cpp import _config


def load(tmp_path, text, overrides=()):
    """(data, problems as one text)."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    data, _, problems = _config.load(str(path), list(overrides), [], set())
    return data, "\n".join(f"{where}: {key} {message}" for _, key, where, message in problems)


def doubling(first, step, count):
    return first + "".join(step.format(i=i, before=i - 1) for i in range(1, count))


# name -> (file, what is said; the file's name and the line are part of it)
REFUSED = {
    "integer of 65 bits in mul": ("x: 1\na: ${mul:99999999999999999999,2}\n", "c.yaml:2: a .*99999999999999999999 does not fit 64 bits"),
    "integer of 65 bits in add": ("a: ${add:1,-9223372036854775809}", "c.yaml:1: a .*does not fit 64 bits"),
    "product of 65 bits": ("a: ${mul:9223372036854775807,2}", "c.yaml:1: a .*does not fit 64 bits"),
    "a text too often": ("a: ${mul:ab,9223372036854775807}", "c.yaml:1: a .*repeated text is too long"),
    "nested interpolations": ("a: " + "${" * 10_000 + "b" + "}" * 10_000, "c.yaml:1: a .*more than 100 deep"),
    "nested resolvers": ("a: " + "${add:1," * 5_000 + "1" + "}" * 5_000, "c.yaml:1: a .*more than 100 deep"),
    "a chain of references": ("".join(f"k{i}: ${{k{i + 1}}}\n" for i in range(10_000)) + "k10000: 1\n", "c.yaml:.*more than 100 deep"),
    "texts that double": (doubling("k0: aaaaaaaaaa\n", "k{i}: ${{k{before}}}${{k{before}}}\n", 60), "c.yaml:.*more than 4194304 bytes"),
    "sections that double": (doubling("k0: {a: 1}\n", "k{i}:\n  a: ${{k{before}}}\n  b: ${{k{before}}}\n", 60), "c.yaml:.*more than 20000 values"),
}  # fmt: skip
UNREADABLE = {
    "base 60": ("x: 1\na: " + "9" * 30 + ":59:59", "c.yaml:2: .*base 60.*does not fit 64 bits|c.yaml:2: the integer 9+ does not fit"),
    "base 60, just too large": ("a: 2562047788015215:30:08", "c.yaml:1: the integer 2562047788015215:30:08 .*base 60"),
    "an integer of more digits than any word has": ("x: 1\na: " + "7" * 100, "c.yaml:2: the integer 7+ does not fit 64 bits"),
    "a binary number of more digits": ("a: 0b" + "1" * 80, "c.yaml:1: the integer 1+ does not fit 64 bits"),
    "a tag of a list": ("x: 1\na: !!python/object/apply:os.system [echo hi]", "c.yaml:2: the tag .*os.system does not fit a list: remove it"),
    "a tag of a mapping": ("x: 1\na: !env {b: 1}", "c.yaml:2: the tag !env does not fit a mapping: remove it"),
    "a tag of the file": ("!include\na: 1", "c.yaml:[12]: the tag !include does not fit a mapping"),
    "integer of 65 bits": ("x: 1\na: 9223372036854775808", "c.yaml:2: the integer 9223372036854775808 does not fit 64 bits"),
    "aliases that double": (doubling("k0: &k0 [1, 1]\n", "k{i}: &k{i} [*k{before}, *k{before}]\n", 60), "c.yaml:[0-9]+: .*more than 20000 values"),
    "merges that double": (doubling("k0: &k0 {a: [1, 1]}\n", "k{i}: &k{i} {{<<: *k{before}, a{i}: *k{before}}}\n", 60), "c.yaml:[0-9]+: .*more than 20000"),
    "too many values": ("a: [" + "1," * 30_000 + "]", "c.yaml:1: the file holds more than 20000 values"),
    "too many keys": ("".join(f"k{i}: 1\n" for i in range(30_000)), "c.yaml:[0-9]+: the file holds more than 20000 values"),
    "too many bytes": ("a: " + "x" * (5 << 20), "c.yaml: a configuration has at most 4194304 bytes"),
    "nested lists": ("a: " + "[" * 10_000 + "]" * 10_000, "c.yaml:1: .*deep"),
    "nested lists of lines": ("".join(" " * i + "-\n" for i in range(300)), "c.yaml:[0-9]+: .*deep"),
    "nested keys": ("".join(" " * i + "a:\n" for i in range(300)), "c.yaml:[0-9]+: .*deep"),
    "Latin-1": ("x: 1\na: caf\xe9\n".encode("latin-1"), "c.yaml:2: the byte 0xe9 is not UTF-8"),
    "an overlong character": (b"a: \xc0\xaf", "c.yaml:1: the byte 0xc0 is not UTF-8"),
    "a surrogate": (b"a: 1\n\nb: \xed\xa0\x80", "c.yaml:3: the byte 0xed is not UTF-8"),
    "UTF-16": ("a: 1\n".encode("utf-16"), "c.yaml:1: the byte 0xff is not UTF-8"),
    "UTF-16 that does not say so": ("a: 1\n".encode("utf-16-le"), "c.yaml:1: a byte 0 stands in the file"),
    "a byte 0": (b"x: 1\na: b\0c\n", "c.yaml:2: a byte 0 stands in the file, which no text has"),
    "aliases of a long text": ("a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 15_000 + "]", "c.yaml:2: aliases make more than 4 MB of text"),
    "aliases of long keys": ("a: &a\n  ? " + "k" * 100_000 + "\n  : 1\nb: [" + "*a, " * 5_000 + "]", "c.yaml:4: aliases make more than 4 MB of text"),
    "a device as a parent": ("defaults: /dev/zero\na: 1", "c.yaml:1: the configuration file /dev/zero is no file: name a YAML file"),
    "a folder as a parent": ("defaults: .\na: 1", "c.yaml:1: the configuration file .* is no file: name a YAML file"),
    "a character cut off": (b"a: \xe6\x97", "c.yaml:1: the byte 0xe6 is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_yaml_syntax_is_reported_with_file_and_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text, message = REFUSED[name]
    _, problems = load(tmp_path, text)
    assert re.search(message, problems), problems[:500]
    assert all(len(line) < 600 for line in problems.splitlines())


@pytest.mark.parametrize("name", UNREADABLE)
def test_yaml_with_unreadable_content_is_reported_with_file_and_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text, message = UNREADABLE[name]
    with pytest.raises(_config.LoadError, match=message) as caught:
        load(tmp_path, text)
    assert len(str(caught.value)) < 600


def test_mul_interpolation_with_an_empty_string_gives_an_empty_string(tmp_path):
    for times in ("9223372036854775807", "0", "-9223372036854775808"):
        data, problems = load(tmp_path, f"a: ${{mul:'',{times}}}\nb: ${{mul:{times},''}}")
        assert (data, problems) == ({"a": "", "b": ""}, "")


def test_yaml_numbers_at_the_64_bit_limits_are_read_exactly(tmp_path):
    data, problems = load(
        tmp_path, "a: 2562047788015215:30:07\nb: -2562047788015215:30:08\nc: -9223372036854775808\nd: 1:00:00:00"
    )
    assert data == {"a": 2**63 - 1, "b": -(2**63), "c": -(2**63), "d": 216000} and not problems


def test_long_number_literals_and_yaml_type_tags_are_accepted_in_a_configuration(tmp_path):
    third = "0." + "3" * 80
    text = f"a: {third}\nb: 0x{'0' * 70}1f\nc: '{'7' * 100}'\nd: {'7' * 100}.x\ne: !!map {{f: !!seq [!!str 1]}}\n"
    data, problems = load(tmp_path, text)
    expected = {"a": float(third), "b": 31, "c": "7" * 100, "d": "7" * 100 + ".x", "e": {"f": ["1"]}}
    assert data == expected and not problems


def test_nested_values_and_yaml_aliases_within_the_limits_are_loaded(tmp_path):
    data, problems = load(
        tmp_path, "a: " + "${add:1," * 40 + "1" + "}" * 40 + "\nb: [&x {c: 1}" + ", *x" * 1000 + "]\nd: 日本\n"
    )
    assert data["a"] == 41 and data["b"] == [{"c": 1}] * 1001 and data["d"] == "日本" and not problems
    assert load(tmp_path, "a: é\n".encode("utf-8-sig"))[0] == {"a": "é"}


def test_configuration_that_includes_more_than_100_parent_files_is_an_error(tmp_path):
    (tmp_path / "p0.yaml").write_text("a: 1\n")
    for i in range(1, 40):
        (tmp_path / f"p{i}.yaml").write_text(f"defaults: [p{i - 1}.yaml, p{i - 1}.yaml]\n")
    with pytest.raises(_config.LoadError, match="more than 100 files"):
        load(tmp_path, "defaults: p39.yaml\n")
    for i in range(1, 40):
        (tmp_path / f"p{i}.yaml").write_text(f"defaults: p{i - 1}.yaml\n")
    assert load(tmp_path, "defaults: p39.yaml\n")[0] == {"a": 1}


OVERRIDES = {
    "nested lists": ("+a=" + "[" * 50_000, "more than 100 deep"),
    "nested mappings": ("+a=" + "{b:" * 50_000 + "1" + "}" * 50_000, "more than 100 deep"),
    "nested casts": ("+a=" + "int(" * 50_000 + "1" + ")" * 50_000, "more than 100 deep"),
    "nested interpolations": ("+a=" + "${add:1," * 5_000 + "1" + "}" * 5_000, "deep|not closed|not expected"),
    "a deep key": ("+" + "a." * 50_000 + "b=1", "at most 100 parts"),
    "many values": ("+a=[" + "1," * 30_000 + "1]", "more than 20000 values"),
    "an integer of 65 bits": ("+a=9223372036854775808", "does not fit 64 bits"),
    "bytes that are no text": ("+a=" + os.fsdecode(b"caf\xe9"), "not UTF-8"),
    "a character that needs quotes": ("+a=\xe9\u65e5\u672c", "needs quotes"),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_too_deeply_nested_or_too_large_overrides_give_a_short_error_message(tmp_path, name):
    override, message = OVERRIDES[name]
    _, problems = load(tmp_path, "x: 1\n", [override])
    assert re.search(message, problems), problems[:500]
    assert len(problems) < 1000


def test_non_utf8_environment_variable_is_reported_with_the_line_that_uses_the_variable(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environb, b"NEMO_BYTES", b"caf\xe9")
    _, problems = load(tmp_path, "a: ${oc.env:NEMO_BYTES}")
    assert "c.yaml:1: a ${oc.env:NEMO_BYTES}: the environment variable NEMO_BYTES is not UTF-8" in problems


def test_python_dictionaries_that_are_not_configurations_are_rejected_with_the_reason():
    circle: dict = {}
    circle["a"] = circle
    for value, message in (
        (circle, "more than 100 deep"),
        ({"a": 2**63}, "does not fit 64 bits"),
        ({"a": "\ud800"}, "not UTF-8"),
    ):
        with pytest.raises(ValueError, match=message):
            _config.apply_overrides(value, [])
    assert _config.apply_overrides({"a": -(2**63)}, []) == ({"a": -(2**63)}, [])
