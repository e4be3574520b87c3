"""A journal loses at most the item in flight, and never mixes configurations."""

import json
import os
import signal
import subprocess
import sys

import pytest

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.journal import Journal

CONFIG = {"model": "m", "max_new_tokens": 160, "versions": ["1", "2"]}


def test_items_are_there_again_under_the_same_configuration(tmp_path):
    path = tmp_path / "runs" / "full.jsonl"
    with Journal(path, CONFIG) as journal:
        journal.add({"id": "a", "text": "naïve\n天", "correct": True})
        journal.add({"id": "b", "correct": False})
    with Journal(path, dict(reversed(CONFIG.items()))) as journal:
        assert journal.finished == {
            "a": {"id": "a", "text": "naïve\n天", "correct": True},
            "b": {"id": "b", "correct": False},
        }
        journal.add({"id": "c"})
    assert list(Journal(path, CONFIG).finished) == ["a", "b", "c"]


def test_every_cut_of_the_file_loses_at_most_the_last_item(tmp_path):
    path = tmp_path / "full.jsonl"
    with Journal(path, CONFIG) as journal:
        for name in "abc":
            journal.add({"id": name, "text": "x" * 10})
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(ends[0], len(content) + 1):
        path.write_bytes(content[:cut])
        with Journal(path, CONFIG) as journal:
            assert list(journal.finished) == list("abc")[: sum(end <= cut for end in ends) - 1]
            journal.add({"id": "next"})
        assert "next" in Journal(path, CONFIG).finished


def test_another_configuration_is_an_error_that_says_what_differs(tmp_path):
    path = tmp_path / "full.jsonl"
    with Journal(path, CONFIG) as journal:
        journal.add({"id": "a"})
    before = path.read_bytes()
    with pytest.raises(EvaluationError, match="max_new_tokens: 160 there, 64 here; new: None there, 1 here"):
        Journal(path, CONFIG | {"max_new_tokens": 64, "new": 1})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["", "{}\n", "[1]\n", '{"config": {}}\nnot json\n{"id": "a"}\n', '{"config": {}}\n{}\n']
)
def test_a_damaged_file_is_an_error_and_stays_as_it_is(tmp_path, content):
    path = tmp_path / "full.jsonl"
    path.write_text(content)
    with pytest.raises(EvaluationError, match="move it away"):
        Journal(path, {})
    assert path.read_text() == content


def test_a_killed_process_leaves_what_it_finished(tmp_path):
    path = tmp_path / "full.jsonl"
    program = (
        "import itertools, sys; from jaxkv.evaluation.journal import Journal\n"
        f"journal = Journal({str(path)!r}, {{}})\n"
        "for i in itertools.count(): journal.add({'id': str(i)}); print(i, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    seen = [int(process.stdout.readline()) for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = Journal(path, {}).finished
    assert len(finished) >= len(seen)
    assert list(finished) == [str(i) for i in range(len(finished))]
    assert all(json.loads(line) for line in path.read_text().splitlines())
