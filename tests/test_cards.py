"""What objects show of themselves in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, Report, Result, Span, SpanKind, Stats
from kvboost_rag.calibrate import Calibration
from kvboost_rag.cards import style
from kvboost_rag.cards.strip import cells
from kvboost_rag.policy import Policy, PolicyPoint

EVIL = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>&\ud800"
LIMIT = 200_000
KINDS = list(SpanKind)


class Page(HTMLParser):
    """Collects tags and text, and sees that every tag is closed in its turn."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open = set(), "", []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def spans_of(pieces, tokens, name="doc {}"):
    """Alternate between the kinds every few tokens, the worst case for a strip."""
    out, at = [], 0
    for number in range(pieces):
        for turn in range(tokens):
            out.append(Span(at, at + 1, KINDS[turn % 4], name.format(number), "encoded after another history"))
            at += 1
        out.append(Span(at, at + 1, SpanKind.COMPUTED))
        at += 1
    return tuple(out)


def report_of(spans, **options):
    values = {"repair": "none", "ttft": 0.5, "total": 1.0, "stages": {"prefill": 0.4, "locate": 0.01}}
    return Report(spans, **values | options)


def stats_of(**tokens):
    return Stats(3, 1_000, 4, 5 << 20, 6 << 10, 7, 2, dict.fromkeys((k.value for k in KINDS), 0) | tokens)


def calibration_of(methods, source="somewhere"):
    row = {"n": 2, "ttft_ratio": 0.5, "ttft_ms": 40.0, "kl": 0.02, "top1": 0.9, "f1": 0.5}
    policy = Policy(tuple(PolicyPoint(m, 0.5, 0.02, 0.03, 2) for m in methods), source)
    return Calibration(policy, Path("/somewhere/else/policy-1.json"), {"summary": {m: row for m in ["full", *methods]}})


CARDS = {
    "report": lambda text: report_of(spans_of(3, 9, text), repair=text, fallback=text),
    "result": lambda text: Result(text, (1, 2), "stop", report_of(spans_of(3, 9, text))),
    "policy": lambda text: Policy((PolicyPoint(text, 0.5, 0.02, 0.03, 2),), text),
    "calibration": lambda text: calibration_of([text], text),
    "stats": lambda text: stats_of(exact=5, computed=3),
}


@pytest.mark.parametrize("name", CARDS)
def test_text_of_documents_models_and_files_is_escaped(name):
    html = CARDS[name](EVIL)._repr_html_()
    page = Page(html)
    assert not {"script", "img", "link", "iframe"} & page.tags
    assert "src=" not in re.sub(r"&lt;.*?&gt;", "", html)
    html.encode()
    if name != "stats":
        assert "<script>alert('x')</script>" in page.text


@pytest.mark.parametrize("name", CARDS)
def test_cards_are_self_contained_and_know_dark_themes(name):
    html = CARDS[name]("plain")._repr_html_()
    assert "http" not in html
    assert "@import" not in html
    assert "url(" not in html
    for theme in ("prefers-color-scheme:dark", 'data-jp-theme-light="false"', "vscode-dark", 'html[theme="dark"]'):
        assert theme in html


def test_cards_stay_small_whatever_the_size_of_what_they_show():
    huge = report_of(spans_of(500, 40, "n" * 10_000 + "{}"), repair="r" * 9_999, fallback="f" * 9_999)
    few = report_of(spans_of(20, 500, "n" * 10_000 + "{}"))
    shown = {
        "report": huge, "few long documents": few, "result": Result("x" * 300_000, (1,) * 9, "length", few),
        "calibration": calibration_of([f"{'m' * 5_000}{i}" for i in range(300)], "s" * 100_000),
        "policy": calibration_of([f"{'m' * 5_000}{i}" for i in range(300)], "s" * 100_000).policy,
    }  # fmt: skip
    for name, thing in shown.items():
        html = thing._repr_html_()
        assert len(html.encode()) < LIMIT, name
        assert re.search(r"more (characters|documents|rows)", html), name
        Page(html)


def test_the_strip_names_documents_in_order_and_tells_the_kinds_apart_without_colour():
    spans = (
        Span(0, 10, SpanKind.EXACT), Span(10, 50, SpanKind.EXACT, "rooms"), Span(50, 52, SpanKind.COMPUTED),
        Span(52, 60, SpanKind.RECOMPUTED, "food", "seam"), Span(60, 90, SpanKind.APPROXIMATE, "food", "moved"),
        Span(90, 100, SpanKind.COMPUTED),
    )  # fmt: skip
    html = report_of(spans)._repr_html_()
    text = Page(html).text
    assert [m for m in re.findall("rooms|food|head|question", text)] == ["head", "rooms", "food", "question"]
    assert "seam; moved" in text
    # Each kind has a letter, a count, and a pattern and height of its own.
    for words in ("= exact 50", "~ approximate 30", "R recomputed 8", "C computed 12"):
        assert words in text
    looks = {re.search(rf"\.kvb \.{kind.value}\{{--fill:(.*?)\}}", html)[1] for kind in KINDS}
    assert len({("repeating" in look, "100%" in look.split("--tall:")[1]) for look in looks}) == 4
    assert 'aria-label="prompt tokens in order: 50 exact, 30 approximate, 8 recomputed, 12 computed"' in html
    # Where a host strips styles, the strip is left as text.
    assert '<pre class="plain">[====' in html


@pytest.mark.parametrize("most", [7, 50, 399])
def test_a_coarse_strip_keeps_each_kinds_share(most):
    spans = [Span(i, i + 1, SpanKind.RECOMPUTED if i % 12 == 0 else SpanKind.APPROXIMATE) for i in range(1_200)]
    drawn = cells(spans, most)
    assert len(drawn) <= most
    assert sum(tokens for _, tokens in drawn) == 1_200
    share = sum(tokens for kind, tokens in drawn if kind is SpanKind.RECOMPUTED) / 1_200
    assert share == pytest.approx(1 / 12, abs=1.5 / most)
    assert cells(spans[:3], most) == [(SpanKind.RECOMPUTED, 1), (SpanKind.APPROXIMATE, 2)]


def test_a_calibration_shows_what_auto_takes_and_no_folder():
    shown = calibration_of(["none", "selective:4"])
    text = Page(shown._repr_html_()).text
    assert "policy-1.json" in text
    assert "somewhere/else" not in text + repr(shown)
    assert "standard" in text
    assert "auto:safe computes everything" in text


def test_an_engines_own_objects_are_shown():
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        assert "no prompt answered yet" in engine.stats._repr_html_()
        engine.add_documents([Document("a<b", "A document of some length that can be located in a text.")])
        result = engine.generate("Why?", documents=["a<b"], max_tokens=4, temperature=0)
        assert "a&lt;b" in result._repr_html_()
        assert "1 prompts answered" in engine.stats._repr_html_()
        assert "auto takes it for" in engine.policy._repr_html_()


def contrast(one, other):
    """Ratio of two colours as WCAG 2 defines it, from 1 to 21."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [style._LIGHT, style._DARK], ids=["light", "dark"])
def test_text_and_bars_stand_out_from_their_ground(theme):
    colours = dict(re.findall(r"--(\w+):(#\w{6})", theme))
    fills = dict(re.findall(r"\.kvb \.(\w+)\{--fill:(.*?);", style._KINDS))
    assert set(fills) == {kind.value for kind in KINDS}
    for ground in (colours["page"], colours["well"]):
        assert min(contrast(colours[text], ground) for text in ("ink", "soft")) >= 4.5
        for fill in fills.values():
            # Of stripes, one colour is enough.
            assert max(contrast(colour, ground) for colour in re.findall(r"#\w{6}", fill)) >= 3
