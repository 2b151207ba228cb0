"""Fuzzes the readers of safetensors files and index files.

    python tests/fuzz/fuzz_weight_files.py --seconds 20 tests/fuzz/corpus/weight_files

Any bytes must be read, or must raise a one-sentence error that names the file. Files of the corpus are mutated for a
number of seconds. The same seed gives the same mutations."""

import argparse
import json
import random
import struct
import sys
import tempfile
import time
from pathlib import Path

from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.weight_files import INDEX_FILE, SINGLE_FILE, raw_tensors, tensor_entries, weight_files

WORDS = [
    b"null", b"-1", b"1e9", b"[]", b"{}", b'""', b"\\ud800", b"18446744073709551616", b"data_offsets",
    b"../x.safetensors", b"\x00", b"\xff" * 8,
]  # fmt: skip


def mutated(content: bytes, dice: random.Random) -> bytes:
    """Return the content with up to eight bytes, words or pieces changed, removed or inserted."""
    data = bytearray(content)
    for _ in range(dice.randint(1, 8)):
        at = dice.randint(0, len(data))
        kind = dice.randrange(4)
        if kind == 0:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif kind == 1:
            data[at : at + dice.choice((0, 1, 4, 16))] = dice.choice(WORDS)
        elif kind == 2:
            del data[at : at + dice.randint(1, 16)]
        else:
            other = dice.randint(0, len(data))
            data[at:at] = data[other : other + dice.randint(1, 32)]
    if dice.random() < 0.5 and len(data) > 8:  # with a correct length, the header is read
        data[:8] = struct.pack("<Q", max(0, len(data) - 8 - dice.choice((0, 8, 24))))
    return bytes(data)


def read(folder: Path, name: str) -> bool:
    """Return whether the weights of the folder can be read. Assert that an error names a file of the folder."""
    try:
        if name == SINGLE_FILE:
            tensor_entries(folder / name)
        return all(tensor.data.nbytes >= 0 for _, tensor in raw_tensors(weight_files(folder)))
    except ModelFolderError as refusal:
        assert str(folder) in str(refusal) and "\n" not in str(refusal), refusal
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = [(path.name, path.read_bytes()) for path in sorted(arguments.corpus.iterdir())]
    assert seeds, f"{arguments.corpus} is empty"
    dice, end, tried, whole = random.Random(arguments.seed), time.monotonic() + arguments.seconds, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        while time.monotonic() < end or tried < len(seeds):
            seed_name, content = seeds[tried % len(seeds)]
            name = INDEX_FILE if seed_name.startswith("index") else SINGLE_FILE
            for path in folder.iterdir():
                path.unlink()
            given = content if tried < len(seeds) else mutated(content, dice)
            (folder / name).write_bytes(given)
            try:
                whole += read(folder, name)
            except BaseException:
                print(json.dumps({"file": name, "bytes": given.hex()}), file=sys.stderr)
                raise
            tried += 1
    print(f"{tried} files, {whole} of them whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
