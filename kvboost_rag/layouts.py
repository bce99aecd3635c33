"""Layouts that come along, by name; ``kvboost-rag bench --layout`` compares them."""

from __future__ import annotations

from kvboost_rag.prompt import Layout

__all__ = ["CHAT", "COMPLETION", "LAYOUTS", "layout_name"]

# Invented examples teach small models to copy its answer from the texts. They stand before the documents, where
# they are computed once for all prompts. One line break between texts and not two: reuse is nearer to full prefill
# then, at no cost (docs/repair-frontier.md).
_EXAMPLES = """\
Texts:
The lighthouse at Dunmore was built in 1871 by Ann Field. It was painted red in 1902 and is 31 metres high.
The harbour of Dunmore freezes in most winters, so that ships wait at Port Elm until April.

Question: Who built the lighthouse at Dunmore?
Answer: Ann Field

Texts:
The violin maker Paolo Renzi used spruce for the front of his instruments and maple for the back.
The town of Corva has held a fair for musicians every September since 1923.

Question: When did the fair in the town of Corva begin?
Answer: 1923

Question: Did Renzi use maple?
Answer: yes

Texts:
"""

COMPLETION = Layout(
    lead_in=_EXAMPLES, separator="\n", question="\n\nQuestion: {question}\nAnswer:", chat=False
)
"""For plain completion, without chat template; the answer ends at the first line end."""

CHAT = Layout()
"""For models that follow instructions: one user message with documents and question."""

LAYOUTS = {"completion": COMPLETION, "chat": CHAT}


def layout_name(model: str) -> str:
    """Name the layout that the demo asks a model with: the embedded one is too weak to follow instructions."""
    return "completion" if model == "smollm2" else "chat"
