"""Steppers and the loop against closed forms: torch's Normal, Euler, and a Gaussian whose exact velocity is known."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from schemas.errors import NonFinite
from schemas.sampling import AllSteps, FlowSdeSampler, OdeSampler, RandomWindow
from stages.models import NoiseSchedule
from stages.sde import transition
from stages.sde.loop import denoise
from stages.sde.moments import Point
from stages.sde.noise import initial_seed, normal, step_seed
from stages.sde.ode import ode

SHAPES = [(6,), (5, 4), (3, 4, 4), (2, 3, 4, 4)]  # 1-D, packed (L, C), picture, video (C, F, H, W)
SDE = FlowSdeSampler(eta=0.7)


def _point(sigma: list[float], sigma_next: list[float], sigma_max: float = 0.9) -> Point:
    return Point(torch.tensor(sigma), torch.tensor(sigma_next), torch.full((len(sigma),), sigma_max))


def _pair(shape: tuple[int, ...], batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x, v, e = normal((3, *shape), [seed + i for i in range(batch)]).unbind(1)
    return x, v, e


def _schedule(steps: int, shift: float = 3.0) -> NoiseSchedule:
    sigmas = torch.linspace(1, 0, steps + 1)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    return NoiseSchedule(sigmas, sigmas[:-1] * 1000)


def _reference(
    x: np.ndarray, v: np.ndarray, s: float, s_next: float, s_max: float, eta: float
) -> tuple[np.ndarray, float]:
    """math.md's table in float64, in the score's form: e = x + (1-s) v is the noise, -e/s the score."""
    g = eta * math.sqrt(s / (1 - (s_max if s >= 1 - 1e-6 else s)))
    score = -(x + (1 - s) * v) / s
    drift = v - g**2 / 2 * score
    return x + drift * (s_next - s), g * math.sqrt(s - s_next)


@pytest.mark.parametrize("shape", SHAPES)
def test_flow_sde_equals_an_independent_reference_at_every_sigma(shape: tuple[int, ...]) -> None:
    x, v, e = _pair(shape)
    sigma, sigma_next = [1.0, 0.9, 0.2], [0.9, 0.7, 0.1]
    taken = transition(SDE, x, v, _point(sigma, sigma_next), noise=e)
    for i in range(3):
        wanted = _reference(x[i].double().numpy(), v[i].double().numpy(), sigma[i], sigma_next[i], 0.9, 0.7)
        np.testing.assert_allclose(taken.mean[i].numpy(), wanted[0], rtol=1e-5, atol=1e-5)
        assert float(taken.std[i]) == pytest.approx(wanted[1], rel=1e-6)
    torch.testing.assert_close(taken.next_latents, taken.mean + taken.std * e)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_prob_is_the_mean_of_a_gaussian(shape: tuple[int, ...]) -> None:
    x, v, e = _pair(shape)
    taken = transition(SDE, x, v, _point([1.0, 0.6, 0.3], [0.9, 0.4, 0.1]), noise=e)
    density = torch.distributions.Normal(taken.mean.double(), taken.std.double()).log_prob(taken.next_latents.double())
    torch.testing.assert_close(taken.log_prob.double(), density.flatten(1).mean(1), rtol=1e-6, atol=1e-6)
    assert taken.log_prob.shape == (3,)
    assert taken.log_prob.dtype == torch.float32


@pytest.mark.parametrize("storage", [torch.float32, torch.float16])
def test_replay_of_a_stored_state_gives_the_sampled_log_prob_bit_by_bit(storage: torch.dtype) -> None:
    x, v, e = _pair((3, 4, 4))
    point = _point([0.9, 0.6, 0.3], [0.7, 0.4, 0.1])
    sampled = transition(SDE, x, v, point, noise=e, storage=storage)
    stored = sampled.next_latents.to(storage)
    assert torch.equal(stored.float(), sampled.next_latents)
    replayed = transition(SDE, x, v, point, next_latents=stored)
    assert torch.equal(replayed.log_prob, sampled.log_prob)
    assert torch.equal(replayed.mean, sampled.mean)


def test_one_point_for_all_equals_the_same_point_for_each() -> None:
    x, v, e = _pair((5, 4))
    one = Point(torch.tensor(0.8), torch.tensor(0.6), torch.tensor(0.9))
    each = _point([0.8] * 3, [0.6] * 3)
    assert torch.equal(transition(SDE, x, v, one, noise=e).log_prob, transition(SDE, x, v, each, noise=e).log_prob)


def test_small_eta_tends_to_euler() -> None:
    x, v, e = _pair((3, 4, 4))
    point = _point([1.0, 0.6, 0.3], [0.9, 0.4, 0.1])
    euler = ode(OdeSampler(), x, v, point.like(x)).mean
    torch.testing.assert_close(euler, x + v * torch.tensor([-0.1, -0.2, -0.2]).reshape(3, 1, 1, 1))
    errors = [
        float((transition(FlowSdeSampler(eta=eta), x, v, point, noise=e).next_latents - euler).norm())
        for eta in (1e-1, 1e-2, 1e-3)
    ]
    # The noise, of order eta, leads; the drift is of order eta^2.
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.1)
    assert errors[2] == pytest.approx(errors[1] / 10, rel=0.1)
    assert errors[2] < 1e-2


def test_log_prob_has_the_gradient_of_a_gaussian() -> None:
    x, v, e = _pair((6,), batch=2)
    v.requires_grad_()
    point = _point([0.8, 0.5], [0.6, 0.3])
    with torch.no_grad():
        after = transition(SDE, x, v, point, noise=e).next_latents
    taken = transition(SDE, x, v, point, next_latents=after)
    taken.log_prob.sum().backward()
    sigma, dt = torch.tensor([0.8, 0.5])[:, None], torch.tensor([-0.2, -0.2])[:, None]
    g2 = 0.49 * sigma / (1 - sigma)
    wanted = (e / taken.std) * (1 + g2 / (2 * sigma) * (1 - sigma)) * dt / 6
    assert v.grad is not None
    torch.testing.assert_close(v.grad, wanted.detach(), rtol=1e-4, atol=1e-6)


def _exact(schedule: NoiseSchedule, mean: float, std: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Velocity E[noise - x0 | x] of data N(mean, std^2)."""

    def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
        s = timesteps.reshape(-1, 1) / 1000
        variance = (1 - s) ** 2 * std**2 + s**2
        centred = x - (1 - s) * mean
        return s * centred / variance - (mean + (1 - s) * std**2 * centred / variance)

    return velocity


def _drawn(sampler: FlowSdeSampler | OdeSampler, steps: int, number: int = 20_000) -> Tensor:
    schedule = _schedule(steps, shift=1.0)
    window = tuple(range(steps - 1)) if isinstance(sampler, FlowSdeSampler) else ()
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(number, 1, generator=generator)
    rollout = denoise(
        _exact(schedule, 0.3, 0.5),
        sampler,
        schedule,
        noise,
        lambda step: torch.randn(number, 1, generator=generator),
        window,
    )
    return rollout.latents


@pytest.mark.parametrize("sampler", [FlowSdeSampler(eta=0.7), FlowSdeSampler(eta=0.2), OdeSampler()])
def test_marginals_of_a_gaussian_are_those_of_its_data(sampler: FlowSdeSampler | OdeSampler) -> None:
    drawn = _drawn(sampler, 200)
    assert float(drawn.mean()) == pytest.approx(0.3, abs=0.015)  # 4 standard errors
    assert float(drawn.std()) == pytest.approx(0.5, abs=0.012)
    coarse = _drawn(sampler, 10)
    assert abs(float(coarse.std()) - 0.5) > abs(float(drawn.std()) - 0.5)


def _velocity(x: Tensor, timesteps: Tensor) -> Tensor:
    return torch.tanh(x) * timesteps.reshape((-1,) + (1,) * (x.dim() - 1)) / 1000


def _step_noise(shape: tuple[int, ...]) -> Callable[[int], Tensor]:
    return lambda step: normal(shape, [step_seed(0, 1, "p", i, step) for i in range(2)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [(0, 1, 2, 3), (2, 3), (1,)])
def test_stored_states_replay_the_rollout(
    shape: tuple[int, ...], storage: torch.dtype, window: tuple[int, ...]
) -> None:
    sampler, schedule = FlowSdeSampler(steps=5), _schedule(5)
    noise = normal(shape, [initial_seed(0, 1, "p", i, False) for i in range(2)])
    rollout = denoise(_velocity, sampler, schedule, noise, _step_noise(shape), window, storage)
    assert rollout.states is not None
    assert rollout.log_prob is not None
    assert rollout.states.shape == (2, len(window) + 1, *shape)
    assert rollout.states.dtype == storage
    latents = rollout.states[:, 0].float()
    for k, step in enumerate(window):
        point = Point(schedule.sigmas[step], schedule.sigmas[step + 1], schedule.sigmas[1])
        velocity = _velocity(latents, schedule.timesteps[step].expand(2))
        replayed = transition(sampler, latents, velocity, point, next_latents=rollout.states[:, k + 1])
        assert torch.equal(replayed.log_prob, rollout.log_prob[:, k])
        latents = replayed.next_latents
    for step in range(window[-1] + 1, 5):
        dt = schedule.sigmas[step + 1] - schedule.sigmas[step]
        latents = latents + _velocity(latents, schedule.timesteps[step].expand(2)) * dt
    assert torch.equal(latents, rollout.latents)


def test_ode_calls_the_model_with_the_schedule_and_keeps_no_states() -> None:
    schedule, seen = _schedule(4), []

    def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(timesteps)
        return torch.full_like(x, 2.0)

    noise = normal((3,), [0, 1])
    rollout = denoise(velocity, OdeSampler(steps=4), schedule, noise, _step_noise((3,)), ())
    assert rollout.states is None
    assert rollout.log_prob is None
    torch.testing.assert_close(rollout.latents, noise - 2.0)
    assert torch.equal(torch.stack(seen), schedule.timesteps[:, None].expand(4, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_states_that_are_not_finite_name_step_and_place(bad: float) -> None:
    def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        if float(timesteps[0]) < 900:
            out[1, 0] = bad
        return out

    schedule = _schedule(5)
    step = int((schedule.timesteps < 900).nonzero()[0])
    for sampler, window in [(OdeSampler(steps=5), ()), (FlowSdeSampler(steps=5), (0, 1, 2, 3))]:
        with pytest.raises(NonFinite, match=rf"after step {step} at places \[1\]"):
            denoise(velocity, sampler, schedule, normal((3,), [0, 1]), _step_noise((3,)), window)


def test_a_state_too_large_for_its_storage_is_refused() -> None:
    sampler = FlowSdeSampler(steps=5, states="float16")
    with pytest.raises(NonFinite, match="after step 0"):
        denoise(
            lambda x, t: torch.full_like(x, 1e7),
            sampler,
            _schedule(5),
            normal((3,), [0]),
            lambda step: torch.zeros(1, 3),
            (0,),
            torch.float16,
        )


@pytest.mark.parametrize("window", [(0, 2), (4,), (3, 4), (7,), (-1, 0)])
def test_a_window_with_gaps_or_the_last_step_is_refused(window: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="neighbouring steps"):
        denoise(_velocity, SDE, _schedule(5), normal((3,), [0, 1]), _step_noise((3,)), window)


def test_bad_stochastic_steps_are_refused() -> None:
    x, v, e = _pair((4,), batch=1)
    good = _point([0.5], [0.4])
    with pytest.raises(ValueError, match="eta > 0, got 0"):
        transition(FlowSdeSampler.model_construct(eta=0.0), x, v, good, noise=e)
    with pytest.raises(ValueError, match="sigma 0"):
        transition(SDE, x, v, _point([0.1], [0.0]), noise=e)
    with pytest.raises(ValueError, match="'ode' adds no noise"):
        transition(OdeSampler(), x, v, good, noise=e)
    with pytest.raises(ValueError, match="either noise"):
        transition(SDE, x, v, good)
    with pytest.raises(ValueError, match="either noise"):
        transition(SDE, x, v, good, noise=e, next_latents=x)


def test_a_state_that_is_not_finite_has_a_log_prob_that_is_not_finite() -> None:
    x, v, e = _pair((4,), batch=2)
    x[1, 2] = math.nan
    taken = transition(SDE, x, v, _point([0.5, 0.5], [0.4, 0.4]), next_latents=e)
    assert taken.log_prob.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_belongs_to_the_sample_and_not_to_its_batch(shape: tuple[int, ...]) -> None:
    seeds = [initial_seed(7, 3, "p", i, False) for i in range(4)]
    together = normal(shape, seeds)
    assert torch.equal(together, torch.cat([normal(shape, seeds[:1]), normal(shape, seeds[1:])]))
    assert torch.equal(together[[2, 0]], normal(shape, [seeds[2], seeds[0]]))


def test_every_draw_has_its_own_seed_and_shared_noise_one_a_group() -> None:
    group = [initial_seed(7, 3, "p", i, True) for i in range(4)]
    assert len(set(group)) == 1
    others = [
        initial_seed(7, 3, "p", 0, False),
        initial_seed(7, 3, "p", 1, False),
        initial_seed(7, 3, "q", 0, False),
        initial_seed(7, 4, "p", 0, False),
        initial_seed(8, 3, "p", 0, False),
        initial_seed(7, "fixed", "p", 0, False),
        *(step_seed(7, 3, "p", i, step) for i in range(2) for step in range(3)),
    ]
    assert len({group[0], *others}) == 1 + len(others)
    drawn = normal((20_000,), [0])
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03)
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)


def test_windows_are_one_for_all_and_never_hold_the_last_step() -> None:
    assert AllSteps().steps(5, 0, 0) == (0, 1, 2, 3)
    window = RandomWindow(size=2, range=(0, 4))
    drawn = {window.steps(10, 3, iteration) for iteration in range(60)}
    assert drawn == {(0, 1), (1, 2), (2, 3)}
    assert window.steps(10, 3, 8) == window.steps(10, 3, 8)
