"""Lays the Markdown documents of the repository out as the source of the site, with their links bent to it."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "documents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "configs/README.md": "configurations.md",
}
"""Documents whose page has another place than below docs/."""

NAVIGATION: dict[str, tuple[str, ...]] = {
    "Begin": ("start", "installation", "guides/your-data-your-reward", "guides/python", "documents"),
    "Algorithms": ("losses", "guides/grpo", "guides/dapo", "guides/prorlv2", "guides/ppo"),
    "Use": (
        "metrics", "report", "troubleshooting", "supported-models", "transformers", "lora", "vllm", "guides/environments",
        "guides/evaluation", "cluster", "guides/async", "serving", "guides/agents",
    ),
    "Look up": ("configuration", "configurations", "command-line", "api"),
    "Come from": ("coming-from-trl", "coming-from-verl", "porting-from-nemo-rl"),
    "Change": ("architecture", "kernels", "style", "benchmarks", "benchmarks-in-full", "contributing", "changelog"),
}  # fmt: skip
"""Caption of the sidebar -> its pages, in reading order. A document that stands in none of them is put under "More"; a name without a document is left out."""

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^ *(```|~~~)")


def documents(root: Path = ROOT) -> list[str]:
    """Every document, as a path from the root with slashes."""
    inside = [path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md")]
    return sorted({*OUTSIDE, *inside})


def page_of(document: str) -> str:
    """The path of a document's page in the site's source."""
    return OUTSIDE.get(document, document.removeprefix("docs/"))


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """`text` with `change` applied to each line that is not in a fenced block."""
    lines, fence = [], False
    for line in text.splitlines(keepends=True):
        if _FENCE.match(line):
            fence = not fence
        lines.append(line if fence else change(line))
    return "".join(lines)


def _moved(target: str, document: str, extra: set[str]) -> str:
    """A relative link of `document`, as its page must write it. Files that are no documents are added to `extra`."""
    if re.match(r"[a-z]+:", target):
        return target
    found = os.path.normpath((PurePosixPath(document).parent / target).as_posix())
    if found.endswith(".md"):
        goal = page_of(found)
    else:
        extra.add(found)
        goal = found.removeprefix("docs/") if found.startswith("docs/") else f"files/{found}"
    return os.path.relpath(goal, PurePosixPath(page_of(document)).parent.as_posix())


def page_text(document: str, text: str) -> tuple[str, set[str]]:
    """The text of a document's page, and the files beside documents that it links to."""
    extra: set[str] = set()

    def bend(line: str) -> str:
        return _LINK.sub(lambda found: found[1] + _moved(found[2], document, extra) + found[3], line)

    return outside_fences(text, bend), extra


def toctrees(pages: set[str]) -> str:
    """The sidebar: what the first page ends with, so that Sphinx knows the order of `pages`."""
    placed = {page for group in NAVIGATION.values() for page in group}
    groups = NAVIGATION | {"More": tuple(sorted(pages - placed - {"index"}))}
    made = [
        "\n".join(
            ["```{toctree}", ":hidden:", f":caption: {caption}", "", *(p for p in group if p in pages), "```", ""]
        )
        for caption, group in groups.items()
        if set(group) & pages
    ]
    return "\n" + "\n".join(made)


def stage(source: Path, more: dict[str, str]) -> None:
    """Writes the site's source into `source`: documents, the files that they link to, and the pages `more` (name -> text)."""
    shutil.rmtree(source, ignore_errors=True)
    extra: set[str] = set()
    texts = dict(more)
    for document in documents():
        text, linked = page_text(document, (ROOT / document).read_text())
        texts[page_of(document).removesuffix(".md")] = text
        extra |= linked
    texts["index"] += toctrees(set(texts))
    for page, text in texts.items():
        path = source / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in extra:
        path = source / (name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, path)
