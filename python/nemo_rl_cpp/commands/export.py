"""`nemo-rl-cpp export` writes a model or a checkpoint as a GGUF file."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl_cpp.command_line import add_model_option, command_parser
from nemo_rl_cpp.hub.sources import find_policy_weights, resolve_model

FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Formats of the matrices. Vectors are always float32. In q4_0, embedding and LM head have 8 bits: this costs little
and avoids most of the error that 4 bits would cause there."""
_EXAMPLES = """examples:
  nemo-rl-cpp export --model results/grpo_arithmetic_smollm2 --gguf q8_0 --out arithmetic.gguf
  nemo-rl-cpp export --model results/grpo/step_100 --gguf f16 --out policy.gguf --no-compare"""


def main(arguments: Sequence[str]) -> int:
    """Write the GGUF file, and print how much its logits differ from the original model's."""
    parser = command_parser("export", "Write a model as a GGUF file, for llama.cpp, Ollama and LM Studio.", _EXAMPLES)
    add_model_option(parser)
    parser.add_argument("--gguf", choices=FORMATS, required=True, help="format of the matrices")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.gguf")
    costs = "do not read the file back (it takes the memory of the model in float32)"
    parser.add_argument("--no-compare", action="store_true", help=costs)
    known = parser.parse_args(arguments)
    if known.out.suffix != ".gguf":
        parser.error(f"--out {known.out}: the name of a GGUF file ends in .gguf")
    if known.out.resolve() == Path(known.model).resolve():
        parser.error(f"--out {known.out} is the model itself: give another name")
    folder = resolve_model(find_policy_weights(known.model), key="--model")
    from nemo_rl_cpp.models.gguf_export import compare_with_folder, export_gguf  # loads torch

    known.out.parent.mkdir(parents=True, exist_ok=True)
    size = export_gguf(folder, known.out, known.gguf)
    print(f"{known.out}: {size / 1e6:,.1f} MB, {known.gguf}")
    if not known.no_compare:
        gap = compare_with_folder(known.out, folder)
        kl = f"KL {gap.mean_kl:.2g} nats a token from the model in float32"
        print(f"read back over {gap.tokens} tokens: {kl}, logits differ by {gap.max_logit:.2g} at most")
    return 0
