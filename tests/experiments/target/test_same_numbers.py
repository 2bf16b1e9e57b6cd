"""Changes of code that `make stale` passes over, because they make no number another."""

from __future__ import annotations

from curvlab.runs.fingerprint import fingerprint, fingerprint_of, reachable_code
from experiments.target.stale import current_fingerprints, same_numbers

MODULE = "curvlab.linalg.identity"


def test_a_result_from_before_such_a_change_is_not_stale_and_any_other_is() -> None:
    roots = ["curvlab.linalg.operator", MODULE]
    code = reachable_code(roots)
    first, second = "0" * 64, "1" * 64
    chain = [
        {"module": MODULE, "before": first, "after": second},
        {"module": MODULE, "before": second, "after": code[MODULE]},
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


def test_every_entry_is_alive_and_says_why() -> None:
    changes = same_numbers()
    for place, change in enumerate(changes):
        assert set(change) == {"module", "date", "before", "after", "why", "checked"}
        later = {other["before"] for other in changes[place + 1 :] if other["module"] == change["module"]}
        today = reachable_code([change["module"]])[change["module"]]
        assert change["after"] in later | {today}, f"the entry on {change['module']} is dead: delete it"
        assert min(len(str(change[said]).split()) for said in ("why", "checked")) >= 5
