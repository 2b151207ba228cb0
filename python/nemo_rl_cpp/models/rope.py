"""RoPE (rotary position embeddings) in config.json: conversion to a canonical form, and the resulting frequencies.

Format 4 (transformers 4) has `rope_theta` and `rope_scaling`. Format 5 has one section `rope_parameters` with both. The
canonical form is format 4, which both versions read identically; `rope_scaling` is None without scaling."""

import math
from collections.abc import Iterable, Iterator, Mapping

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.architectures import FULL, SLIDING
from nemo_rl_cpp.models.config_checks import expect, is_number

DEFAULT_THETA = 10000.0
KINDS = (FULL, SLIDING)
"""Kinds of layers; each may have a separate RoPE."""
SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
    "proportional": (),
}
_REMEMBERS_ORIGINAL = ("llama3", "yarn", "longrope")
"""Types of scaling that depend on the number of positions in pretraining."""
_CHOICES = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
_ORIGINAL = "original_max_position_embeddings"
_SPELLINGS = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")
KEYS = (*_SPELLINGS, _ORIGINAL)
"""The keys of config.json that set RoPE."""


def respell(
    config: Mapping[str, Plain], default_positions: int, default_theta: float = DEFAULT_THETA
) -> dict[str, Plain]:
    """Return the configuration `config` with its RoPE keys in canonical form: only `rope_theta` and `rope_scaling`.
    Values are not checked.

    Precedence is as in transformers 5: `rope_scaling` before `rope_parameters`; keys in the section before top-level
    keys, except that a top-level `original_max_position_embeddings` comes first. The default of
    `original_max_position_embeddings` is `max_position_embeddings`, or `default_positions` if that is missing too."""
    section = config.get(section_name(config)) or {}
    form = {name: value for name, value in config.items() if name not in _SPELLINGS}
    form["rope_theta"], form["rope_scaling"] = _first(config.get("rope_theta"), default_theta), section or None
    partial = config.get("partial_rotary_factor")
    if isinstance(section, Mapping):
        kind = "longrope" if config.get("model_type") == "phi3" and _kind(section) in ("su", "yarn") else _kind(section)
        form["rope_theta"] = _first(section.get("rope_theta"), form["rope_theta"])
        elsewhere = ("type", "rope_theta")
        if kind != "proportional":
            partial = _first(section.get("partial_rotary_factor"), partial)
            elsewhere = (*elsewhere, "partial_rotary_factor")
        scaling = {name: value for name, value in section.items() if name not in elsewhere} | {"rope_type": kind}
        form["rope_scaling"] = None if kind == "default" and not _nested(section) else scaling
        if kind in _REMEMBERS_ORIGINAL:
            _settle_positions(form, scaling, _first(form.get("max_position_embeddings"), default_positions))
    if partial is not None:
        form["partial_rotary_factor"] = partial
    return form


def respell_kinds(
    config: Mapping[str, Plain], default_positions: int, theta: float, local_key: str | None, local_theta: float
) -> dict[str, Plain]:
    """Return the configuration in canonical form for a model whose kinds of layers (KINDS) have separate RoPE.

    The result has transformers 5's `rope_parameters` with one section per kind. The format of transformers 4 has one
    scaling section and `rope_theta`, by default `theta`, both for full attention. In this format the key `local_key`
    (if not None) sets the theta of sliding layers, by default `local_theta`. For `default_positions` see `respell`."""
    sections: dict[str, Plain] = {}
    for name in ("rope_parameters", "rope_scaling"):  # transformers updates the first with the second
        for kind, part in _by_kind(config.get(name), name).items():
            sections[kind] = _laid_over(sections.get(kind) or {}, part) if part else part
    thetas = _first(config.get("rope_theta"), theta), _first(local_key and config.get(local_key), local_theta)
    form = {name: value for name, value in config.items() if name not in (*_SPELLINGS, local_key)}
    form["rope_parameters"] = {}
    for kind, beside in zip(KINDS, thetas, strict=True):
        within = {"rope_parameters": sections.get(kind) or {}, "rope_theta": beside}
        part = respell({"max_position_embeddings": config.get("max_position_embeddings"), **within}, default_positions)
        scaling = part["rope_scaling"] or {"rope_type": "default"}
        form["rope_parameters"][kind] = {**scaling, "rope_theta": part["rope_theta"]}
    return form


def _by_kind(section: Plain, name: str) -> Mapping[str, Plain]:
    """Return a RoPE section by kinds of layers. A section without kinds concerns full attention."""
    expect(section is None or isinstance(section, Mapping), name, section, "a section")
    if not section:
        return {}
    return section if set(KINDS) & section.keys() else {KINDS[0]: section}


def _laid_over(section: Mapping[str, Plain], part: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the RoPE section `section` after applying the overrides `part`. If `part` has a rope_type, it replaces all
    of the section but the theta."""
    kept = ("rope_theta",) if _has_type(part) else section
    given = {name: value for name, value in part.items() if name != "rope_theta" or value is not None}
    return {name: section[name] for name in kept if name in section} | given


def of_kind(form: Mapping[str, Plain], kind: str) -> dict[str, Plain]:
    """Return the canonical config.json `form` with `rope_theta` and `rope_scaling` of the layers of `kind` (KINDS)."""
    if "rope_parameters" not in form:
        return dict(form)
    scaling = dict(form["rope_parameters"][kind])
    theta = scaling.pop("rope_theta")
    return {**form, "rope_theta": theta, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}


def _settle_positions(form: dict[str, Plain], scaling: dict[str, Plain], positions: Plain) -> None:
    """Move `original_max_position_embeddings` from `form` into the RoPE section `scaling`, with the default
    `positions`. If yarn's factor is null, set it to the quotient of `positions` and this number, as transformers
    does."""
    original = _first(form.pop(_ORIGINAL, None), scaling.get(_ORIGINAL), positions)
    scaling[_ORIGINAL] = original
    lacks_factor = scaling["rope_type"] == "yarn" and scaling.get("factor", 0) is None
    if lacks_factor and is_number(positions) and is_number(original):
        scaling["factor"] = positions / original


def lay_rope_over(form: Mapping[str, Plain], overrides: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return a canonical configuration after applying the RoPE keys of `overrides` (as in transformers 4 or 5).

    A section with `rope_type` replaces the model's scaling section, null removes it, and one without `rope_type`
    changes single keys of the model's. `rope_theta` is kept unless `overrides` sets it anywhere."""
    changed = dict(form)
    beside = ("rope_theta", "partial_rotary_factor", _ORIGINAL)
    changed.update({name: overrides[name] for name in beside if overrides.get(name) is not None})
    if not {"rope_scaling", "rope_parameters"} & overrides.keys():
        return changed
    key = section_name(overrides)
    section = overrides[key]
    if not section or not isinstance(section, Mapping) or _has_type(section):
        changed["rope_scaling"] = section
        return changed
    keys = dict(section)
    changed["rope_theta"] = _first(keys.pop("rope_theta", None), changed["rope_theta"])
    if keys:
        _check_has_scaling(form["rope_scaling"], key, keys)
        changed["rope_scaling"] = {**form["rope_scaling"], **keys}
    return changed


def _check_has_scaling(scaling: Plain, key: str, keys: Iterable[str]) -> None:
    if not isinstance(scaling, Mapping):
        raise ModelFolderError(
            f"{key} gives {', '.join(keys)} without rope_type, and the model has no scaling whose keys they could change: add rope_type, "
            f"one of {', '.join(SUPPORTED)}"
        )


def lay_kinds_over(
    form: Mapping[str, Plain], overrides: Mapping[str, Plain], local_key: str | None
) -> dict[str, Plain]:
    """Apply `overrides` like `lay_rope_over` to a canonical configuration with a RoPE section per kind of layers, and
    return it. In `overrides`, a section without kinds and `rope_theta` concern full attention; for `local_key` see
    `respell_kinds`."""
    sections = dict(form["rope_parameters"])
    if {"rope_scaling", "rope_parameters"} & overrides.keys():
        name = section_name(overrides)
        parts = _by_kind(overrides[name], name) or {KINDS[0]: None}
        for kind in set(KINDS) & parts.keys():
            part = parts[kind] or {"rope_type": "default"}
            if not _has_type(part) and (keys := part.keys() - {"rope_theta"}):
                _check_has_scaling(of_kind(form, kind)["rope_scaling"], name, sorted(keys))
            sections[kind] = _laid_over(sections[kind], part)
    for kind, key in zip(KINDS, ("rope_theta", local_key), strict=True):
        if key is not None and overrides.get(key) is not None:
            sections[kind] = {**sections[kind], "rope_theta": overrides[key]}
    return {**form, "rope_parameters": sections}


def section_name(config: Mapping[str, Plain]) -> str:
    """Return the section of `config` that takes precedence: "rope_scaling" or "rope_parameters"."""
    old, new = "rope_scaling", "rope_parameters"
    if config.get(old) or config.get(new):
        return old if config.get(old) else new
    return new if new in config and old not in config else old


def check_rope(form: Mapping[str, Plain], key: str, *, is_partial: bool = False) -> None:
    """Raise ModelFolderError if the RoPE keys of a canonical configuration, in the section `key`, are invalid or not
    supported. `is_partial`: RoPE may cover only part of a head."""
    part = form.get("partial_rotary_factor", 1.0)
    _check_number("rope_theta", form["rope_theta"])
    _check_number("partial_rotary_factor", part)
    if part != 1.0 and not is_partial:
        raise ModelFolderError(f"partial_rotary_factor {part} is not supported: only 1 is")
    expect(part <= 1, "partial_rotary_factor", part, "a number up to 1")
    scaling = form["rope_scaling"]
    if scaling is None:
        return
    expect(isinstance(scaling, Mapping), key, scaling, "a section with rope_type and its numbers")
    if nested := _nested(scaling):
        raise ModelFolderError(f"{key} has a section for each kind of layer ({', '.join(nested)}), not one for all")
    kind = scaling["rope_type"]
    if kind not in SUPPORTED:
        raise ModelFolderError(f"{key}.rope_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
    for name in _NEEDED[kind]:
        if scaling.get(name) is None:
            raise ModelFolderError(f"{key} is {kind} but has no {name}: add it (hf_config_overrides.{key}.{name})")
    for name in _NEEDED[kind] + ((_ORIGINAL,) if kind in _REMEMBERS_ORIGINAL else ()):
        _check_number(f"{key}.{name}", scaling[name])
    if kind == "longrope":
        pairs = rotary_size(form) // 2
        for name in ("short_factor", "long_factor"):
            factors = scaling.get(name)
            fits = isinstance(factors, list) and len(factors) == pairs and all(map(is_number, factors))
            expect(fits, f"{key}.{name}", factors, f"a list of {pairs} numbers above 0")
    for name in ("factor", "attention_factor") if kind == "longrope" else _CHOICES if kind == "yarn" else ():
        if scaling.get(name):  # transformers treats 0 as missing
            _check_number(f"{key}.{name}", scaling[name])
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ModelFolderError(
            f"{key}.low_freq_factor {scaling['low_freq_factor']} is not below high_freq_factor {scaling['high_freq_factor']}"
        )
    if kind == "proportional":
        turned = scaling.get("partial_rotary_factor", 1.0)
        expect(is_number(turned) and turned <= 1, f"{key}.partial_rotary_factor", turned, "a number up to 1")
        _check_number(f"{key}.factor", scaling.get("factor", 1.0))
    if kind == "yarn":  # theta 1 has no frequencies
        expect(form["rope_theta"] != 1, "rope_theta", form["rope_theta"], "for yarn a number above 1")


def rope_remarks(config: Mapping[str, Plain]) -> Iterator[str]:
    """Yield a sentence for each RoPE setting of config.json that is ignored."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and _said(config, old) != _said(config, new):
        yield "rope_scaling and rope_parameters differ: rope_scaling counts, as in transformers 5"
    key = section_name(config)
    section = config.get(key)
    if isinstance(section, Mapping) and _kind(section) == "default" and not _nested(section):
        read = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
        unread = [name for name in section if name not in read]  # mrope only concerns the positions of images
        if unread:
            yield f"{key} has {', '.join(unread)} but no rope_type that reads them: nothing is scaled, as in transformers 5"


def _said(config: Mapping[str, Plain], section: Plain) -> Plain:
    if not isinstance(section, Mapping):
        return section
    theta = _first(section.get("rope_theta"), config.get("rope_theta"), DEFAULT_THETA)
    return {**section, "rope_theta": theta, "rope_type": _kind(section), "type": None}


def scales_queries(form: Mapping[str, Plain]) -> bool:
    """Return whether the model with this canonical config.json scales the queries of later positions (Ministral 3)."""
    return bool((form.get("rope_scaling") or {}).get("llama_4_scaling_beta"))


def position_factor(form: Mapping[str, Plain]) -> tuple[int | None, float]:
    """Return (positions, factor) for the RoPE scaling in `form`, a config.json in canonical form. Their product is the
    model's maximum length in vLLM. None for positions means max_position_embeddings.

    yarn scales original_max_position_embeddings, and linear scales max_position_embeddings. llama3 and longrope give
    factor 1, because their max_position_embeddings is already the scaled length. A model that scales queries has only
    the positions before the first scaled one, because the native core does not compute this."""
    scaling = form["rope_scaling"]
    if scaling is None or scaling["rope_type"] in ("llama3", "longrope", "proportional"):
        return None, 1.0
    if scales_queries(form):
        return scaling[_ORIGINAL], 1.0
    return (scaling[_ORIGINAL] if scaling["rope_type"] == "yarn" else None), float(scaling["factor"])


def _first(*values: Plain) -> Plain:
    return next((value for value in values if value is not None), None)


def _nested(section: Mapping[str, Plain]) -> list[str]:
    return [name for name, value in section.items() if isinstance(value, Mapping)]


def _kind(section: Mapping[str, Plain]) -> Plain:
    return section.get("rope_type") or section.get("type") or "default"


def _has_type(section: Mapping[str, Plain]) -> bool:
    return bool(section.get("rope_type") or section.get("type"))


def _check_number(name: str, value: Plain) -> None:
    expect(is_number(value), name, value, "a number above 0")


def rotary_size(form: Mapping[str, Plain]) -> int:
    """Return the number of a head's dimensions that RoPE rotates; `form` is a config.json in canonical form."""
    return int(form["head_dim"] * form.get("partial_rotary_factor", 1.0))


def rope_frequencies(form: Mapping[str, Plain], max_length: int) -> tuple[list[float], float]:
    """Return the inverse frequencies [rotary_size / 2] after RoPE scaling, and the factor that multiplies cos and sin.

    `form` is canonical; `max_length` is the longest sequence. Types: default, linear, llama3 (Llama 3.1), yarn (Peng et
    al., 2023), longrope (Ding et al., 2024), proportional (Gemma 4). longrope has factors for short and for long sequences. transformers
    chooses between them by the longest sequence of a batch, so that samples affect each other. This function, like
    vLLM, chooses by `max_length`."""
    head_dim = rotary_size(form)
    theta, scaling = float(form["rope_theta"]), form["rope_scaling"]
    inv_freq = [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return inv_freq, 1.0
    if scaling["rope_type"] == "proportional":  # the other dimensions are rotated by the angle 0
        turned = int(scaling.get("partial_rotary_factor", 1.0) * head_dim // 2)
        scaled = [f / float(scaling.get("factor", 1.0)) for f in inv_freq[:turned]]
        return scaled + [0.0] * (len(inv_freq) - turned), 1.0
    if scaling["rope_type"] == "longrope":
        return _longrope(inv_freq, scaling, form["max_position_embeddings"], max_length)
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return [f / factor for f in inv_freq], 1.0
    if scaling["rope_type"] == "llama3":
        return [_llama3(f, scaling, factor) for f in inv_freq], 1.0
    return _yarn(inv_freq, scaling, theta, head_dim, factor)


def _llama3(frequency: float, scaling: Mapping[str, Plain], factor: float) -> float:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling[_ORIGINAL])
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _longrope(
    inv_freq: list[float], scaling: Mapping[str, Plain], positions: int, max_length: int
) -> tuple[list[float], float]:
    original = scaling[_ORIGINAL]
    factors = scaling["long_factor" if max_length > original else "short_factor"]
    attention_factor, factor = scaling.get("attention_factor"), scaling.get("factor") or positions / original
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return [f / by for f, by in zip(inv_freq, factors, strict=True)], float(attention_factor)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def score_factor(form: Mapping[str, Plain]) -> float:
    """Return the factor by which yarn's mscale_all_dim multiplies the attention scores of DeepSeek-V3."""
    scaling = form["rope_scaling"] or {}
    mscale = scaling.get("mscale_all_dim") if scaling.get("rope_type") == "yarn" else None
    return _yarn_scale(float(scaling["factor"]), mscale) ** 2 if mscale else 1.0


def _yarn(
    inv_freq: list[float], scaling: Mapping[str, Plain], theta: float, head_dim: int, factor: float
) -> tuple[list[float], float]:
    original = float(scaling[_ORIGINAL])
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        both = mscale and mscale_all
        attention_factor = (
            _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all) if both else _yarn_scale(factor)
        )

    rotations = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    low, high = (head_dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in rotations)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    scaled = []
    for i, frequency in enumerate(inv_freq):
        keep = 1.0 - min(max((i - low) / span, 0.0), 1.0)
        scaled.append(frequency / factor * (1.0 - keep) + frequency * keep)
    return scaled, float(attention_factor)
