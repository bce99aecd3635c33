"""Pictures: what they show, how they say it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, Report, SpanKind, plots
from kvboost_rag.bench import TimedPrompt, time_prompts
from kvboost_rag.plots.style import COLOURS
from kvboost_rag.replay import TraceOptions, hit_rates

pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install 'kvboost-rag[plots]'")
RESULT = Path(__file__).parent.parent / "examples" / "results" / "hotpotqa_smollm2.json"
TEXTS = ("The zebra ran over the plain, and it saw a lion.", "A fugue begins with one voice, then others join in.",
         "Rain falls, and rivers rise until they reach the sea.")  # fmt: skip
DOCUMENTS = [Document(f"doc {i}", text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def engine():
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), max_prefix_bytes=0) as made:
        made.add_documents(DOCUMENTS)
        yield made


def picture_of_frontier(engine):
    return plots.frontier(json.loads(RESULT.read_text())["summary"], "title")


def picture_of_ttft(engine):
    points = [TimedPrompt(m, n, 100 * n, 120 * n, n * s) for m, s in (("full", 2), ("auto", 1)) for n in (1, 2, 3)]
    return plots.ttft_by_tokens(points, "title")


def picture_of_stages(engine):
    reports = {
        name: engine.generate("Why?", documents=DOCUMENTS, max_tokens=1, reuse=reuse).report
        for name, reuse in (("full prefill", False), ("reuse", True))
    }
    return plots.stages(reports, "title")


def picture_of_hit_rate(engine):
    return plots.hit_rate(hit_rates(TraceOptions(requests=20, documents=12), (0.2, 0.6)), "title")


def picture_of_deviation(engine):
    return plots.deviation(engine.deviation("Why?", documents=DOCUMENTS, repair="selective:4"), "title")


PICTURES = {
    picture_of_frontier: (["full prefill = 1", "full prefill = 1"], ["nats a token", "token F1"]),
    picture_of_ttft: (["tokens of the documents"], ["time to the first token, s"]),
    picture_of_stages: (["time to the first token, ms"], [""]),
    picture_of_hit_rate: (["budget, % of"], ["hit rate, % of"]),
    picture_of_deviation: (["token of the prompt", ""], ["layer", "share of their length"]),
}


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_axes_have_titles_with_units_and_files_are_png_and_svg(draw, engine, tmp_path):
    plot = draw(engine)
    across, up = PICTURES[draw]
    for axes, x, y in zip(plot.figure.axes, across, up, strict=True):
        assert x in axes.get_xlabel()
        assert y in axes.get_ylabel()
    assert plot.figure.get_suptitle() == "title"
    assert plot._repr_png_().startswith(b"\x89PNG")
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        plot.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_frontier_picture_shows_every_repair_once_and_joins_those_that_no_other_beats():
    summary = json.loads(RESULT.read_text())["summary"]
    repairs = {method: row for method, row in summary.items() if method not in ("full", "prefix-cache")}
    left, right = plots.frontier(dict(reversed(summary.items())), "title").figure.axes
    for axes, figure in ((left, "kl"), (right, "f1")):
        lines = {line.get_label(): line for line in axes.lines if line.get_marker() != "None"}
        assert set(lines) == {re.sub(r":[0-9.]+", "", method) for method in repairs}
        for name, line in lines.items():
            rows = [row for method, row in repairs.items() if re.sub(r":[0-9.]+", "", method) == name]
            points = sorted((row["ttft_ratio"], row[figure]) for row in rows)
            assert [tuple(point) for point in line.get_xydata()] == points
    frontier = next(line for line in left.lines if line.get_label() == "frontier")
    points = [(row["ttft_ratio"], row["kl"]) for row in repairs.values()]
    unbeaten = [p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)]
    assert 1 < len(unbeaten) < len(points)
    assert [tuple(point) for point in frontier.get_xydata()] == sorted(unbeaten)
    assert set(right.lines[-1].get_ydata()) == {summary["full"]["f1"]}
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["full prefill"]


def test_without_right_answers_f1_is_left_out():
    alone = plots.frontier(json.loads(RESULT.read_text())["summary"], "title", answers=False)
    assert ["KL" in axes.get_ylabel() for axes in alone.figure.axes] == [True]


def test_the_ttft_picture_shows_medians():
    points = [TimedPrompt("full", n, 100 * n + i, 120 * n, n * s) for n in (2, 1) for i, s in enumerate((5, 1, 2))]
    line = plots.ttft_by_tokens(points, "title").figure.axes[0].lines[0]
    assert line.get_xydata().tolist() == [[101, 2], [201, 4]]


def test_the_stages_stand_one_behind_the_other_and_are_milliseconds():
    reports = {
        name: Report((), repair="none", ttft=ttft, total=9.0, stages=stages)
        for name, ttft, stages in (
            ("a", 2.003, {"prefill": 1.5, "wait": 0.5, "render": 0.001, "plan": 0.002}),
            ("b", 0.5, {"prefill": 0.25, "wait": 0.25}),
        )
    }
    axes = plots.stages(reports, "title").figure.axes[0]
    bars = {bars.get_label(): [(bar.get_x(), bar.get_width()) for bar in bars] for bars in axes.containers}
    assert list(bars) == ["prefill", "wait", "all else"]
    assert bars["prefill"] == [(0, 1500), (0, 250)]
    assert bars["wait"] == [(1500, 500), (250, 250)]
    assert np.array(bars["all else"]) == pytest.approx(np.array([(2000, 3), (500, 0)]))
    assert [text.get_text() for text in axes.texts] == ["2003 ms", "500 ms"]
    assert len({bars[0].get_hatch() for bars in axes.containers}) == len(bars)


def test_the_hit_rate_picture_shows_per_cents():
    found = hit_rates(TraceOptions(requests=20, documents=12), (0.2, 0.6))
    for line in plots.hit_rate(found, "title").figure.axes[0].lines:
        method = {"best possible (Belady's bound)": "belady"}.get(line.get_label(), line.get_label())
        assert line.get_xydata() == pytest.approx(np.array([[20, 60], [100 * r for r in found.rates[method]]]).T)


@pytest.mark.parametrize("draw", [picture_of_frontier, picture_of_ttft, picture_of_hit_rate])
def test_lines_differ_without_colour(draw, engine):
    from matplotlib.colors import to_hex

    lines = [line for line in draw(engine).figure.axes[0].lines if line.get_marker() != "None"]
    assert len({line.get_marker() for line in lines}) == len(lines)
    # Some of the colours are too light for white paper by themselves.
    assert {line.get_markeredgecolor() for line in lines} == {"black"}
    assert {to_hex(line.get_color()) for line in lines} <= set(COLOURS.values())


def test_the_deviation_picture_names_the_documents_and_marks_what_was_recomputed(engine):
    axes = picture_of_deviation(engine).figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["doc 0", "doc 1", "doc 2"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["recomputed", "computed"]


def test_the_deviation_picture_shows_keys_or_values_and_marks_the_tokens_below_them(engine):
    measured = engine.deviation("Why?", documents=DOCUMENTS, repair="selective:4")
    for of, figures in (("keys", measured.keys), ("values", measured.values)):
        axes = plots.deviation(measured, "title", of=of).figure.axes[0]
        assert axes.images[0].get_array().data == pytest.approx(figures.clamp_min(0.01).numpy())
    for kind, marks in zip((SpanKind.RECOMPUTED, SpanKind.COMPUTED), axes.collections, strict=True):
        spans = [span for span in measured.spans if span.kind is kind]
        assert [path.get_extents().x0 for path in marks.get_paths()] == [span.start - 0.5 for span in spans]
        assert [path.get_extents().width for path in marks.get_paths()] == [span.tokens for span in spans]
    assert len({marks.get_hatch() for marks in axes.collections}) == 2


def test_stages_too_short_to_be_seen_are_joined(engine):
    picture = picture_of_stages(engine)
    names = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "prefill" in names
    assert names[-1] == "all else"


def test_what_can_not_be_drawn_is_refused_with_the_remedy(tmp_path, monkeypatch):
    for name, words in (("a.pdf", "neither .png nor .svg"), ("nowhere/a.png", "does not exist")):
        with pytest.raises(ValueError, match=words):
            plots.require(tmp_path / name)
    monkeypatch.setattr("kvboost_rag.plots.style.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'kvboost-rag\[plots\]'"):
        plots.hit_rate(hit_rates(TraceOptions(requests=2, documents=9), (0.5,)), "title")


def test_pictures_leave_the_callers_matplotlib_alone(engine):
    import matplotlib

    before = dict(matplotlib.rcParams)
    picture_of_hit_rate(engine)
    assert dict(matplotlib.rcParams) == before


# What is drawn -------------------------------------------------------------------------------------------------------


def test_prompts_are_timed_for_every_method_and_length(engine):
    timed = time_prompts(engine, "Why?", DOCUMENTS, (1, 2), ("full", "prefix-cache", "none"), repeats=1)
    assert [(p.method, p.documents) for p in timed] == [
        (method, count) for count in (1, 2) for method in ("full", "prefix-cache", "none")
    ]
    assert all(p.seconds > 0 and p.prompt_tokens > p.document_tokens > 0 for p in timed)
    few = {"counts": (1, 2), "repeats": 2}
    for wrong in ({"counts": ()}, {"counts": (0,)}, {"counts": (4,)}, few, {"counts": (1,), "repeats": 0}):
        with pytest.raises(ValueError, match="at least"):
            time_prompts(engine, "Why?", DOCUMENTS, **wrong)


def test_hit_rates_grow_with_the_budget_and_stay_under_the_bound():
    found = hit_rates(TraceOptions(requests=60, documents=20), (0.1, 0.5, 1.0), ("lru", "importance"))
    assert set(found.rates) == {"lru", "importance", "belady"}
    for method in ("lru", "importance"):
        assert list(found.rates[method]) == sorted(found.rates[method])
        assert all(rate <= best for rate, best in zip(found.rates[method], found.rates["belady"], strict=True))
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        hit_rates(TraceOptions(), (1.5,))
