"""Finished samples of a run that is not finished."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Partial", "write_json"]

logger = logging.getLogger("kvboost_rag.bench")


class Partial:
    """A file of JSON lines beside the output: what was asked for, then one record a sample.

    Parameters
    ----------
    output
        The output of the run; the file is ``OUTPUT.partial.jsonl``.
    """

    def __init__(self, output: Path) -> None:
        self._path = output.with_name(output.name + ".partial.jsonl")

    def read(self, identity: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Read what an interrupted run left.

        Parameters
        ----------
        identity
            What must be the same for the figures to belong together: all of it but ``options.limit``, so that a run
            can be ended early and a finished part looked at.

        Returns
        -------
        tuple[dict[str, Any] | None, list[dict[str, Any]]]
            What :meth:`start` was given besides the identity, None if there is nothing to go on from; and the records.

        Raises
        ------
        ValueError
            If the file is of another run or damaged.
        """
        lines = self._whole_lines()
        if not lines:
            return None, []
        head, *records = [self._parsed(number, line) for number, line in enumerate(lines, start=1)]
        left = head.get("identity")
        if _comparable(left) != _comparable(json.loads(json.dumps(identity))):
            raise ValueError(
                f"{self._path} is of a run with other settings ({self._differing(left, identity)}); delete it, or "
                "choose another --output"
            )
        ids = [record["id"] for record in records]
        if len(ids) > len(set(ids)):
            raise ValueError(f"{self._path} was written by two runs at once; delete it, or choose another --output")
        logger.info("%s holds %d finished samples; going on from there", self._path, len(records))
        return head["measured"], records

    def _whole_lines(self) -> list[str]:
        if not self._path.exists():
            return []
        raw = self._path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            logger.warning("%s ends in the middle of a line; that sample is measured again", self._path)
            os.truncate(self._path, len(whole))
        return whole.decode("utf-8", errors="replace").split("\n")[:-1]

    def _parsed(self, number: int, line: str) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            value = None
        needed = {"identity", "measured"} if number == 1 else {"id", "methods"}
        if not isinstance(value, dict) or not needed <= set(value):
            raise ValueError(f"{self._path} line {number} is damaged; delete the file, or choose another --output")
        return value

    @staticmethod
    def _differing(left: Any, identity: Mapping[str, Any]) -> str:
        if not isinstance(left, dict):
            return "unreadable"
        mine, theirs = _flat(_comparable(json.loads(json.dumps(identity)))), _flat(_comparable(left))
        return ", ".join(sorted(k for k in mine.keys() | theirs.keys() if mine.get(k, ...) != theirs.get(k, ...)))

    def start(self, identity: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
        """Begin the file."""
        self._path.unlink(missing_ok=True)
        self.append({"identity": identity, "measured": measured})

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line and see it on its way to the disk."""
        with self._path.open("a", encoding="utf-8", newline="\n") as file:
            # Escaped to ASCII, so that only line feeds end a line.
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file of a finished run."""
        self._path.unlink(missing_ok=True)


def _comparable(identity: Any) -> Any:
    options = identity.get("options") if isinstance(identity, dict) else None
    if not isinstance(options, dict):
        return identity
    return identity | {"options": {name: value for name, value in options.items() if name != "limit"}}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return out


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON so that the file is either the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
