"""Steppers and the loop against closed forms: torch's Normal, Euler, and a Gaussian whose exact velocity is known."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from torch import Tensor

from schemas.errors import NonFinite
from schemas.sampling import (
    AllSteps,
    CpsSampler,
    DanceSdeSampler,
    DdimSampler,
    FlowSdeSampler,
    OdeDpmSampler,
    OdeSampler,
    RandomWindow,
    SamplerConfig,
    StochasticSampler,
)
from stages.models import NoiseSchedule
from stages.sde import transition
from stages.sde.loop import denoise
from stages.sde.moments import Point
from stages.sde.noise import initial_seed, normal, step_seed
from stages.sde.ode import euler

SHAPES = [(6,), (5, 4), (3, 4, 4), (2, 3, 4, 4)]  # 1-D, packed (L, C), picture, video (C, F, H, W)
SDE = FlowSdeSampler(eta=0.7)
Stochastic = FlowSdeSampler | DanceSdeSampler | CpsSampler | DdimSampler


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
    sampler: Stochastic, x: np.ndarray, v: np.ndarray, s: float, s_next: float, s_max: float
) -> tuple[np.ndarray, float]:
    """Mean and full std in float64, each in another form than the code's: by score, by rotation, by variances."""
    eta, x0 = sampler.eta, x - s * v
    noise = (x - (1 - s) * x0) / s  # of x = (1-s) x0 + s noise
    if sampler.kind in ("flow_sde", "dance_sde"):
        g = eta * math.sqrt(s / (1 - (s_max if s >= 1 - 1e-6 else s))) if sampler.kind == "flow_sde" else eta
        drift = v - g**2 / 2 * (-noise / s)
        return x + drift * (s_next - s), g * math.sqrt(s - s_next)
    if sampler.kind == "cps":
        turn = eta * math.pi / 2
        return (1 - s_next) * x0 + s_next * math.cos(turn) * noise, s_next * math.sin(turn)
    # DDIM: rescale to a process that keeps variance, whose cumulative alpha is a = (1-s)^2 / ((1-s)^2 + s^2).
    a, a_next = ((1 - t) ** 2 / ((1 - t) ** 2 + t**2) for t in (s, s_next))
    std = eta * math.sqrt((1 - a_next) / (1 - a) * (1 - a / a_next))
    mean = math.sqrt(a_next) * x0 + math.sqrt(1 - a_next - std**2) * noise
    scale = math.hypot(1 - s_next, s_next)
    return mean * scale, std * scale


STOCHASTIC: list[Stochastic] = [
    FlowSdeSampler(eta=0.7),
    DanceSdeSampler(eta=0.3),
    CpsSampler(eta=0.7),
    CpsSampler(eta=1.0),
    DdimSampler(eta=0.6),
    DdimSampler(eta=1.0),
]
each_stepper = pytest.mark.parametrize("sampler", STOCHASTIC, ids=lambda sampler: f"{sampler.kind}-{sampler.eta}")


@each_stepper
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_an_independent_reference_at_every_sigma(sampler: Stochastic, shape: tuple[int, ...]) -> None:
    x, v, e = _pair(shape)
    sigma, sigma_next = [1.0, 0.9, 0.2], [0.9, 0.7, 0.1]
    taken = transition(sampler, x, v, _point(sigma, sigma_next), noise=e)
    for i in range(3):
        wanted = _reference(sampler, x[i].double().numpy(), v[i].double().numpy(), sigma[i], sigma_next[i], 0.9)
        np.testing.assert_allclose(taken.mean[i].numpy(), wanted[0], rtol=1e-5, atol=1e-5)
        assert float(taken.std.expand(3, *[1] * len(shape))[i]) == pytest.approx(wanted[1], rel=1e-6)
    torch.testing.assert_close(taken.next_latents, taken.mean + taken.std * e)


def test_the_published_flow_grpo_step() -> None:
    """Golden numbers, from the formula by hand: x 0.5, v -0.25, sigma 0.8 to 0.6, eta 0.7, noise 1."""
    x, v, e = torch.full((1, 2), 0.5), torch.full((1, 2), -0.25), torch.ones(1, 2)
    taken = transition(SDE, x, v, _point([0.8], [0.6]), noise=e)
    # g = 0.7 sqrt(0.8/0.2) = 1.4; noise estimate 0.5 - 0.05 = 0.45; drift -0.25 + 1.96/1.6 * 0.45 = 0.30125.
    torch.testing.assert_close(taken.mean, torch.full((1, 2), 0.5 - 0.2 * 0.30125))
    torch.testing.assert_close(taken.std.flatten(), torch.tensor([0.6260990336999411]))
    torch.testing.assert_close(taken.log_prob, torch.tensor([-0.9506919]))


def test_cps_keeps_the_coefficients_of_the_schedule() -> None:
    """With the exact x0 and noise, x' = (1-sigma') x0 + sigma' (a unit normal), whatever eta is."""
    x0, noise, sigma = torch.tensor([[2.0]]), torch.tensor([[1.0]]), 0.8
    for eta in (0.2, 0.7, 1.0):
        taken = transition(
            CpsSampler(eta=eta), (1 - sigma) * x0 + sigma * noise, noise - x0, _point([sigma], [0.5]), noise=noise
        )
        kept = (float(taken.mean) - 0.5 * 2.0) / 1.0  # coefficient of the old noise
        assert math.hypot(kept, float(taken.std)) == pytest.approx(0.5, rel=1e-6)
    assert kept == pytest.approx(0.0, abs=1e-6)


def test_ddim_without_noise_is_euler() -> None:
    x, v, e = _pair((3, 4))
    point = _point([1.0, 0.6, 0.3], [0.9, 0.4, 0.1])
    taken = transition(DdimSampler(eta=1e-6), x, v, point, noise=e)
    torch.testing.assert_close(taken.next_latents, euler(x, v, point.like(x)), rtol=1e-5, atol=1e-5)


@each_stepper
@pytest.mark.parametrize("shape", SHAPES)
def test_log_prob_is_the_mean_of_a_gaussian(sampler: Stochastic, shape: tuple[int, ...]) -> None:
    x, v, e = _pair(shape)
    taken = transition(sampler, x, v, _point([1.0, 0.6, 0.3], [0.9, 0.4, 0.1]), noise=e)
    density = torch.distributions.Normal(taken.mean.double(), taken.std.double()).log_prob(taken.next_latents.double())
    torch.testing.assert_close(taken.log_prob.double(), density.flatten(1).mean(1), rtol=1e-6, atol=1e-6)
    assert taken.log_prob.shape == (3,)
    assert taken.log_prob.dtype == torch.float32


@each_stepper
@pytest.mark.parametrize("storage", [torch.float32, torch.float16])
def test_replay_of_a_stored_state_gives_the_sampled_log_prob_bit_by_bit(
    sampler: Stochastic, storage: torch.dtype
) -> None:
    x, v, e = _pair((3, 4, 4))
    point = _point([0.9, 0.6, 0.3], [0.7, 0.4, 0.1])
    sampled = transition(sampler, x, v, point, noise=e, storage=storage)
    stored = sampled.next_latents.to(storage)
    assert torch.equal(stored.float(), sampled.next_latents)
    replayed = transition(sampler, x, v, point, next_latents=stored)
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
    straight = euler(x, v, point.like(x))
    torch.testing.assert_close(straight, x + v * torch.tensor([-0.1, -0.2, -0.2]).reshape(3, 1, 1, 1))
    errors = [
        float((transition(FlowSdeSampler(eta=eta), x, v, point, noise=e).next_latents - straight).norm())
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


def _of_mixture(schedule: NoiseSchedule) -> Callable[[Tensor, Tensor], Tensor]:
    """Velocity of data that is N(-1, 0.2^2) with weight 0.3 and N(0.8, 0.4^2) with weight 0.7."""
    weights, means, stds = torch.tensor([0.3, 0.7]), torch.tensor([-1.0, 0.8]), torch.tensor([0.2, 0.4])

    def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
        s = timesteps.reshape(-1, 1) / 1000
        centred, variance = x - (1 - s) * means, (1 - s) ** 2 * stds**2 + s**2
        share = torch.softmax(torch.log(weights) - torch.log(variance) / 2 - centred**2 / (2 * variance), 1)
        each = s * centred / variance - (means + (1 - s) * stds**2 * centred / variance)
        return (share * each).sum(1, keepdim=True)

    return velocity


def _drawn(
    sampler: SamplerConfig,
    steps: int,
    number: int = 20_000,
    data: Callable[[NoiseSchedule], Callable[[Tensor, Tensor], Tensor]] | None = None,
) -> Tensor:
    schedule = _schedule(steps, shift=1.0)
    window = tuple(range(steps - 1)) if isinstance(sampler, StochasticSampler) else ()
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(number, 1, generator=generator)
    rollout = denoise(
        _exact(schedule, 0.3, 0.5) if data is None else data(schedule),
        sampler,
        schedule,
        noise,
        lambda step: torch.randn(number, 1, generator=generator),
        window,
    )
    return rollout.latents


@pytest.mark.parametrize(
    "sampler",
    [FlowSdeSampler(eta=0.7), FlowSdeSampler(eta=0.2), DanceSdeSampler(eta=0.3), DdimSampler(eta=1.0), OdeSampler()],
)
def test_marginals_of_a_gaussian_are_those_of_its_data(sampler: SamplerConfig) -> None:
    drawn = _drawn(sampler, 200)
    assert float(drawn.mean()) == pytest.approx(0.3, abs=0.015)  # 4 standard errors
    assert float(drawn.std()) == pytest.approx(0.5, abs=0.025)
    coarse = _drawn(sampler, 10)
    assert abs(float(coarse.std()) - 0.5) > abs(float(drawn.std()) - 0.5)


@pytest.mark.parametrize(
    "sampler", [FlowSdeSampler(eta=0.7), DanceSdeSampler(eta=0.3), DdimSampler(eta=0.5), OdeDpmSampler(), OdeSampler()]
)
def test_marginals_of_a_mixture_are_those_of_its_data(sampler: SamplerConfig) -> None:
    drawn = _drawn(sampler, 200, data=_of_mixture).flatten()
    low = drawn < -0.1  # between the two, where the density is least
    assert float(low.float().mean()) == pytest.approx(0.3 + 0.7 * 0.0122, abs=0.015)
    assert float(drawn.mean()) == pytest.approx(0.7 * 0.8 - 0.3, abs=0.03)
    deep = 0.3 * 0.2**2 + 0.7 * 0.4**2 + 0.3 * (1 + 0.26) ** 2 + 0.7 * (0.8 - 0.26) ** 2
    assert float(drawn.var()) == pytest.approx(deep, rel=0.05)


def test_cps_does_not_keep_the_marginals() -> None:
    """Less spread than the data however many the steps: the variance that its linear steps give, by recursion."""
    variance, turn = 1.0, 0.8 * math.pi / 2
    for i in range(199):
        s, t = 1 - i / 200, 1 - (i + 1) / 200
        gain = (1 - s) * 0.25 / ((1 - s) ** 2 * 0.25 + s**2)  # of x in E[x0 | x]
        pull = (1 - t) * gain + t * math.cos(turn) * (1 - (1 - s) * gain) / s
        variance = pull**2 * variance + (t * math.sin(turn)) ** 2
    drawn = float(_drawn(CpsSampler(eta=0.8), 200).std())
    assert drawn == pytest.approx(math.sqrt(variance), abs=0.01)
    assert drawn == pytest.approx(0.40, abs=0.01)


def test_dpm_is_of_second_order() -> None:
    """The error of a Gaussian's exact flow falls as 1/steps^2, Euler's as 1/steps."""

    def error(sampler: SamplerConfig, steps: int) -> float:
        schedule = _schedule(steps, shift=1.0)
        start = torch.tensor([[1.3]])
        out = denoise(_exact(schedule, 0.3, 0.5), sampler, schedule, start, lambda step: start, ()).latents
        return abs(float(out) - (0.3 + 0.5 * 1.3))  # the flow keeps the quantile

    slopes = {
        sampler.kind: math.log2(error(sampler, 40) / error(sampler, 80)) for sampler in (OdeSampler(), OdeDpmSampler())
    }
    assert slopes["ode"] == pytest.approx(1.0, abs=0.15)
    assert slopes["ode_dpm"] > 1.6
    assert error(OdeDpmSampler(), 10) < error(OdeSampler(), 10) / 3


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_dpm_equals_diffusers_on_a_schedule() -> None:
    theirs = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type="zero"
    )
    theirs.set_timesteps(8)
    sigmas = theirs.sigmas
    assert float(sigmas[-1]) == 0.0
    schedule = NoiseSchedule(sigmas, sigmas[:-1] * 1000)
    latents = start = normal((3, 4), [0, 1])
    ours = denoise(_velocity, OdeDpmSampler(steps=8), schedule, start, lambda step: start, ()).latents
    for timestep, exact in zip(theirs.timesteps, schedule.timesteps, strict=True):
        latents = theirs.step(_velocity(latents, exact.expand(2)), timestep, latents, return_dict=False)[0]
    torch.testing.assert_close(ours, latents, rtol=1e-4, atol=1e-5)


def test_dpm_starts_anew_after_a_stochastic_step() -> None:
    schedule, noise = _schedule(6), normal((3,), [0, 1])
    sampler = FlowSdeSampler(steps=6, outside="ode_dpm")
    rollout = denoise(_velocity, sampler, schedule, noise, _step_noise((3,)), (2,))
    assert rollout.states is not None
    # The steps after the window are those of a rollout that starts there.
    later = NoiseSchedule(schedule.sigmas[3:], schedule.timesteps[3:])
    rest = denoise(_velocity, OdeDpmSampler(steps=3), later, rollout.states[:, 1], _step_noise((3,)), ())
    assert torch.equal(rest.latents, rollout.latents)
    plain = denoise(_velocity, FlowSdeSampler(steps=6), schedule, noise, _step_noise((3,)), (2,))
    assert not torch.equal(plain.latents, rollout.latents)


def test_a_shared_prefix_is_taken_once_and_changes_nothing_else() -> None:
    calls: list[int] = []

    def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
        calls.append(len(x))
        return _velocity(x, timesteps)

    noise = normal((3,), [7, 7])
    apart = FlowSdeSampler(steps=5, shared_noise=True, window=RandomWindow())
    together = apart.model_copy(update={"shared_prefix": True})
    each = denoise(velocity, apart, _schedule(5), noise, _step_noise((3,)), (2,))
    assert calls == [2] * 5
    calls.clear()
    once = denoise(velocity, together, _schedule(5), noise, _step_noise((3,)), (2,))
    assert calls == [1, 1, 2, 2, 2]
    torch.testing.assert_close(once.latents, each.latents)
    assert once.states is not None
    assert torch.equal(once.states[0, 0], once.states[1, 0])
    assert not torch.equal(once.states[0, 1], once.states[1, 1])
    calls.clear()
    first = denoise(velocity, together, _schedule(5), noise, _step_noise((3,)), (0,))
    assert calls == [2] * 5
    assert first.latents.shape == noise.shape


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


@each_stepper
def test_steps_that_have_no_density_are_refused(sampler: Stochastic) -> None:
    x, v, e = _pair((4,), batch=1)
    with pytest.raises(ValueError, match="eta > 0, got 0"):
        transition(sampler.model_construct(eta=0.0), x, v, _point([0.5], [0.4]), noise=e)
    with pytest.raises(ValueError, match="sigma 0"):
        transition(sampler, x, v, _point([0.1], [0.0]), noise=e)


def test_a_transition_wants_noise_or_the_next_state() -> None:
    x, v, e = _pair((4,), batch=1)
    good = _point([0.5], [0.4])
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
