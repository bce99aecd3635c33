"""Draw the data flow of ``how-it-works.md``: ``python docs/draw_flow.py``.

The picture has a ground of its own, so that it can be read on light and dark pages, and tells kinds of tokens apart by
pattern and letter, so that it can be read without colour.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "data_flow.svg"
WIDTH, HEIGHT = 460, 678
BOX_WIDTH, BOX_HEIGHT, STEP = 204, 46, 62
LEFT, RIGHT, TOP = 14, 242, 52

INDEX = [
    ("documents", "an id and a text each"),
    ("chunk", "at paragraphs, sentences, words"),
    ("encode", "one forward, behind the head"),
    ("unrotate", "keys without position"),
    ("quantise", "8 or 4 bits, if asked for"),
    ("store", "memory, then a folder"),
]
REQUEST = [
    ("prompt", "messages or text"),
    ("render, locate", "known documents in it"),
    ("plan", "exact, approximate, to compute"),
    ("assemble", "rotate KV to its new places"),
    ("choose", "which tokens are repaired"),
    ("one forward", "repair, holes, question"),
    ("decode", "text and report"),
]

STRIP = [
    ("head", 76, "exact", "="), ("rain", 84, "exact", "="), ("", 16, "recomputed", "R"),
    ("music", 76, "approximate", "~"), ("", 16, "recomputed", "R"), ("zebra", 84, "approximate", "~"),
    ("question", 80, "computed", "C"),
]  # fmt: skip
KINDS = [
    ("exact", "=", "same tokens after the same tokens"),
    ("approximate", "~", "same tokens after others, taken as stored"),
    ("recomputed", "R", "same tokens after others, computed again"),
    ("computed", "C", "never seen, or not stored"),
]

HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"
  aria-labelledby="title">
<title id="title">Documents become KV once, when they are indexed; a request takes it from the store, moves it
to its place and computes what is left in one forward.</title>
<style>
  svg {{ --ground: #ffffff; --ink: #1b1f24; --soft: #57606a; --box: #f3f5f7; --line: #6e7781; --mark: #0b5fa5; }}
  @media (prefers-color-scheme: dark) {{
    svg {{ --ground: #16191d; --ink: #eceff2; --soft: #b0b8c0; --box: #23282e; --line: #8b949e; --mark: #79b8ff; }}
  }}
  text {{ font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }}
  .big {{ font-size: 14px; font-weight: 600; }}
  .small {{ font-size: 11.5px; fill: var(--soft); }}
  .letter {{ font: 600 13px ui-monospace, "DejaVu Sans Mono", monospace; }}
  .middle {{ text-anchor: middle; }}
  .box {{ fill: var(--box); stroke: var(--line); }}
  .arrow {{ fill: none; stroke: var(--ink); stroke-width: 1.5; marker-end: url(#tip); }}
  .tip {{ fill: var(--ink); }}
  .token {{ stroke: var(--ink); }}
  .pattern {{ stroke: var(--mark); stroke-width: 1.3; }}
</style>
<defs>
  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
    <path class="tip" d="M0 0 8 4 0 8z"/></marker>
  <pattern id="exact" width="6" height="6" patternUnits="userSpaceOnUse"><path class="pattern" d="M0 3H6"/></pattern>
  <pattern id="approximate" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <path class="pattern" d="M0 0V7"/></pattern>
  <pattern id="recomputed" width="5" height="5" patternUnits="userSpaceOnUse">
    <path class="pattern" d="M0 0 5 5M5 0 0 5"/></pattern>
  <pattern id="computed" width="6" height="6" patternUnits="userSpaceOnUse"/>
</defs>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" style="fill: var(--ground); stroke: var(--line)"/>
"""


def draw() -> str:
    """Return the whole picture."""
    parts = [HEAD, *_column(LEFT, "indexing, once a document", INDEX)]
    parts += _column(RIGHT, "a request", REQUEST)
    store, assemble = _middle(INDEX, "store"), _middle(REQUEST, "assemble")
    between = (LEFT + BOX_WIDTH + RIGHT) / 2
    parts.append(f'<path class="arrow" d="M{LEFT + BOX_WIDTH} {store}H{between}V{assemble}H{RIGHT - 1}"/>')
    return "\n".join([*parts, *_strip(TOP + len(REQUEST) * STEP + 14), "</svg>", ""])


def _middle(rows: list[tuple[str, str]], name: str) -> float:
    return TOP + [row for row, _ in rows].index(name) * STEP + BOX_HEIGHT / 2


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>'


def _column(x: int, title: str, rows: list[tuple[str, str]]) -> list[str]:
    middle = x + BOX_WIDTH / 2
    parts = [_text(middle, 32, title, "big middle")]
    for i, (name, what) in enumerate(rows):
        y = TOP + i * STEP
        parts += [
            f'<rect class="box" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>',
            _text(middle, y + 20, name, "big middle"),
            _text(middle, y + 37, what, "small middle"),
        ]
        if i:
            parts.append(f'<path class="arrow" d="M{middle} {y - STEP + BOX_HEIGHT}V{y - 1}"/>')
    return parts


def _token(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect class="token" x="{x}" y="{y}" width="{width}" height="24" style="fill: url(#{kind})"/>'


def _strip(y: float) -> list[str]:
    """Draw a prompt, token kind by token kind, and what the kinds are."""
    parts, x = [_text(LEFT, y, "a prompt, as reports draw it", "big")], float(LEFT)
    for name, width, kind, letter in STRIP:
        parts += [_token(x, y + 28, width, kind), _text(x + width / 2, y + 68, letter, "letter middle")]
        if name:
            parts.append(_text(x + width / 2, y + 22, name, "small middle"))
        x += width
    for i, (kind, letter, what) in enumerate(KINDS):
        row = y + 82 + 22 * i
        parts += [
            f'<rect class="token" x="{LEFT}" y="{row}" width="30" height="16" style="fill: url(#{kind})"/>',
            _text(LEFT + 40, row + 13, letter, "letter"),
            _text(LEFT + 58, row + 13, f"{kind}: {what}", "small"),
        ]
    return parts


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
