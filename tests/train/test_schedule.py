"""Learning-rate schedules."""

import math

import pytest

from fast_llm_ssm.train.schedule import ConstantSchedule, CosineSchedule, LinearSchedule, WsdSchedule, schedules


def factors(schedule, steps=10):
    return [schedule.factor(step, steps) for step in range(1, steps + 1)]


def test_warmup_rises_to_the_peak_at_its_last_step():
    for name in schedules:
        options = {"decay_steps": 3} if name == "wsd" else {}
        got = factors(schedules[name](type=name, warmup_steps=4, **options))
        assert got[:4] == [0.25, 0.5, 0.75, 1.0]
        assert max(got) == 1.0 and min(got) > 0


def test_constant():
    assert factors(ConstantSchedule()) == [1.0] * 10


def test_linear():
    assert factors(LinearSchedule(min_ratio=0.0)) == pytest.approx([1 - step / 10 for step in range(1, 11)])
    assert factors(LinearSchedule(min_ratio=0.2, warmup_steps=2))[-1] == pytest.approx(0.2)


def test_cosine():
    got = factors(CosineSchedule(min_ratio=0.1, warmup_steps=2))
    assert got[5] == pytest.approx(0.55)  # half way between the end of the warm-up and the last step
    assert got[-1] == pytest.approx(0.1)
    assert got[3] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_wsd():
    got = factors(WsdSchedule(decay_steps=4, min_ratio=0.0, warmup_steps=1))
    assert got[:6] == [1.0] * 6
    assert got[6:] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_beyond_the_last_step_the_end_value_stays():
    for schedule in (LinearSchedule(), CosineSchedule(), WsdSchedule(decay_steps=2)):
        assert schedule.factor(25, 10) == pytest.approx(0.1)
