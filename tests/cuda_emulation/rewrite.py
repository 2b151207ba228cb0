"""Rewrites a CUDA source as C++ that compiles with this folder's cuda_runtime_api.h.

It replaces kernel launches and dynamic shared memory, which no header can define."""

import re

# kernel<<<grid, threads, bytes, stream>>>(arguments): the template arguments of `kernel` may be deduced
LAUNCH = re.compile(r"([A-Za-z_]\w*(?:<[\w, ]+>)?)\s*<<<(.*?)>>>\s*\(", re.S)
DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def rewrite(source: str) -> str:
    source = DYNAMIC_SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulation::shared_bytes);", source)
    source = LAUNCH.sub(r"emulation::Launch(\2)([&](const auto&... arguments) { \1(arguments...); }, ", source)
    assert "<<<" not in source and "extern __shared__" not in source, (
        "a launch or a declaration is written in another way"
    )
    return "#include <cuda_runtime_api.h>\n" + source
