"""What the LlamaIndex tests share: a chat template with tools, and the programs in ``examples``."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from llama_index_modes import MODES, demo_index, observe, synthesizer  # noqa: E402

__all__ = ["EXAMPLES", "MODES", "TOOL_TEMPLATE", "demo_index", "observe", "synthesizer", "with_template"]

# The form that Hermes and Qwen models were trained on, shortened.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall a tool as <tool_call>\n{\"name\": ..., \"arguments\": ...}\n</tool_call>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if style is defined %}<|im_start|>system\nAnswer in the style of {{ style }}.<|im_end|>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(tokenizer, template):
    """A copy of a tokenizer with another chat template."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed
