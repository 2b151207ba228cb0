import math

from nemo_rl_cpp.report.history import downsample, format_number


def test_numbers_are_short():
    pairs = [
        (0, "0"),
        (1.0, "1"),
        (0.12345678, "0.1235"),
        (2e-5, "2e-5"),
        (12345, "12.3k"),
        (1.5e6, "1.5M"),
        (-3.2e9, "-3.2G"),
        (math.nan, "nan"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (9999, "9999"),
    ]
    assert [format_number(value) for value, _ in pairs] == [text for _, text in pairs]


def test_downsampling_keeps_every_spike_and_both_ends():
    ys = [0.0] * 10_000
    ys[1234], ys[5678] = 9.0, -9.0
    xs, kept = downsample(list(range(10_000)), ys)
    assert len(xs) <= 402 and max(kept) == 9.0 and min(kept) == -9.0 and (xs[0], xs[-1]) == (0, 9999)
    assert xs[kept.index(9.0)] == 1234
    assert downsample([1, 2], [math.nan, 2.0])[0] == [1, 2]
