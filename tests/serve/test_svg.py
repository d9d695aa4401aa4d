"""The little SVG that charts are made of."""

from __future__ import annotations

import pytest

from torpor.serve import svg


def test_names_and_values_are_escaped() -> None:
    made = svg.element("rect", svg.element("title", "a &lt; b"), class_='x"y', stroke_width=2.0)
    assert made == '<rect class="x&quot;y" stroke-width="2"><title>a &lt; b</title></rect>'
    assert "<script" not in svg.text("<script>", 0, 0)
    assert "&lt;b&gt;" in svg.rectangle(0, 0, 1, 1, "c", "<b>")


def test_attributes_without_value_are_left_out() -> None:
    assert svg.element("text", "a", x=1.0, class_=None) == '<text x="1">a</text>'


@pytest.mark.parametrize(
    ("least", "step"),
    [(1.0, 1.0), (1.1, 2.0), (2.0, 2.0), (3.0, 5.0), (7.0, 10.0), (0.03, 0.05), (130.0, 200.0)],
)
def test_steps_are_round(least: float, step: float) -> None:
    assert svg.round_step(least) == pytest.approx(step)


def test_a_linear_scale_has_round_ticks_within_it() -> None:
    scale = svg.Linear(0.0, 17.3, 100.0, 0.0)
    assert scale.ticks(5) == [0, 5, 10, 15]
    assert scale(0.0) == 100.0
    assert scale(17.3) == 0.0


def test_a_logarithmic_scale_has_equal_decades() -> None:
    scale = svg.Logarithmic(1e-6, 1.0, 0.0, 60.0)
    assert scale(1e-3) == pytest.approx(30.0)
    assert scale(1e-9) == 0.0
    assert scale(10.0) == 60.0
    assert scale.ticks() == pytest.approx([10.0**power for power in range(-6, 1)])


def test_decades_enclose_the_values() -> None:
    assert svg.decades_around([3e-5, 0.4], 1e-6) == pytest.approx((1e-5, 1.0))
    assert svg.decades_around([0.0], 1e-6) == pytest.approx((1e-6, 1e-5))
