"""Replaces one requirement in a wheel's metadata: `python cmake/wheel_requires.py WHEEL torch==2.15.0 torch==2.14.1`.

A wheel fits the torch that it was compiled with. One for another version than that of pyproject.toml must ask for that other.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path


def replace_requirement(wheel: Path, before: str, after: str) -> None:
    """Rewrites the wheel in place; ValueError unless exactly one line of its METADATA requires `before`."""
    with zipfile.ZipFile(wheel) as archive:
        files = [(info, archive.read(info)) for info in archive.infolist()]
    name = next(info.filename for info, _ in files if info.filename.endswith(".dist-info/METADATA"))
    text = {info.filename: data for info, data in files}[name].decode("utf-8")
    head, blank, body = text.partition("\n\n")
    lines = [f"Requires-Dist: {after}" if line == f"Requires-Dist: {before}" else line for line in head.split("\n")]
    changed = sum(old != new for old, new in zip(head.split("\n"), lines, strict=True))
    if changed != 1:
        raise ValueError(f"{wheel.name}: {changed} lines of {name} require {before}, expected one")
    metadata = ("\n".join(lines) + blank + body).encode("utf-8")
    record = name.removesuffix("METADATA") + "RECORD"
    temporary = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in files:
            if info.filename == name:
                data = metadata
            elif info.filename == record:
                data = _recorded(data.decode("utf-8"), name, metadata).encode("utf-8")
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    temporary.replace(wheel)


def _recorded(record: str, name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode("ascii")
    row = f"{name},sha256={digest},{len(data)}"
    return "\n".join(row if line.partition(",")[0] == name else line for line in record.split("\n"))


if __name__ == "__main__":
    replace_requirement(Path(sys.argv[1]), *sys.argv[2:4])
