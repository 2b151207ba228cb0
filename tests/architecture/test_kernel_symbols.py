"""No symbol of a file compiled for one CPU capability may be one that the linker can merge with another file's: the copy
that it keeps could hold instructions which the machine lacks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = {  # the files of csrc/kernels that are compiled for it
    "base": "cpu/*.cpp", "avx2": "cpu/*.cpp", "avx512": "cpu/*.cpp", "avx512_bf16": "cpu/*.cpp",
    "software_tiles": "tiles/*.cpp", "software_tiles_avx512": "tiles/*.cpp", "amx": "tiles/*.cpp",
}  # fmt: skip
PAIRS = re.compile(r"attention_\w+|gemm|kv_cache|linear_\w+|packed_weights")  # of avx512_bf16: what multiplies pairs
# headers whose functions are no templates, or leave nothing behind once inlined
HARMLESS = {
    "arm_neon.h", "cfloat", "cmath", "cstddef", "cstdint", "cstdlib", "cstring", "immintrin.h", "type_traits",
    "utility",
}  # fmt: skip
MERGEABLE = re.compile(r"^[0-9a-f]* *([WwVvu]) (.*)$")


def built_objects(capability: str) -> list[Path]:
    builds = sorted(ROOT.glob("build/editable-*"), key=lambda p: p.stat().st_mtime)
    found = sorted(builds[-1].glob(f"CMakeFiles/nemo_kernels_{capability}.dir/**/*.o")) if builds else []
    if not found:
        pytest.fail("the kernels' object files are not there: run `uv sync --reinstall-package nemo-rl-cpp`")
    return found


def mergeable_symbols(path: Path) -> list[str]:
    listing = subprocess.run(
        ["nm", "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return [match[2] for line in listing.splitlines() if (match := MERGEABLE.match(line))]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernel_files_define_no_weak_symbols(capability):
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    sources = {p.name for p in (ROOT / "csrc/kernels").glob(CAPABILITIES[capability])}
    if capability == "avx512_bf16":
        sources = {name for name in sources if PAIRS.fullmatch(name.removesuffix(".cpp"))}
    objects = [p for p in built_objects(capability) if p.name.removesuffix(".o") in sources]
    assert len(objects) == len(sources)
    assert {p.name: symbols for p in objects if (symbols := mergeable_symbols(p))} == {}


def test_weak_symbol_check_finds_a_template_instance(tmp_path):
    if shutil.which("nm") is None or shutil.which("g++") is None:
        pytest.skip("nm and g++ are needed")
    source = tmp_path / "shared.cpp"
    source.write_text("template <class T> T twice(T x) { return x + x; }\nint f(int x) { return twice(x); }\n")
    subprocess.run(["g++", "-O0", "-c", str(source), "-o", str(tmp_path / "shared.o")], check=True)
    assert mergeable_symbols(tmp_path / "shared.o") == ["int twice<int>(int)"]


def test_kernel_files_include_only_the_allowed_cpp_standard_headers():
    for path in sorted(p for folder in ("cpu", "tiles") for p in (ROOT / "csrc/kernels" / folder).iterdir()):
        included = set(re.findall(r"#include <([\w.]+)>", path.read_text()))
        assert included <= HARMLESS, f"{path.name} includes {sorted(included - HARMLESS)}; see csrc/kernels/cpu/plain.h"
