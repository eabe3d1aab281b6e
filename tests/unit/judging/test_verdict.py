"""From outcomes to the verdict: nothing untested is ever green."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.judging import verdict as v
from pytest_gpucluster.judging.verdict import OUTCOMES, Record, Terms, decide
from tests.support.entries import limit

GOOD = Terms(rehearsal=False, level_reached=True)
REHEARSAL = Terms(rehearsal=True, level_reached=True)
TERMS = st.builds(
    Terms,
    rehearsal=st.booleans(),
    level_reached=st.booleans(),
    objections=st.lists(st.text(min_size=1), max_size=2),
    simulated=st.booleans(),
)
SOME = st.lists(st.sampled_from(OUTCOMES), max_size=12)


def records(*outcomes: str) -> list[Record]:
    """One record each."""
    return [Record(criterion=f"c{number}", place=None, outcome=outcome) for number, outcome in enumerate(outcomes)]


@given(SOME, TERMS)
def test_no_sequence_of_outcomes_is_accepted_by_mistake(outcomes: list[str], terms: Terms) -> None:
    """ACCEPTED means: something passed, all else passed or does not apply, full level, no objection, real GPUs."""
    found = decide(records(*outcomes), terms)
    clean = set(outcomes) <= {v.PASSED, v.SKIPPED} and v.PASSED in outcomes
    allowed = clean and terms.level_reached and not terms.rehearsal and not terms.simulated and not terms.objections
    assert (found.word == v.ACCEPTED) == allowed
    assert found.word != v.WITH_WAIVERS


@given(SOME, TERMS, st.lists(st.sampled_from(["messages were not signed", "another"]), unique=True))
def test_a_remark_decides_nothing_and_is_said(outcomes: list[str], terms: Terms, remarks: list[str]) -> None:
    """The word, the counts and the objections are the same; the line ends with the remarks."""
    without, found = decide(records(*outcomes), terms), decide(records(*outcomes), replace(terms, remarks=remarks))
    assert (found.word, found.counts, found.objections) == (without.word, without.counts, without.objections)
    assert found.line == without.line + "".join(f"; {remark}" for remark in remarks)


@given(SOME, TERMS)
def test_a_failure_is_a_rejection_everywhere(outcomes: list[str], terms: Terms) -> None:
    """Also in a rehearsal, and whatever else is wrong."""
    assert decide(records(v.FAILED, *outcomes), terms).word == v.REJECTED


@given(SOME, TERMS)
def test_a_simulated_fleet_is_said_whatever_the_verdict(outcomes: list[str], terms: Terms) -> None:
    """The line says it right behind the word, and no other line does."""
    found = decide(records(*outcomes), terms)
    said = found.line.startswith(f"{found.word}: SIMULATED fleet, no GPU was measured: ")
    assert (said, "SIMULATED" in found.line) == (terms.simulated, terms.simulated)


def test_waivers_accept_no_simulated_fleet() -> None:
    """ACCEPTED WITH WAIVERS is an acceptance too."""
    waived = Record(criterion="c", place=None, outcome=v.FAILED, waiver={"who": "somebody"}, waivable=True)
    assert decide([waived, *records(v.PASSED)], GOOD).word == v.WITH_WAIVERS
    assert decide([waived, *records(v.PASSED)], replace(GOOD, simulated=True)).word == v.REHEARSED


@given(SOME, TERMS)
def test_rehearsals_accept_nothing(outcomes: list[str], terms: Terms) -> None:
    """REHEARSED is for rehearsals and simulated fleets only, and only where everything passed."""
    found = decide(records(*outcomes), terms)
    assert not ((terms.rehearsal or terms.simulated) and found.word == v.ACCEPTED)
    if found.word == v.REHEARSED:
        assert terms.rehearsal or terms.simulated
        assert set(outcomes) <= {v.PASSED, v.SKIPPED}


@given(SOME, TERMS)
def test_whatever_is_not_good_is_said_in_the_line(outcomes: list[str], terms: Terms) -> None:
    """The line counts every outcome; an INCOMPLETE always has its reason: a count, or an objection."""
    found = decide(records(*outcomes), terms)
    assert sum(found.counts.values()) == len(outcomes)
    assert found.line.startswith(found.word.replace("_", " "))
    assert found.word != v.INCOMPLETE or found.objections or set(outcomes) - {v.PASSED, v.SKIPPED}
    for outcome in set(outcomes):
        assert v.count_of(outcome, outcomes.count(outcome)) in found.line


@pytest.mark.parametrize("outcome", [v.ERROR, v.NOISY, v.MISSING, v.NOT_SELECTED])
def test_a_count_is_no_objection_too(outcome: str) -> None:
    """In parentheses stands only what no count says."""
    assert decide(records(v.PASSED, outcome), GOOD).line == f"INCOMPLETE: 1 passed, 1 {v.WORDS[outcome]}"
    assert decide(records(outcome), GOOD).line == f"INCOMPLETE: 1 {v.WORDS[outcome]} (nothing was measured and passed)"
    more = replace(GOOD, level_reached=False, objections=("a debugger",))
    low = "the level is lower than the profile asks for"
    assert decide(records(v.PASSED, outcome), more).line == f"INCOMPLETE: 1 passed, 1 {v.WORDS[outcome]} ({low}; a debugger)"


@pytest.mark.parametrize("outcome", [v.PASSED, v.FAILED, v.ERROR])
def test_why_tests_did_not_run_is_in_the_line(outcome: str) -> None:
    """Once, whatever the verdict; what an absent part took along has its own name elsewhere."""
    ended = [
        Record(criterion=name, place=None, outcome=v.MISSING, reason="not run: the run was interrupted\nmore") for name in "ab"
    ]
    absent = Record(criterion="c", place="node1", outcome=v.MISSING, reason="node1 never joined", blames="node")
    line = decide([*records(outcome), *ended, absent], GOOD).line
    assert "3 missing (not run: the run was interrupted" in line
    assert line.count("interrupted") == 1
    assert "joined" not in line
    other = replace(ended[0], criterion="d", reason="not run: a tool is away")
    assert "(not run: the run was interrupted and 1 more)" in decide([*records(v.PASSED), *ended, other], GOOD).line


@pytest.mark.parametrize(
    ("outcomes", "terms", "word"),
    [
        ([v.PASSED, v.SKIPPED], GOOD, v.ACCEPTED),
        ([v.PASSED], REHEARSAL, v.REHEARSED),
        ([], GOOD, v.INCOMPLETE),
        ([v.SKIPPED], GOOD, v.INCOMPLETE),
        ([v.SKIPPED], REHEARSAL, v.INCOMPLETE),
        ([v.PASSED, v.NOT_SELECTED], GOOD, v.INCOMPLETE),
        ([v.PASSED, v.NOISY], GOOD, v.INCOMPLETE),
        ([v.PASSED, v.MISSING], REHEARSAL, v.INCOMPLETE),
        ([v.PASSED], Terms(rehearsal=False, level_reached=False), v.INCOMPLETE),
        ([v.PASSED], Terms(rehearsal=True, level_reached=False), v.REHEARSED),
        ([v.PASSED], Terms(rehearsal=False, level_reached=True, objections=("more GPUs than expected",)), v.INCOMPLETE),
        ([v.FAILED], Terms(rehearsal=True, level_reached=False), v.REJECTED),
    ],
)
def test_words(outcomes: list[str], terms: Terms, word: str) -> None:
    """One by one."""
    assert decide(records(*outcomes), terms).word == word


@pytest.mark.parametrize("outcome", ["pending", "green", "PASSED", ""])
def test_unknown_outcomes_are_refused(outcome: str) -> None:
    """What never got an outcome cannot slip into a verdict."""
    with pytest.raises(ValueError, match="no such outcome"):
        decide(records(v.PASSED, outcome), GOOD)


def test_changed_limits_are_in_the_line() -> None:
    """A verdict by other limits than the packaged ones says so; many are counted."""
    passed = [Record(criterion="a", place=None, outcome=v.PASSED)]
    few = decide(passed, Terms(rehearsal=False, level_reached=True, changed_limits=("a", "b")))
    many = decide(passed, Terms(rehearsal=False, level_reached=True, changed_limits=tuple("abcde")))
    asked = {
        "changed_limits": ("a",),
        "changed_terms": ("nodes 1 instead of 2 (the profile)", "accept_at quick instead of soak"),
    }
    less = decide(passed, Terms(rehearsal=False, level_reached=True, **asked))
    assert few.line == "ACCEPTED: 1 passed; limits changed: a, b"
    terms = "nodes 1 instead of 2 (the profile), accept_at quick instead of soak"
    assert less.line == f"ACCEPTED: 1 passed; limits changed: a; terms changed: {terms}"
    assert many.line == "ACCEPTED: 1 passed; limits changed: a, b, c and 2 more"


@pytest.mark.parametrize(
    ("rehearsal", "words"),
    [(False, "ACCEPTED: 3 passed, 2 criteria without a limit"), (True, "REHEARSED: 3 passed")],
)
def test_what_has_no_limit_is_counted_in_the_line(rehearsal: bool, words: str) -> None:  # noqa: FBT001 -- a parameter
    """Measured, shown, and judged by no number: once a criterion. In a rehearsal that is the rule."""
    nothing, some = limit("above", 0), limit("above", 700)
    rows = [
        Record(criterion="a", place="node0", outcome=v.PASSED, value=5.0, limit=nothing),
        Record(criterion="a", place="node1", outcome=v.PASSED, value=5.0, limit=nothing),
        Record(criterion="b", place=None, outcome=v.PASSED, value=5.0, limit=nothing),
    ]
    assert decide(rows, Terms(rehearsal=rehearsal, level_reached=True)).line == words
    judged = [replace(row, limit=some) for row in rows]
    assert decide(judged, Terms(rehearsal=False, level_reached=True)).line == "ACCEPTED: 3 passed"


@pytest.mark.parametrize(("number", "words"), [(0, None), (1, "1 advisory miss"), (2, "2 advisory misses")])
def test_advisory_misses_are_counted_in_the_line(number: int, words: str | None) -> None:
    """They pass, and are seen all the same."""
    rows = [replace(record, advisory=index < number) for index, record in enumerate(records(*[v.PASSED] * 3))]
    found = decide(rows, Terms(rehearsal=False, level_reached=True))
    assert found.word == v.ACCEPTED
    assert found.line == f"ACCEPTED: 3 passed{f', {words}' if words else ''}"
