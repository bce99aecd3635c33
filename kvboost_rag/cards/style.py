"""One look for all cards: light and dark, on a phone and on a desk, with colour and without."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["card"]

_LIGHT = "--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--page:#ffffff;--well:#eef1f4"
_DARK = "--ink:#e6edf3;--soft:#a3adb8;--line:#3d444d;--page:#16191d;--well:#262b31"

# Colours of Okabe and Ito, told apart by colour-blind people. Without any colour the kinds differ by height (work
# stands tall, reuse lies low) and by pattern (stripes and no stripes), and by the letters.
_KINDS = """
.kvb .exact{--fill:linear-gradient(#009e73,#009e73);--tall:40%}
.kvb .approximate{--fill:repeating-linear-gradient(135deg,#56b4e9 0 3px,#0072b2 3px 5px);--tall:40%}
.kvb .recomputed{--fill:repeating-linear-gradient(0deg,#e69f00 0 4px,#7a4f00 4px 6px);--tall:100%}
.kvb .computed{--fill:linear-gradient(#d55e00,#d55e00);--tall:100%}
.kvb i{background:var(--fill) bottom/100% var(--tall) no-repeat;display:block;font:600 11px/16px monospace;
min-width:0;overflow:hidden;text-align:center;color:var(--ink)}
.kvb .recomputed.l::before,.kvb .computed.l::before{background:#fff;color:#000;border-radius:2px;padding:0 2px}
.kvb .exact.l::before{content:"="}.kvb .approximate.l::before{content:"~"}
.kvb .recomputed.l::before{content:"R"}.kvb .computed.l::before{content:"C"}
"""

_LAYOUT = """
.kvb{background:var(--page);border:1px solid var(--line);border-radius:6px;box-sizing:border-box;color:var(--ink);
container-type:inline-size;font:14px/1.45 system-ui,sans-serif;margin:4px 0;max-width:960px;padding:10px 12px}
.kvb *{box-sizing:border-box}.kvb p{margin:0 0 6px}.kvb .soft{color:var(--soft);font-size:12px}
.kvb .big{font-size:17px;font-weight:600}.kvb .facts{display:flex;flex-wrap:wrap;gap:2px 16px;align-items:baseline}
.kvb blockquote{border-left:3px solid var(--line);margin:0 0 8px;padding:2px 0 2px 10px;white-space:pre-wrap;
overflow-wrap:anywhere}.kvb pre.plain{display:none}
.kvb .whole{display:flex;gap:2px;margin:6px 0 2px}.kvb .whole.dense{gap:0}.kvb .piece{min-width:0}
.kvb .piece::after{color:var(--soft);content:attr(data-number);display:block;font-size:12px;height:18px;
overflow:hidden;text-align:center;white-space:nowrap}
.kvb .bar{background:var(--well);display:flex;height:30px}.kvb td .bar{height:18px;min-width:2px}
.kvb table{border-collapse:collapse;border:0;margin:6px 0 0;width:100%;font-size:13px;color:inherit;
table-layout:auto!important}
.kvb tr{background:none!important;border-top:1px solid var(--line)}
.kvb th,.kvb td{border:0;padding:3px 10px 3px 0;text-align:left!important;vertical-align:middle;
background:none;white-space:normal;max-width:none}
.kvb th{color:var(--soft);font-size:12px;font-weight:600}
.kvb td.name{min-width:8.5em;overflow-wrap:anywhere}.kvb table+p{margin:8px 0 0}
.kvb td.n,.kvb th.n{font-variant-numeric:tabular-nums;text-align:right!important}
.kvb td.w{width:45%}.kvb .legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0 0;font-size:12px}
.kvb .legend span{display:inline-flex;align-items:center;gap:5px}.kvb .legend i{width:26px;height:16px}
@container (max-width:520px){.kvb td.w{width:30%}.kvb .wide,.kvb td i::before{display:none}
.kvb th,.kvb td{padding-right:6px}}
"""

# A notebook's own theme wins over the system's: JupyterLab and nbconvert, VS Code, Colab.
_THEMES = f"""
.kvb{{{_LIGHT};color-scheme:light}}
@media (prefers-color-scheme:dark){{.kvb{{{_DARK};color-scheme:dark}}}}
[data-jp-theme-light="true"] .kvb,.vscode-light .kvb,html[theme="light"] .kvb{{{_LIGHT};color-scheme:light}}
[data-jp-theme-light="false"] .kvb,.vscode-dark .kvb,html[theme="dark"] .kvb{{{_DARK};color-scheme:dark}}
"""

_STYLE = "".join(line.strip() for line in (_THEMES + _LAYOUT + _KINDS).splitlines())


def card(parts: Iterable[str]) -> str:
    """Put HTML into a frame that brings its own style; where styles are stripped, tables and text are left."""
    return f'<div class="kvb"><style>{_STYLE}</style>{"".join(parts)}</div>'
