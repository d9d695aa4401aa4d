"""The report: one page that stands alone, says what was measured, and escapes what it quotes."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from torpor.check.cycle import CycleOptions, run_cycle
from torpor.check.result import CycleResult
from torpor.check.roundtrip import Failure
from torpor.serve.report import render
from torpor.serve.words import size

VOID = {"meta", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def result(tiny_folder: Path) -> CycleResult:
    return run_cycle(tiny_folder, CycleOptions(cycles=2, max_tokens=4, num_threads=1))


@pytest.fixture(scope="module")
def page(result: CycleResult) -> Page:
    return Page(render(result))


def test_the_page_is_well_formed_and_has_its_charts(page: Page) -> None:
    assert page.counts["html"] == page.counts["h1"] == 1
    classes = " ".join(value for name, value in page.attributes if name == "class").split()
    assert classes.count("wide") == classes.count("narrow") == 4
    assert {"class-parameter", "class-cache", "kind-sleep", "phase-release"} <= set(classes)


def test_the_page_needs_nothing_else(result: CycleResult, page: Page) -> None:
    for name, value in page.attributes:
        assert name not in ("src", "href", "srcset"), (name, value)
    text = render(result)
    assert not re.search(r"https?://|//[a-z]|url\(|@import|\bfetch\(|import\(", text)


def test_the_page_says_what_was_measured(result: CycleResult, page: Page) -> None:
    facts = result.to_dict()
    assert "INTACT" in page.text
    assert size(facts["rss_bytes"]["awake"]) in page.text
    assert "15, 2 times" in page.text
    assert result.rig.torch in page.text
    assert result.rig.processor in page.text


def test_every_phase_is_drawn_and_explained(result: CycleResult, page: Page) -> None:
    names = {phase.name for span in result.timeline.spans for phase in span.phases}
    assert {"fingerprint", "release", "map", "restore", "reload", "verify"} <= names
    for name in names:
        assert f"{name}:" in page.text


def test_the_points_under_the_pointer_are_valid_json(result: CycleResult) -> None:
    match = re.search(r'id="points">(.*?)</script>', render(result))
    assert match is not None
    points = json.loads(match[1])
    assert len(points["rss"]) == len(result.timeline.rss_points)
    assert points["classes"][-1][1] == dict(result.owned_bytes)


def test_what_the_model_says_is_escaped(result: CycleResult) -> None:
    evil = "</script><script>alert(1)</script>&<b>"
    answers = tuple(
        dataclasses.replace(answer, prompt=evil, text=evil) for answer in result.reference
    )
    failure = Failure(level=1, cycle=1, type="X", message=evil, names=())
    changed = dataclasses.replace(result, model=evil, reference=answers, failure=failure)
    text = render(changed)
    assert "<script>alert" not in text
    assert evil in Page(text).text


def test_a_difference_is_the_verdict(result: CycleResult) -> None:
    failure = Failure(level=1, cycle=1, type="VerificationError", message="bytes", names=("w",))
    text = Page(render(dataclasses.replace(result, trips=(), failure=failure))).text
    assert "DIFFERS" in text
    assert "VerificationError: bytes" in text
    assert "INTACT" not in text


def test_shortcomings_are_listed(result: CycleResult) -> None:
    nap = dataclasses.replace(result.trips[0].nap, host_copy_bytes={"memory": 1})
    first = dataclasses.replace(result.trips[0], nap=nap)
    changed = dataclasses.replace(result, trips=(first, *result.trips[1:]))
    text = Page(render(changed)).text
    assert "INTACT, BUT" in text
    assert changed.shortcomings[0] in text


def test_an_empty_run_can_be_rendered(result: CycleResult) -> None:
    timeline = dataclasses.replace(result.timeline, spans=result.timeline.spans[:2])
    Page(render(dataclasses.replace(result, trips=(), timeline=timeline)))
