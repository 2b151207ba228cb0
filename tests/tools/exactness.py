"""Tests whether generation and training are bit-identical, for every model family, precision and kind of training.

    python tests/tools/exactness.py [--device cuda] [--only gemma3_text llama] [--json FILE]

Each row is a run of two GRPO steps of a tiny random model. It shows `token_mult_prob_error` (1: equal) and the largest
difference of two log-probabilities over the steps, or the error of a run that fails. The exit status is 1 if a row
differs or fails."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny  # noqa: E402
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES  # noqa: E402
from tiny_layers import LAYERS  # noqa: E402

LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4")
WAYS = {"all weights": (), "LoRA": LORA, "LoRA apart": (*LORA, "++policy.dtensor_cfg.lora_cfg.merge=false")}
WAYS |= {f"LoRA over {kind}": (*LORA, f"policy.quantization={kind}") for kind in ("q8_0", "q4_0", "nf4")}
RECURRENT = {
    **{family: LAYERS[family] for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "lfm2", "lfm2_moe")},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*E", "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16, "mamba_head_dim": 16,
        "n_routed_experts": 6, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
    },
}  # fmt: skip
"""Sizes of the recurrent layers of small models, and of the experts beside them, by family."""
LATENT = {
    "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24, "kv_lora_rank": 32, "q_lora_rank": 32,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
OF_GEMMA_4 = ("gemma4_text", "gemma4_text with experts")
SIZES = RECURRENT | {"deepseek_v3": LATENT, "glm4_moe_lite": LATENT} | {name: LAYERS[name] for name in OF_GEMMA_4}
FAMILIES = [*SUPPORTED_ARCHITECTURES, OF_GEMMA_4[1]]


def gap(family: str, precision: str, way: str, device: str) -> tuple[float, float]:
    """Return the largest token_mult_prob_error and the largest difference of log-probabilities in a run.

    LoRA adapts experts, too. Recurrent layers and latents are small, and recurrent layers alternate with attention layers.
    """
    experts = (
        "policy.dtensor_cfg.lora_cfg.match_all_linear=false",
        "policy.dtensor_cfg.lora_cfg.target_modules=['*proj*','*.experts']",
    )
    model_type = family.partition(" ")[0]
    more = experts if "LoRA" in way and SUPPORTED_ARCHITECTURES[model_type].experts and family != OF_GEMMA_4[0] else ()
    more += tuple(f"++policy.hf_config_overrides.{key}={value}" for key, value in SIZES.get(family, {}).items())
    with tempfile.TemporaryDirectory() as folder:
        run = tiny.make(
            Path(folder), *tiny.SMALL, "grpo.max_num_steps=2", *WAYS[way], *more, f"++policy.hf_config_overrides.model_type={model_type}",
            f"policy.precision={precision}", f"cluster.device={device}",
        )  # fmt: skip
        with run:
            run.train()
        errors, gaps = zip(*((row["token_mult_prob_error"], row["max_logprob_gap"]) for row in run.history))
        return max(errors), max(gaps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for family in arguments.only:
        for precision in ("float32", "bfloat16"):
            for way in WAYS:
                try:
                    error, largest = gap(family, precision, way, arguments.device)
                    said = f"token_mult_prob_error {error:g}, gap {largest:g}"
                    exact = error == 1 and largest == 0
                except Exception as failure:  # noqa: BLE001 - continue with the other rows
                    said, exact = f"{type(failure).__name__}: {failure}", False
                rows.append({"family": family, "precision": precision, "way": way, "result": said, "exact": exact})
                print(f"| {family} | {precision} | {way} | {said} | {'exact' if exact else 'NOT EXACT'} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
