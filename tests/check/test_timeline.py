"""The recorder: spans with their phases, memory by class, and the process's own memory."""

from __future__ import annotations

import pytest

from torpor.check.timeline import OTHER, Recorder, resident_by_class
from torpor.errors import StateError

MIB = 1024 * 1024


def test_phases_follow_one_another_and_end_with_the_rest() -> None:
    recorder = Recorder()
    with recorder.span("sleep", level=1, cycle=2) as span:
        span.phase_s = {"fingerprint": 0.0, "release": 0.0}
    (recorded,) = recorder.finish().spans
    assert (recorded.kind, recorded.level, recorded.cycle) == ("sleep", 1, 2)
    assert [phase.name for phase in recorded.phases] == ["fingerprint", "release", OTHER]
    assert recorded.phases[0].start_s == recorded.start_s
    assert recorded.phases[-1].end_s == recorded.end_s
    for earlier, later in zip(recorded.phases, recorded.phases[1:], strict=False):
        assert earlier.end_s == later.start_s


def test_what_fails_is_not_recorded() -> None:
    recorder = Recorder()
    with pytest.raises(StateError), recorder.span("sleep"):
        raise StateError("no")
    assert recorder.finish().spans == ()


def test_a_transition_changes_memory_in_one_of_its_phases() -> None:
    recorder = Recorder()
    with recorder.span("sleep") as span:
        span.phase_s = {"fingerprint": 0.0, "release": 0.0}
    recorder.mark_transition({"cache": 7}, {"cache": 0}, "release")
    timeline = recorder.finish()
    release = timeline.spans[0].phases[1]
    assert [(point.at_s, dict(point.class_bytes)) for point in timeline.class_points] == [
        (release.start_s, {"cache": 7}),
        (release.end_s, {"cache": 0}),
    ]


def test_a_transition_without_that_phase_changes_memory_over_all_of_it() -> None:
    recorder = Recorder()
    with recorder.span("wake"):
        pass
    recorder.mark_transition({}, {"cache": 7}, "map")
    timeline = recorder.finish()
    (span,) = timeline.spans
    assert [point.at_s for point in timeline.class_points] == [span.start_s, span.end_s]


def test_memory_of_the_process_is_sampled() -> None:
    recorder = Recorder()
    with recorder.sampling():
        held = bytearray(64 * MIB)
    points = recorder.finish().rss_points
    assert points[-1].rss_bytes - points[0].rss_bytes > 60 * MIB
    assert [point.at_s for point in points] == sorted(point.at_s for point in points)
    assert len(held) == 64 * MIB


def test_level_memory_takes_few_points() -> None:
    recorder = Recorder()
    for _ in range(1000):
        recorder._sample()
    assert len(recorder.finish().rss_points) < 20


def test_released_tags_hold_no_bytes() -> None:
    status = {
        "owned_bytes": {"parameter": 5, "buffer": 3, "cache": 2},
        "tags": {"weights": "mapped_invalid", "kv_cache": "released"},
    }
    assert resident_by_class(status) == {"parameter": 5, "buffer": 3, "cache": 0}
