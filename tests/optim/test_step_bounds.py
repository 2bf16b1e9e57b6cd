import math

import pytest

from curvlab.optim import printed_steps_bound, steps_bound


def test_value_by_hand() -> None:
    # 8 · 2 (sqrt(8/2) 8 + 3 · 16) + 2 log(5 / 0.25), at ε = 1/4
    found = steps_bound(0.25, gap=2.0, gradient_norm=5.0, hessian_lipschitz=8.0, sigma=3.0)
    assert found == math.ceil(16 * (2 * 8 + 3 * 16) + 2 * math.log(20))


def test_parts_of_sigma_come_with_their_powers() -> None:
    plain = {"gap": 1.0, "gradient_norm": 1.0, "hessian_lipschitz": 0.0}
    for name, power in {"sigma": 2, "sigma_root": 1.5, "sigma_slope": 1}.items():
        for epsilon in (1e-2, 1e-4):
            found = steps_bound(epsilon, **plain, **{name: 3.0})
            assert found == pytest.approx(24 * epsilon**-power - 2 * math.log(epsilon), abs=1.01)


def test_scaling_the_function_keeps_the_bound_but_not_the_printed_one() -> None:
    settings = {"gap": 2.0, "gradient_norm": 5.0, "hessian_lipschitz": 8.0, "sigma": 3.0}
    for scale in (1e-6, 1e3):
        scaled = {name: scale * value for name, value in settings.items()}
        assert steps_bound(0.01 * scale, **scaled) == pytest.approx(steps_bound(0.01, **settings), abs=1)
    tiny = {name: 1e-6 * value for name, value in {**settings, "sigma": 0.0, "gap": 1e-9}.items()}
    assert printed_steps_bound(1e-7, **tiny) < 0


def test_epsilon_must_be_positive() -> None:
    with pytest.raises(ValueError, match="epsilon must be positive"):
        steps_bound(0.0, gap=1.0, gradient_norm=1.0, hessian_lipschitz=1.0)
