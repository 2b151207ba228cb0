"""Lets clang read every C++ source of a build of gcc, with its options: `python .ci/clang.py build/.../compile_commands.json`.

Says each error with its place; exit status 1 if there is one. Nothing is compiled, so it takes a few seconds a file.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ONLY_GCC = {"-flto", "-fno-fat-lto-objects", "-c", "-Winvalid-pch"}


def errors_of(entry: dict[str, str]) -> list[str]:
    words = shlex.split(entry["command"])
    while not words[0].endswith(("c++", "g++")):  # a compiler cache
        words.pop(0)
    at = words.index("-o")
    options = [word for word in words[1:at] + words[at + 2 :] if word not in ONLY_GCC and "--param" not in word]
    while any(word.endswith("cmake_pch.hxx") for word in options):  # gcc's: a source must do without it, too
        at = next(i for i, word in enumerate(options) if word.endswith("cmake_pch.hxx"))
        del options[at - 1 : at + 1]
    command = ["clang++", "-fsyntax-only", "-w", *options]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    return (
        [] if done.returncode == 0 else [line for line in done.stderr.splitlines() if "error:" in line] or [done.stderr]
    )


def one_by_one(entry: dict[str, str]) -> list[dict[str, str]]:
    """The entry; of a file by which several sources are compiled as one, an entry for each of these."""
    if "/Unity/" not in entry["file"]:
        return [entry]
    sources = re.findall(r'^#include "(.*)"$', Path(entry["file"]).read_text(), re.MULTILINE)
    return [entry | {"file": source, "command": entry["command"].replace(entry["file"], source)} for source in sources]


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as file:
        entries = [source for entry in json.load(file) for source in one_by_one(entry)]
    entries = [entry for entry in entries if entry["file"].endswith(".cpp") and "cuda" not in entry["file"]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = [line for lines in pool.map(errors_of, entries) for line in lines]
    print(*errors[:50], sep="\n")
    print(f"{len(entries)} files, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
