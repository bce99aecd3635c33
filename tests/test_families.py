"""The page of families tells what the checks say; what happens where reuse ends."""

from __future__ import annotations

from pathlib import Path

import families_table
import pytest
import transformers
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import ContextWindowError, Document, KVBoostEngine
from kvboost_rag.model import check_support


def test_the_table_of_families_is_what_the_checks_say():
    if transformers.__version__ != "5.24.0":
        pytest.skip("the table is made with the pinned transformers")
    table = Path(__file__).parent.parent / "docs/families.md"
    assert table.read_text(encoding="utf-8") == families_table.page()


def test_beyond_the_switch_of_longrope_a_prompt_is_computed_whole_and_says_so():
    model, tokenizer = tiny_model("longrope"), tiny_tokenizer()
    document = Document("zebra", "The zebra ran over the plain. It was fast and striped, and it saw a lion there.")
    with KVBoostEngine(model, tokenizer) as engine:
        engine.add_documents([document])
        long = f"{'All the words of this line. ' * 24}\n{document.text}\nWhy?"
        assert len(engine.tokenize(long)) > 512
        ids = tokenizer(long, return_tensors="pt", add_special_tokens=False).input_ids
        expected = model.generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8)[0, ids.shape[1] :].tolist()
        result = engine.generate(long, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(result.token_ids) == expected
        assert "rotates prompts of more than 512 tokens" in result.report.fallback
        assert result.report.reused_share == 0
        # The model is left as it was found: shorter prompts are still exact.
        short = {"documents": ["zebra"], "repair": "none"}
        got = engine.score("Why?", [5, 6], **short)
        assert got.report.reused_share > 0.5
        assert (got.logits - engine.score("Why?", [5, 6], documents=["zebra"], reuse=False).logits).abs().max() < 1e-3
        with pytest.raises(ContextWindowError, match="for reuse is 512"):
            engine.add_documents([Document("long", "word " * 200)])


def test_the_last_length_before_the_switch_is_reused_and_the_first_behind_it_is_not():
    with KVBoostEngine(tiny_model("longrope"), tiny_tokenizer()) as engine:
        prompt = "All the words of this line. " * 18
        room = 512 - len(engine.tokenize(prompt))
        assert 0 < room < 20
        for tokens, reused in ((room, True), (room + 1, False)):
            assert (engine.score(prompt, [7] * tokens).report.fallback == "") is reused


@pytest.mark.parametrize(("family", "limit"), [("longrope", 512), ("dynamic", 1023), ("llama", None)])
def test_where_the_angles_change(family, limit):
    assert check_support(tiny_model(family)).architecture.rotation.limit == limit
