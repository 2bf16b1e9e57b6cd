"""Changes of code that `make stale` passes over, because they make no number another."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from curvlab.lab.runs.fingerprint import fingerprint, fingerprint_of, reachable_code
from curvlab.lab.target import changes
from curvlab.lab.target.discovery import ROOT
from curvlab.lab.target.stale import current_fingerprints, same_numbers

MODULE = "curvlab.linalg.identity"
OTHER = "curvlab.spectrum.density"


def test_a_result_from_before_such_a_change_is_not_stale_and_any_other_is() -> None:
    roots = ["curvlab.linalg.operator", MODULE]
    code = reachable_code(roots)
    first, second = "0" * 64, "1" * 64
    chain = [
        {"modules": {MODULE: {"before": first, "after": second}}},
        {"modules": {MODULE: {"before": second, "after": code[MODULE]}}},
    ]
    found = current_fingerprints(roots, chain)
    assert found == {
        fingerprint(roots),
        fingerprint_of(code | {MODULE: second}),
        fingerprint_of(code | {MODULE: first}),
    }
    assert fingerprint_of(code | {MODULE: "2" * 64}) not in found
    assert current_fingerprints(["curvlab.linalg.operator"], chain[:1]) == {
        fingerprint(["curvlab.linalg.operator"])
    }


def test_a_change_that_adds_or_drops_an_import_is_undone_with_it() -> None:
    roots = ["curvlab.linalg.operator", MODULE]
    code = reachable_code(roots)
    earlier = "0" * 64
    own = {"before": earlier, "after": code[MODULE]}
    adds = {"modules": {MODULE: own | {"adds": ["curvlab.linalg.operator"]}}}
    # From MODULE alone the operator is reached by that import alone.
    assert fingerprint_of({MODULE: earlier}) in current_fingerprints([MODULE], [adds])
    drops = {"modules": {MODULE: own | {"drops": ["curvlab.checkpoint", OTHER]}}}
    # A module that an unchanged one reaches by way of a package, without a change of its own.
    new = {"modules": {}, "new": ["curvlab.linalg.operator"]}
    assert fingerprint_of({MODULE: code[MODULE]}) in current_fingerprints([MODULE], [new])
    then = reachable_code([MODULE, OTHER]) | {MODULE: earlier}
    assert fingerprint_of(then) in current_fingerprints([MODULE], [drops])  # checkpoint is bookkeeping
    # What is reached again by it may have changed, too.
    both = {"modules": drops["modules"] | {OTHER: {"before": "1" * 64, "after": then[OTHER]}}}
    assert fingerprint_of(then | {OTHER: "1" * 64}) in current_fingerprints([MODULE], [both])
    # And so may it have since, when nothing reached it.
    since = {"modules": {OTHER: {"before": "1" * 64, "after": then[OTHER]}}}
    assert fingerprint_of(then | {OTHER: "1" * 64}) in current_fingerprints([MODULE], [drops, since])


def test_changes_since_a_commit_are_entries_to_fill_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    text = ROOT.joinpath("src/curvlab/linalg/identity.py").read_text(encoding="utf-8")
    file = tmp_path / "src/curvlab/linalg/identity.py"
    file.parent.mkdir(parents=True)
    file.write_text("from curvlab.linalg.flatten import flatten\n" + text, encoding="utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "before")
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(changes, "ROOT", tmp_path)
    ((module, of),) = changes.changes_since("HEAD").items()
    assert module == MODULE
    assert of["after"] == reachable_code([MODULE])[MODULE] != of["before"]
    assert of["drops"] == ["curvlab.linalg.flatten"]
    assert changes.print_changes(["HEAD"]) == 0
    assert list(yaml.safe_load(capsys.readouterr().out)[0]["modules"]) == [MODULE]
    assert changes.print_changes(["nowhere"]) == changes.print_changes([]) == 2


def test_every_entry_is_alive_and_says_why() -> None:
    entries = same_numbers()
    for place, entry in enumerate(entries):
        assert {"date", "why", "checked", "modules"} <= set(entry) <= {"date", "why", "checked", "modules", "new"}
        assert min(len(str(entry[said]).split()) for said in ("why", "checked")) >= 5
        for module, of in entry["modules"].items():
            assert {"before", "after"} <= set(of) <= {"before", "after", "adds", "drops"}
            later = {
                other["modules"][module]["before"] for other in entries[place + 1 :] if module in other["modules"]
            }
            today = reachable_code([module])[module]
            assert of["after"] in later | {today}, f"the entry of {entry['date']} on {module} is dead: delete it"
