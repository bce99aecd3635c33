"""Pictures: what they show, how they say it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, plots
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


@pytest.mark.parametrize("draw", [picture_of_frontier, picture_of_ttft, picture_of_hit_rate])
def test_lines_differ_without_colour(draw, engine):
    from matplotlib.colors import to_hex

    lines = [line for line in draw(engine).figure.axes[0].lines if line.get_marker() != "None"]
    assert len({line.get_marker() for line in lines}) == len(lines)
    assert {to_hex(line.get_color()) for line in lines} <= set(COLOURS.values())


def test_the_deviation_picture_names_the_documents_and_marks_what_was_recomputed(engine):
    axes = picture_of_deviation(engine).figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["doc 0", "doc 1", "doc 2"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["recomputed", "computed"]


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
