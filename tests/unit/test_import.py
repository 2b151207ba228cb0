"""The package imports fast and light."""

import subprocess
import sys


def test_import_loads_no_heavy_module():
    code = (
        "import sys, nemo_rl_cpp\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'datasets', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_native_core_loads():
    from nemo_rl_cpp._native import C

    assert C.cpu_capability() in {"base", "avx2", "avx512", "avx512_bf16", "amx", "software_tiles"}
