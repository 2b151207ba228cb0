import numpy as np
import pytest
import torch
from nemo_rl_cpp._native import C
from reference import optimizer_state

SETTINGS = dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
U8, BF16, F32 = torch.uint8, torch.bfloat16, torch.float32


def gradient(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_eight_bit_adamw_moments_are_rounded_to_a_neighbour_of_the_exact_value():
    n = 200_000
    g = gradient(n, 0) * 10.0 ** (gradient(n, 1) * 2 - 4)
    g[:100] = 0
    w, m, v = torch.zeros(n), torch.zeros(n, dtype=U8), torch.zeros(n, dtype=U8)
    C.adamw_step(w, g, m, v, None, **SETTINGS, step=1)
    assert not m[:100].any() and not v[:100].any()
    exact = 1e-3 * g.double().numpy() ** 2
    got_m, got_v = optimizer_state.moments(m.numpy(), v.numpy())
    below, above = optimizer_state.neighbours(optimizer_state.squares(), exact)
    close = 1e-5 * exact
    assert (np.minimum(abs(got_v - below), abs(got_v - above)) <= close).all()
    root = np.sqrt(got_v)
    told = root > 0  # the others are of gradients below eps
    assert (abs(g[~told]) < 1e-7).all()
    ratio, exact = abs(got_m[told]) / root[told], np.minimum(0.1 * abs(g.double().numpy()[told]) / root[told], 7.74)
    below, above = optimizer_state.neighbours(optimizer_state.ratios(), exact)
    assert (np.minimum(abs(ratio - below), abs(ratio - above)) <= 1e-4 * ratio + 1e-6).all()
    assert (np.sign(got_m[got_m != 0]) == np.sign(g.numpy()[got_m != 0])).all()


def test_eight_bit_adamw_moments_are_unbiased():
    n = 20_000
    w, g, m, v = torch.zeros(n), torch.full((n,), -0.37), torch.zeros(n, dtype=U8), torch.zeros(n, dtype=U8)
    for step in range(1, 2001):
        C.adamw_step(w, g, m, v, None, **(SETTINGS | {"lr": 0.0}), step=step)
    first, second = optimizer_state.moments(m.numpy(), v.numpy())
    assert first.mean() == pytest.approx(-0.37, rel=5e-3)
    assert second.mean() == pytest.approx(0.37**2 * (1 - 0.999**2000), rel=1e-2)


def bowl(first, second):
    """Return the weights after 300 steps on a noisy quadratic, with moments of the dtypes `first` and `second`."""
    random = torch.Generator().manual_seed(0)
    target, noise = torch.randn(4000, generator=random), torch.randn(300, 4000, generator=random)
    w, m, v = torch.zeros(4000), torch.zeros(4000, dtype=first), torch.zeros(4000, dtype=second)
    for step in range(300):
        C.adamw_step(w, (w - target) + 0.3 * noise[step], m, v, None, **SETTINGS, step=step + 1)
    return w


@pytest.mark.parametrize("dtype, bound", [(BF16, 0.02), (U8, 0.04)], ids=["bfloat16", "uint8"])
def test_weights_after_300_adamw_steps_with_8_bit_moments_are_close_to_float32_moments(dtype, bound):
    exact, found = bowl(F32, F32), bowl(dtype, dtype)
    assert 0 < (exact - found).norm() < bound * exact.norm()


def test_eight_bit_adamw_moments_are_bit_identical_for_sharded_and_whole_tensors():
    g = gradient(5000, 2)
    whole, parts = ([torch.ones(5000), torch.zeros(5000, dtype=U8), torch.zeros(5000, dtype=U8)] for _ in range(2))
    for step in (1, 2, 3):
        C.adamw_step(whole[0], g, *whole[1:], None, **SETTINGS, step=step)
        for cut in (slice(0, 1600), slice(1600, 5000)):
            w, m, v = (t[cut] for t in parts)
            C.adamw_step(w, g[cut], m, v, None, **SETTINGS, step=step, first=cut.start)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_adamw_with_only_one_of_the_two_moments_in_8_bits_is_an_error():
    with pytest.raises(ValueError, match="both moments are uint8, or none"):
        C.adamw_step(torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=U8), None, **SETTINGS, step=1)


def test_float32_weights_split_into_bfloat16_and_remainder_match_hand_computed_bits():
    one = 0x3F800000  # 1.0; a bfloat16 ends after 16 bits
    cases = {one: (one, 0), one + 5: (one, 5), one + 0x7FFF: (one, 0x7FFF), one + 0x8000: (one + 0x10000, -0x8000),
             one + 0x18000: (one + 0x20000, -0x8000), one + 0xFFFF: (one + 0x10000, -1)}  # fmt: skip
    bits = torch.tensor(list(cases), dtype=torch.int32)
    compute, remainders = torch.empty(6, dtype=BF16), torch.empty(6, dtype=torch.int16)
    C.split_weights(bits.view(F32), compute, remainders)
    assert torch.equal(compute.float().view(torch.int32), torch.tensor([upper for upper, _ in cases.values()]).int())
    assert remainders.tolist() == [lower for _, lower in cases.values()]


@pytest.mark.parametrize("moments", [F32, BF16, U8], ids=["float32", "bfloat16", "uint8"])
def test_master_weights_stored_as_bfloat16_and_remainders_equal_float32_master_weights(moments):
    n, settings = 40_000, SETTINGS | {"lr": 1e-3, "weight_decay": 0.1}
    w = gradient(n, 3)
    compute, remainders = torch.empty(n, dtype=BF16), torch.empty(n, dtype=torch.int16)
    C.split_weights(w, compute, remainders)
    sides = [[torch.zeros(n, dtype=moments) for _ in range(2)] for _ in range(2)]
    rounded = torch.empty(n, dtype=BF16)
    for step in range(1, 101):
        g = gradient(n, 100 + step)
        C.adamw_step(w, g, *sides[0], rounded, **settings, step=step)
        C.adamw_step(compute, g, *sides[1], None, **settings, step=step, remainders=remainders)
        assert torch.equal(optimizer_state.joined(compute, remainders), w)
        other = compute != rounded  # only where two bfloat16 are equally near
        assert ((w[other].view(torch.int32) & 0xFFFF) == 0x8000).all() and other.sum() < 20
    assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
