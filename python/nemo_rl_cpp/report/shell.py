"""The frame of every page: one HTML text without any reference outside itself."""

import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.chart_data import packed

_HERE = Path(__file__).parent
_SCRIPTS = ("base", "chart", "export", "metrics", "samples", "page")


class PageSection(NamedTuple):
    """A section: its id, its heading and its HTML."""

    key: str
    title: str
    content: str


def document(
    title: str, header: str, sections: Sequence[PageSection], data: Mapping[str, Plain], status: str = "finished", footer: str = "",
    now: float | None = None, scripts: Sequence[str] = _SCRIPTS,
) -> str:  # fmt: skip
    """The page. `data`: what the scripts read, by the id of its element; `now`: Unix time that it says it was written at; `scripts`:
    which of the page's scripts it has."""
    shown = [section for section in sections if section.content]
    links = "".join(f'<a href="#{s.key}">{escape(s.title)}</a>' for s in shown)
    body = "".join(f'<section id="{s.key}"><h2>{escape(s.title)}</h2>{s.content}</section>' for s in shown)
    blocks = "".join(f'<script type="text/plain" id="{key}">{packed(value)}</script>' for key, value in data.items())
    written = int(now if now is not None else time.time())
    code = "".join(_asset(f"{name}.js") for name in scripts)
    ready = "" if scripts else ' data-ready="yes"'  # which the scripts say when they are done
    without = '<noscript><p class="muted">Curves and samples are drawn by scripts, which are switched off here.</p></noscript>'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head>'
        f'<body data-status="{escape(status)}" data-written="{written}"{ready}>'
        f"<header>{header}<nav>{links}</nav></header><main>{body}{without if scripts else ''}</main>"
        f"<footer>Written {utc(written)} by nemo_rl_cpp{footer}</footer>"
        f"{blocks}{f'<script>{code}</script>' if scripts else ''}</body></html>\n"
    )


def breakable(name: str) -> str:
    """A metric's or stage's name as HTML that may be broken behind its underscores, slashes and dots."""
    return re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", escape(name))


@cache
def _asset(name: str) -> str:
    """A file of this folder, read once: a package that is installed anew during a run does not mix two versions on a page."""
    return (_HERE / name).read_text(encoding="utf-8")


def utc(seconds: float) -> str:
    """A time as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Text of a length of time: `1 h 02 min`, `5 min 31 s`, `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
