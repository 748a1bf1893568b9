"""Self-contained HTML pages: one file, no network, data as inert JSON, and only our own scripts may run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from importlib import resources
from typing import Any

SCRIPTS = ("rules.js", "chart.js", "episodes.js")  # shared by all pages, in this order
DIGITS = 9  # significant digits of numbers on a page; variances are made of differences of sums


def page(title: str, script: str, data: Any, *, connect: bool = False) -> str:
    """An HTML document that shows `data` with `script`; with `connect` it may call its own server.

    The scripts are allowed by their hash: text of a model that reached the document as markup could not run.
    """
    code = "\n".join(_read(name) for name in (*SCRIPTS, script))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    reach = "'self'" if connect else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {reach}; base-uri 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_read('page.css')}</style></head>\n"
        f'<body><main id="main"></main>\n<script type="application/json" id="data">{inert(data)}</script>\n'
        f"<script>{code}</script></body></html>\n"
    )


def inert(data: Any) -> str:
    """JSON that no HTML parser takes for markup, whatever text it holds."""
    text = json.dumps(rounded(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def rounded(value: Any) -> Any:
    """The data with numbers cut to DIGITS and NaN and infinities as null, which is what JSON has."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _read(name: str) -> str:
    return resources.files("agent_sat.analyze").joinpath("page", name).read_text(encoding="utf-8")
