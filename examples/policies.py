"""Write the policies that come along from the benchmark results that are kept beside this file."""

import json
from dataclasses import asdict
from pathlib import Path

from kvboost_rag.calibrate import to_policy

ROOT = Path(__file__).parent
# Model family (``config.model_type``) -> where it was measured, and the results; the last that have a method count.
FAMILIES = {
    "llama": ("SmolLM2-135M on HotpotQA", ["hotpotqa_smollm2.json"]),
    "llama, generic": (
        "SmolLM2-135M on HotpotQA, behind the generic texts, at 2,048 document tokens what was measured there",
        ["hotpotqa_smollm2_generic.json", "hotpotqa_smollm2_generic_2048.json"],
    ),
    "qwen2": ("Qwen2.5-Coder-0.5B on HotpotQA", ["hotpotqa_qwen05.json"]),
    "qwen2, generic": (
        "Qwen2.5-Coder-0.5B on HotpotQA, behind the generic texts", ["hotpotqa_qwen05_generic.json"],
    ),
}


def policies() -> dict[str, object]:
    """Collect every family's points; a control is no choice."""
    out: dict[str, object] = {}
    for family, (source, names) in FAMILIES.items():
        summary = {}
        for name in names:
            summary |= json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))["summary"]
        kept = {method: row for method, row in summary.items() if not method.startswith("random")}
        out[family] = {"source": source, "points": [asdict(p) for p in to_policy(kept, source).points]}
    return out


if __name__ == "__main__":
    path = ROOT.parent / "kvboost_rag" / "policies.json"
    path.write_text(json.dumps(policies(), indent=1) + "\n", encoding="utf-8")
    print(f"{path.name} written")
