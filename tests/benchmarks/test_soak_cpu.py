"""The soak: what it tells on the way, and what it keeps of the memory it saw."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from benchmarks.soak_cpu import Soak, thinned

from benchmarks import soak_cpu


@pytest.fixture
def soak() -> Soak:
    return Soak("smollm2", seed=0, threads=1, max_model_len=256)


def test_a_series_is_thinned_evenly_from_end_to_end() -> None:
    points = [(float(number), number) for number in range(1000)]
    for count in (0, 1, 199, 200):
        assert thinned(points[:count]) == points[:count]
    for count in (201, 399, 1000):
        kept = thinned(points[:count])
        assert len(kept) == 200
        assert (kept[0], kept[-1]) == (points[0], points[count - 1])
        gaps = {after[1] - before[1] for before, after in itertools.pairwise(kept)}
        assert min(gaps) >= 1
        assert max(gaps) - min(gaps) <= 1


def test_the_result_holds_the_whole_series(soak: Soak) -> None:
    soak.asleep_rss = [(number / 3, (300 + number % 2) * 10**6) for number in range(1000)]
    soak.status = dict.fromkeys(
        ("num_steps", "num_preemptions", "num_prefix_hit_tokens", "kv_cache_usage"), 0
    )
    soak.verified = True
    result = soak.result()
    series = result["asleep_rss_series"]
    assert len(series["seconds"]) == len(series["MB"]) == 200
    assert (series["seconds"][0], series["seconds"][-1]) == (0.0, 333.0)
    assert set(series["MB"]) == {300.0, 301.0}
    assert result["max_model_len"] == 256
    assert result["ok"]


def test_a_line_of_progress_comes_every_half_minute(
    soak: Soak, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [soak._start_s]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > soak._start_s + 60:
            raise asyncio.CancelledError
        soak.counts = {"sleep 1 keep": 2, "sleep 2 wait": 1, "reload": 7}
        soak.asleep_rss.append((clock[0], 250_000_000))

    monkeypatch.setattr(soak_cpu, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(soak_cpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(soak._tell())
    told = capsys.readouterr()
    assert told.out == ""
    rest = "0 sent, 3 sleeps, 0 wrong, 250.0 MB when last asleep"
    assert told.err.splitlines() == [f"30 s: {rest}", f"60 s: {rest}"]
