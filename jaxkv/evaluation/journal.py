"""A file of finished items that survives a kill: one JSON line an item, after one line with the configuration."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.figures import write_atomically


class Journal:
    """Finished items of one configuration, by id.

    Opening reads what is there. A last line without its newline is what a kill left of the item in flight: it is cut
    off and that item is not finished. `add` writes an item at once.

    Raises:
        EvaluationError: the file belongs to another configuration (the message says what differs), is damaged, or
            cannot be read or written.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any]):
        self.path = Path(path)
        self.finished: dict[str, dict[str, Any]] = {}
        plain = json.loads(json.dumps(dict(config)))
        if self.path.exists():
            self._read(plain)
        else:
            write_atomically(self.path, json.dumps({"config": plain}) + "\n")
        try:
            self._stream = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise EvaluationError(f"cannot write {self.path}: {error.strerror}; choose another folder") from error

    def _read(self, config: dict[str, Any]) -> None:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise EvaluationError(f"cannot read {self.path}: {error.strerror}; choose another folder") from error
        whole = content.rfind(b"\n") + 1
        entries = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                entry = json.loads(line)
                _ = entry["config" if number == 1 else "id"]
            except (ValueError, KeyError, TypeError) as error:
                raise EvaluationError(f"{self.path} is damaged in line {number}; move it away") from error
            entries.append(entry)
        if not entries:
            raise EvaluationError(f"{self.path} is no journal: its first line is missing; move it away")
        differences = [
            f"{key}: {entries[0]['config'].get(key)!r} there, {config.get(key)!r} here"
            for key in sorted({*entries[0]["config"], *config})
            if entries[0]["config"].get(key) != config.get(key)
        ]
        if differences:
            raise EvaluationError(
                f"{self.path} holds results of another configuration ({'; '.join(differences)}); "
                "choose another folder or move the file away"
            )
        self.finished = {entry["id"]: entry for entry in entries[1:]}
        if whole < len(content):
            os.truncate(self.path, whole)

    def add(self, item: Mapping[str, Any]) -> None:
        """Record a finished item, which has an `id`."""
        line = json.dumps(item, ensure_ascii=False)
        self._stream.write(line + "\n")
        self._stream.flush()
        self.finished[item["id"]] = json.loads(line)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
