"""Lets clang read the C++ sources of a build of gcc, with its options: `python .ci/clang.py build/.../compile_commands.json`.

Says each error with its place; exit status 1 if there is one. Nothing is compiled. Tests are left out, and kernels are read without vectors and
with the widest ones. The headers of other libraries that sources of one target include are read once for all of them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

ONLY_GCC = {"-flto", "-fno-fat-lto-objects", "-c", "-Winvalid-pch"}
LEFT_OUT = re.compile(
    r"CMakeFiles/(nemo_core_tests|nemo_rl_nccl_emulation|nemo_kernels_avx2|nemo_kernels_software_tiles\w*)[.]dir/"
)
ELSEWHERE = re.compile(r"^#include <(?:(?:ATen|c10|pybind11|torch)/|gtest).*>$", re.MULTILINE)


def options_of(entry: dict[str, str]) -> tuple[str, ...]:
    words = shlex.split(entry["command"])
    while not words[0].endswith(("c++", "g++")):  # a compiler cache
        words.pop(0)
    at = words.index("-o")
    options = [word for word in words[1:at] + words[at + 2 :] if word not in ONLY_GCC and "--param" not in word]
    options.remove(entry["file"])
    while any(word.endswith("cmake_pch.hxx") for word in options):  # gcc's: a source must do without it, too
        at = next(i for i, word in enumerate(options) if word.endswith("cmake_pch.hxx"))
        del options[at - 1 : at + 1]
    return tuple(options)


def errors_of(entry: dict[str, str], options: Sequence[str]) -> list[str]:
    command = ["clang++", "-fsyntax-only", "-w", *options, entry["file"]]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    return (
        [] if done.returncode == 0 else [line for line in done.stderr.splitlines() if "error:" in line] or [done.stderr]
    )


def read_once(entries: Sequence[dict[str, str]], options: Sequence[str], name: Path) -> list[str]:
    """Options by which headers of other libraries come already read; none where the sources include none."""
    found = {line for entry in entries for line in ELSEWHERE.findall(Path(entry["file"]).read_text())}
    if len(entries) < 3 or not found:
        return []
    header, read = name.with_suffix(".h"), name.with_suffix(".pch")
    header.write_text("\n".join(sorted(found)) + "\n")
    command = ["clang++", "-x", "c++-header", "-w", *options, "-o", str(read), str(header)]
    subprocess.run(command, cwd=entries[0]["directory"], check=True)
    return ["-include-pch", str(read)]


def one_by_one(entry: dict[str, str]) -> list[dict[str, str]]:
    """The entry; of a file by which several sources are compiled as one, an entry for each of these."""
    if "/Unity/" not in entry["file"]:
        return [entry]
    sources = re.findall(r'^#include "(.*)"$', Path(entry["file"]).read_text(), re.MULTILINE)
    return [entry | {"file": source, "command": entry["command"].replace(entry["file"], source)} for source in sources]


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as file:
        entries = [source for entry in json.load(file) for source in one_by_one(entry)]
    entries = [
        entry
        for entry in entries
        if entry["file"].endswith(".cpp") and "cuda" not in entry["file"] and not LEFT_OUT.search(entry["command"])
    ]
    targets: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for entry in entries:
        targets.setdefault(options_of(entry), []).append(entry)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        once = pool.map(
            lambda i, options: read_once(targets[options], options, Path(folder, str(i))), range(len(targets)), targets
        )
        work = [
            (entry, (*options, *read)) for (options, sources), read in zip(targets.items(), once) for entry in sources
        ]
        errors = [line for lines in pool.map(lambda each: errors_of(*each), work) for line in lines]
    print(*errors[:50], sep="\n")
    print(f"{len(entries)} files, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
