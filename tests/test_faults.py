"""The list of faults that ``make faults`` plants is one of this code, so that it says something about its tests."""

from __future__ import annotations

from pathlib import Path

from planted import FAULTS

PACKAGE = Path(__file__).parent.parent / "kvboost_rag"


def test_every_fault_has_one_place_and_leaves_a_module():
    for fault in FAULTS:
        sound = (PACKAGE / fault.file).read_text(encoding="utf-8")
        assert sound.count(fault.old) == 1, fault
        compile(sound.replace(fault.old, fault.new), fault.file, "exec")


def test_no_fault_comes_twice():
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
