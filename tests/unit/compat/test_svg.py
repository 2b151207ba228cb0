import math
import xml.etree.ElementTree as ElementTree

import pytest
from nemo_rl_cpp.compat.utils.svg import Series, line_chart, line_frame, nice_ticks, running_mean


def parsed(text):
    return ElementTree.fromstring(text)


def test_ticks_are_round_and_inside():
    assert nice_ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(-0.013, 0.052) == [0.0, 0.02, 0.04]
    assert nice_ticks(5, 5) == [5]
    for low, high in ((1e-7, 3e-7), (-4e9, 1e3), (0.999, 1.001)):
        ticks = nice_ticks(low, high)
        assert 2 <= len(ticks) <= 8 and all(low - 1e-9 * abs(low) <= t <= high + 1e-9 * abs(high) for t in ticks)


def test_running_mean_starts_without_bias_and_passes_over_nan():
    assert running_mean([3.0, 3.0, math.nan, 3.0], 5) == pytest.approx([3.0] * 4)
    assert math.isnan(running_mean([math.nan], 5)[0])
    assert running_mean([1.0, 2.0], 2) == pytest.approx([1.0, 2.5 / 1.5])


def test_a_line_lies_where_its_frame_says():
    series = [Series("a", [1, 3], [0.0, 10.0])]
    frame = line_frame(series, 420, 190, False)
    path = parsed(line_chart(series)).find(".//path").get("d")
    assert path == f"M{frame.px(1):.1f} {frame.py(0):.1f}L{frame.px(3):.1f} {frame.py(10):.1f}"
    assert (
        frame.left == frame.px(1)
        and frame.right == frame.px(3)
        and frame.top < frame.py(10) < frame.py(0) < frame.bottom
    )


@pytest.mark.parametrize("ys", [[], [math.nan], [5.0], [5.0, 5.0], [math.inf, 1.0, math.nan, 2.0], [1e-300, 1e300]])
def test_odd_values_still_give_a_drawing(ys):
    text = line_chart([Series("<a & b>", list(range(len(ys))), ys)], title='t"<')
    root = parsed(text)
    assert ("no values yet" in text) == (not any(map(math.isfinite, ys)))
    assert root.get("aria-label") == 't"<'
    assert "nan" not in text and "inf" not in text


def test_standalone_drawings_carry_style_and_namespace():
    text = line_chart([Series("a", [0, 1], [0, 1]), Series("b", [0], [1])], title="T", standalone=True)
    assert parsed(text).tag == "{http://www.w3.org/2000/svg}svg" and "<style>" in text and ">b</text>" in text
