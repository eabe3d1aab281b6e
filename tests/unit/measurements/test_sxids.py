"""What was heard of a host's NVSwitches, and how it is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.driver_errors import judge_sxids, judge_sxids_between
from pytest_gpucluster.inventory.error_codes import ACTIONS, error_codes, sxid_of
from pytest_gpucluster.measurements.health import node_sxids, sxids_of
from pytest_gpucluster.protocol.node_events import VARIABLE, NodeEvents, NodeSxid

if TYPE_CHECKING:
    from pytest_gpucluster.judging.finding import Finding


def line(code: int, severity: str | None = "Non-fatal", **changes: Any) -> NodeSxid:
    """Lines on an error of switch 0."""
    fields = {"switch": 0, "pci": "0000:05:00", "link": 4, "is_detail": False, "count": 1, "is_before": False, **changes}
    return NodeSxid(code=code, severity=severity, **fields)


def judged(*lines: NodeSxid) -> Finding:
    """The judgement on a host whose log has these lines."""
    return judge_sxids(sxids_of(NodeEvents(nvml_why="no NVML", log_why=None, sxids=lines)))


@pytest.mark.parametrize("code", [*error_codes("SXid"), 28001])
def test_every_code(code: int) -> None:
    """Each counts with its meaning and advice, but for those that the guide calls harmless; an unknown one counts."""
    found = judged(line(code))
    said = f"NVSwitch 0 (0000:05:00): {sxid_of(code)} (Non-fatal), link 4"
    if sxid_of(code).kind == "harmless":
        assert (found.judged, found.advice, found.evidence) == (0, None, {"harmless": (said,)})
    else:
        assert (found.judged, found.facts, found.advice) == (1, (said,), sxid_of(code).action)


@pytest.mark.parametrize(
    ("code", "severity", "over"),
    [
        (22013, "Fatal", 1),
        (11012, "Fatal", 1),
        (11012, None, 0),
        (15019, "Correctable", 0),
        (15019, None, 1),
        (20034, "Correctable", 1),
    ],
)
def test_the_word_of_the_driver(code: int, severity: str | None, over: int) -> None:
    """A fatal error is never harmless; one that was corrected and is not in the guide is."""
    assert judged(line(code, severity)).judged == over


def test_details_do_not_count_twice() -> None:
    """Three lines tell one error; details alone tell one too, since the log may begin with them."""
    detail = line(20034, None, link=None, is_detail=True, count=2)
    assert judged(line(20034, "Fatal"), detail).judged == 1
    assert judged(detail).judged == 1


def test_many_errors_of_one_code() -> None:
    """They are one fact of each switch, and the worst code gives the advice."""
    other = {"switch": 2, "pci": "0000:07:00"}
    found = judged(
        line(11004), line(20034, "Fatal", link=62, count=2), line(20034, "Fatal", link=9), line(12020, "Fatal", link=1, **other)
    )
    assert found.judged == 5
    assert found.facts == (
        f"NVSwitch 2 (0000:07:00): {sxid_of(12020)} (Fatal), link 1",
        f"NVSwitch 0 (0000:05:00): {sxid_of(20034)} (Fatal), links 9 62, 3 times",
        f"NVSwitch 0 (0000:05:00): {sxid_of(11004)} (Non-fatal), link 4",
    )
    assert found.names == ("NVSwitch 2 (0000:07:00)", "NVSwitch 0 (0000:05:00)")
    assert found.advice == sxid_of(12020).action


def test_before_the_run() -> None:
    """It is shown and not judged."""
    found = judged(line(20034, "Fatal", is_before=True))
    assert (found.judged, len(found.evidence["before the run"])) == (0, 1)


def test_nothing_is_made_up() -> None:
    """A healthy log has nothing; a code that nobody knows has no meaning."""
    assert (judged().judged, judged().evidence, judged().advice) == (0, {}, None)
    assert (sxid_of(99999).kind, sxid_of(99999).action) == ("unknown", ACTIONS["SXid"]["vendor"])


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No listener, one that is gone, or a log that cannot be read: why."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert node_sxids().kernel_log_why == "no listener was started"
    monkeypatch.setenv(VARIABLE, "gpucluster-events-nobody")
    assert "does not answer" in str(node_sxids().kernel_log_why)
    refused = NodeEvents(nvml_why=None, log_why="/dev/kmsg cannot be read: Permission denied")
    assert sxids_of(refused).kernel_log_why == "/dev/kmsg cannot be read: Permission denied"


def test_errors_while_nobody_watched() -> None:
    """Those that the kernel log has more of; a log that lost its begin is not known."""

    def heard(*lines: NodeSxid, log_why: str | None = None) -> Any:
        return sxids_of(NodeEvents(nvml_why="no NVML", log_why=log_why, sxids=lines))

    def old(code: int, count: int) -> NodeSxid:
        return line(code, "Fatal", is_before=True, count=count)

    before = heard(old(20034, 1), line(20034, "Fatal"))
    assert judge_sxids_between(before, heard(old(20034, 2))).judged == 0
    found = judge_sxids_between(before, heard(old(20034, 3), old(12028, 1)))
    assert (found.judged, found.unknown) == (2, {})
    assert judge_sxids_between(before, heard()).unknown
    assert judge_sxids_between(before, heard(old(20034, 2), log_why="no such file")).unknown
