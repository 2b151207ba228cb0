"""Multi-head latent attention (DeepSeek-V3) in config.json: its sizes, their canonical form and their checks."""

from collections.abc import Mapping

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models import rope
from nemo_rl_cpp.models.config_checks import expect, is_whole

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def canonical(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return `form`, a config.json, with `head_dim` equal to qk_rope_head_dim, as in transformers: the number of a
    head's dimensions that RoPE rotates. Raise ModelFolderError for another `head_dim`."""
    rotated = form["qk_rope_head_dim"]
    expect(form.get("head_dim") in (None, rotated), "head_dim", form.get("head_dim"), f"qk_rope_head_dim {rotated}")
    return {**form, "head_dim": rotated}


def check(form: Mapping[str, Plain]) -> None:
    """Raise ModelFolderError if the native core does not support a size of the latent attention in `form`."""
    heads, key_value, rank = form["num_attention_heads"], form["num_key_value_heads"], form["q_lora_rank"]
    expect(heads == key_value, "num_key_value_heads", key_value, f"num_attention_heads {heads}")
    expect(rank is None or is_whole(rank, 1), "q_lora_rank", rank, "a whole number above 0 or null")
    if form["qk_rope_head_dim"] % 2 or form["v_head_dim"] > key_size(form):
        raise ModelFolderError(
            f"qk_rope_head_dim {form['qk_rope_head_dim']} and v_head_dim {form['v_head_dim']} are not supported: an even number of rotated "
            f"dimensions, and values of at most qk_nope_head_dim + qk_rope_head_dim = {key_size(form)} are"
        )


def key_size(form: Mapping[str, Plain]) -> int:
    """Return the number of dimensions of a head's queries and keys."""
    return form["qk_nope_head_dim"] + form["qk_rope_head_dim"]


def native(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the keyword arguments of the native `DecoderModel` (csrc/model/config.h) for the latent attention of
    `form`, a config.json in canonical form."""
    latent = {
        "query_rank": form["q_lora_rank"] or 0,
        "rank": form["kv_lora_rank"],
        "rope_dim": form["qk_rope_head_dim"],
        "value_dim": form["v_head_dim"],
    }
    scale = key_size(form) ** -0.5 * rope.score_factor(form)
    return {"latent": latent, "attention_scale": scale, "rope_interleaved": bool(form["rope_interleave"])}
