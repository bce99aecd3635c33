"""The prompt of the demo: laid out so that a very small model answers from the documents."""

from __future__ import annotations

from kvboost_rag.prompt import Layout

__all__ = ["DEMO_DOCUMENTS_A_PROMPT", "DEMO_LAYOUT"]

# What the embedded model answered best with, among those tried; it gets lost in more documents.
DEMO_DOCUMENTS_A_PROMPT = 2

# Two invented examples teach the small model to copy its answer from the texts. They stand before the documents, where
# they are computed once for all prompts.
_EXAMPLES = """\
Texts:

The lighthouse at Dunmore was built in 1871 by Ann Field. It was painted red in 1902 and is 31 metres high.

The harbour of Dunmore freezes in most winters, so that ships wait at Port Elm until April.

Question: Who built the lighthouse at Dunmore?
Answer: Ann Field

Question: Where do ships wait when the harbour is frozen?
Answer: Port Elm

Texts:

The violin maker Paolo Renzi used spruce for the front of his instruments and maple for the back. He sold about forty \
of them in a year.

The town of Corva has held a fair for musicians every September since 1923.

Question: Which wood did Renzi use for the back of his instruments?
Answer: maple

Question: When did the fair in Corva begin?
Answer: 1923

Texts:

"""


DEMO_LAYOUT = Layout(
    lead_in=_EXAMPLES, separator="\n\n", question="\n\nQuestion: {question}\nAnswer:", chat=False
)
"""For plain completion, without chat template; the answer ends at the first line end."""
