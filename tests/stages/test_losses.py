"""Losses and regularisers against NumPy references in float64, written from the formulas and not from the code."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from schemas.losses import GrpoLoss, LogitNormalTimes, NftLoss, ScheduleTimes, SftLoss, UniformTimes
from schemas.sampling import FlowSdeSampler
from stages.losses import LOSSES
from stages.losses.grpo import grpo
from stages.losses.kl import kl_mean, kl_mean_over_g, kl_velocity
from stages.losses.nft import nft
from stages.losses.sft import sft
from stages.losses.times import draw
from stages.sde import transition
from stages.sde.moments import Point
from stages.sde.noise import normal

SHAPES = [(6,), (5, 4), (3, 4, 4), (2, 3, 4, 4)]  # 1-D, packed (L, C), picture, video (C, F, H, W)
Floats = NDArray[np.float64]


def _tensors(shape: tuple[int, ...], number: int, batch: int = 4) -> tuple[Tensor, ...]:
    return normal((number, *shape), range(batch)).unbind(1)


def _double(value: Tensor) -> Floats:
    return value.detach().double().numpy()


# --- grpo


def _grpo_reference(log_prob: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(log_prob - old)
    return max(-advantage * ratio, -advantage * min(max(ratio, low), high))


@pytest.mark.parametrize("config", [GrpoLoss(clip=0.1), GrpoLoss(clip=0.1, clip_high=0.3)])
def test_grpo_equals_the_formula_and_counts_what_it_clips(config: GrpoLoss) -> None:
    low, high = 0.9, 1.1 if config.clip_high is None else 1.3
    deltas = [-0.5, -0.05, 0.0, 0.05, 0.2, 0.5]
    pairs = [(d, a) for d in deltas for a in (-2.0, -0.3, 0.0, 1.5)]
    old = torch.full((len(pairs),), -1.25)
    log_prob = old + torch.tensor([d for d, _ in pairs])
    terms = grpo(config, log_prob, old, torch.tensor([a for _, a in pairs]))
    wanted = [
        _grpo_reference(float(x), float(o), a, low, high) for (_, a), x, o in zip(pairs, log_prob, old, strict=True)
    ]
    np.testing.assert_allclose(_double(terms.loss), wanted, rtol=1e-6)
    gone = [(a > 0 and math.exp(d) > high) or (a < 0 and math.exp(d) < low) for d, a in pairs]
    assert terms.stats["clipped"].tolist() == [float(g) for g in gone]
    np.testing.assert_allclose(_double(terms.stats["ratio"]), [math.exp(d) for d, _ in pairs], rtol=1e-6)
    np.testing.assert_allclose(_double(terms.stats["approx_kl"]), [math.expm1(d) - d for d, _ in pairs], atol=1e-6)


def test_grpo_has_no_gradient_where_it_clips_and_minus_a_rho_elsewhere() -> None:
    log_prob = torch.tensor([0.2, 0.2, -0.2, -0.2, 0.05], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    grpo(GrpoLoss(clip=0.1), log_prob, torch.zeros(5), advantages).loss.sum().backward()
    assert log_prob.grad is not None
    wanted = [0.0, math.exp(0.2), -math.exp(-0.2), 0.0, -2 * math.exp(0.05)]
    np.testing.assert_allclose(log_prob.grad.numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_grpo_at_ratio_one_has_the_reinforce_gradient(shape: tuple[int, ...]) -> None:
    state, velocity, noise = _tensors(shape, 3)
    weight = torch.tensor(0.7, requires_grad=True)  # a policy of one parameter
    sampler, point = FlowSdeSampler(), Point(torch.tensor(0.8), torch.tensor(0.6), torch.tensor(0.9))
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0])
    with torch.no_grad():
        sampled = transition(sampler, state, weight * velocity, point, noise=noise)
    replayed = transition(sampler, state, weight * velocity, point, next_latents=sampled.next_latents)
    terms = grpo(GrpoLoss(clip=1e-5), replayed.log_prob, sampled.log_prob, advantages)
    assert torch.equal(terms.stats["ratio"], torch.ones(4))
    assert terms.stats["clipped"].tolist() == [0, 0, 0, 0]
    (ours,) = torch.autograd.grad(terms.loss.sum(), weight, retain_graph=True)
    (reinforce,) = torch.autograd.grad(-(advantages * replayed.log_prob).sum(), weight)
    torch.testing.assert_close(ours, reinforce, rtol=1e-6, atol=0)
    assert float(ours.abs()) > 1e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_grpo_lets_no_bad_number_pass_unseen(bad: float) -> None:
    log_prob = torch.zeros(3, requires_grad=True)
    offset = torch.tensor([0.0, bad, 0.0])
    terms = grpo(GrpoLoss(), log_prob + offset, torch.zeros(3), torch.ones(3))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_prob)
    good = terms.loss.isfinite() & gradient.isfinite()
    assert good.tolist() == [True, False, True]


# --- nft


def _nft_reference(
    v: Floats, v_old: Floats, x_t: Floats, t: float, x0: Floats, advantage: float, beta: float, c: float
) -> float:
    r = min(max(advantage, -c), c) / (2 * c) + 0.5
    distances = []
    for sign in (1, -1):
        predicted = x_t - t * (v_old + sign * beta * (v - v_old))
        distances.append(np.mean((predicted - x0) ** 2) / max(np.mean(np.abs(predicted - x0)), 1e-5))
    return c * (r * distances[0] / beta + (1 - r) * distances[1] / beta)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("beta", "c"), [(0.1, 5.0), (1.0, 2.0)])
def test_nft_equals_the_formula(shape: tuple[int, ...], beta: float, c: float) -> None:
    v, v_old, x_t, x0 = _tensors(shape, 4)
    times, advantages = torch.tensor([0.1, 0.4, 0.7, 0.95]), torch.tensor([-7.0, -1.0, 0.0, 3.0])
    terms = nft(NftLoss(beta=beta, advantage_clip=c), v, v_old, x_t, times, x0, advantages)
    a, b, x, clean = (_double(value) for value in (v, v_old, x_t, x0))
    wanted = [
        _nft_reference(a[i], b[i], x[i], float(times[i]), clean[i], float(advantages[i]), beta, c) for i in range(4)
    ]
    np.testing.assert_allclose(_double(terms.loss), wanted, rtol=1e-5)
    distance = ((v - v_old).double() ** 2).flatten(1).mean(1)
    torch.testing.assert_close(terms.stats["old_distance"].double(), distance, rtol=1e-5, atol=0)


def test_nft_weights_are_constants_and_never_below_1e_5() -> None:
    v, noise, x0 = _tensors((3, 4, 4), 3)
    times = torch.tensor([0.2, 0.5, 0.8, 0.9])
    t = times.reshape(4, 1, 1, 1)
    x_t = (1 - t) * x0 + t * noise
    v_old, config = noise - x0, NftLoss(beta=0.5)
    v = (v_old + v).requires_grad_()
    advantages = torch.tensor([5.0, -5.0, 1.0, 0.0])
    terms = nft(config, v, v_old, x_t, times, x0, advantages)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), v)
    # With v_old exact, x0+- - x0 = -+ t beta (v - v_old), so both weights are the mean of its absolute value.
    step = t * config.beta * (v.detach() - v_old)
    weight = step.abs().flatten(1).mean(1).reshape(4, 1, 1, 1)
    wanted = config.advantage_clip / config.beta * 2 * step * t * config.beta / 48 / weight
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)
    still = nft(config, v_old, v_old, x_t, times, x0, advantages)
    assert float(still.loss.abs().max()) < 1e-6


def test_nft_has_its_optimum_where_the_paper_says() -> None:
    """v - v_old = (2r - 1)(v* - v_old)/beta for equal weights: the gradient of the unweighted pair vanishes there."""
    beta, c, advantage = 0.5, 5.0, 3.0
    r = advantage / (2 * c) + 0.5
    x0, noise, v_old = _tensors((6,), 3, batch=1)
    target, times = noise - x0, torch.tensor([0.4])
    x_t = 0.6 * x0 + 0.4 * noise
    v = v_old + (2 * r - 1) * (target - v_old) / beta
    v.requires_grad_()
    pair = [((x_t - 0.4 * (v_old + s * beta * (v - v_old)) - x0) ** 2).mean() for s in (1, -1)]
    (gradient,) = torch.autograd.grad(r * pair[0] + (1 - r) * pair[1], v)
    assert float(gradient.abs().max()) < 1e-6
    # Our loss divides each of the two by a constant: its gradient is the same two pulls, so weighted.
    terms = nft(NftLoss(beta=beta, advantage_clip=c), v, v_old, x_t, times, x0, torch.tensor([advantage]))
    (ours,) = torch.autograd.grad(terms.loss.sum(), v, retain_graph=True)
    predicted = [x_t - 0.4 * (v_old + s * beta * (v - v_old)) for s in (1, -1)]
    weights = [(p - x0).abs().mean().detach() for p in predicted]
    weighted = c / beta * (r * ((predicted[0] - x0) ** 2).mean() / weights[0])
    weighted = weighted + c / beta * ((1 - r) * ((predicted[1] - x0) ** 2).mean() / weights[1])
    (wanted,) = torch.autograd.grad(weighted, v)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)


def test_nft_pulls_towards_good_samples_and_away_from_bad_ones() -> None:
    x0, noise, v_old = _tensors((6,), 3)
    times = torch.full((4,), 0.5)
    x_t = 0.5 * x0 + 0.5 * noise
    v = v_old.clone().requires_grad_()
    pulls = []
    for advantage in (5.0, -5.0, 0.0):
        terms = nft(NftLoss(), v, v_old, x_t, times, x0, torch.full((4,), advantage))
        (gradient,) = torch.autograd.grad(terms.loss.sum(), v)
        pulls.append((-gradient * (noise - x0 - v_old)).flatten(1).sum(1))
    assert bool((pulls[0] > 0).all())
    assert bool((pulls[1] < 0).all())
    assert float(pulls[2].abs().max()) < 1e-4 * float(pulls[0].max())


# --- sft and regularisers


@pytest.mark.parametrize("shape", SHAPES)
def test_sft_equals_the_formula(shape: tuple[int, ...]) -> None:
    v, noise, x0 = _tensors(shape, 3)
    wanted = [np.mean((_double(v[i]) - (_double(noise[i]) - _double(x0[i]))) ** 2) for i in range(4)]
    np.testing.assert_allclose(_double(sft(SftLoss(), v, noise, x0).loss), wanted, rtol=1e-6)
    assert float(sft(SftLoss(), noise - x0, noise, x0).loss.max()) == 0.0


@pytest.mark.parametrize("shape", SHAPES)
def test_regularisers_equal_their_formulas(shape: tuple[int, ...]) -> None:
    state, v, v_ref, noise = _tensors(shape, 4)
    sigma, sigma_next = torch.tensor([0.9, 0.8, 0.5, 0.3]), torch.tensor([0.8, 0.5, 0.3, 0.1])
    point, sampler = Point(sigma, sigma_next, torch.full((4,), 0.9)), FlowSdeSampler(eta=0.7)
    ours = transition(sampler, state, v, point, noise=noise)
    theirs = transition(sampler, state, v_ref, point, noise=noise)
    over_velocity = np.array([np.mean((_double(v[i]) - _double(v_ref[i])) ** 2) for i in range(4)])
    np.testing.assert_allclose(_double(kl_velocity(v, v_ref)), over_velocity, rtol=1e-6)
    s, dt = _double(sigma), _double(sigma_next) - _double(sigma)
    g2 = 0.49 * s / (1 - s)
    # mu is linear in v, so its difference follows from the velocities' alone.
    over_mean = ((1 + g2 * (1 - s) / (2 * s)) * dt) ** 2 * over_velocity
    np.testing.assert_allclose(
        _double(kl_mean(ours.mean, theirs.mean, ours.std)), over_mean / (2 * g2 * -dt), rtol=1e-4
    )
    published = kl_mean_over_g(ours.mean, theirs.mean, ours.std, point)
    np.testing.assert_allclose(_double(published), over_mean / (2 * g2), rtol=1e-4)


def test_kl_of_means_is_the_kl_of_the_two_steps() -> None:
    mean, reference = _tensors((6,), 2)
    std = torch.tensor([0.3, 0.5, 1.0, 2.0]).reshape(4, 1)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std.expand(4, 6)), torch.distributions.Normal(reference, std.expand(4, 6))
    )
    torch.testing.assert_close(kl_mean(mean, reference, std), exact.mean(1))


# --- times


def test_times_and_noise_belong_to_the_seed_and_not_to_the_batch() -> None:
    for config in (UniformTimes(), LogitNormalTimes(), ScheduleTimes(steps=3)):
        sigmas = torch.tensor([1.0, 0.75, 0.5, 0.0])
        times, noise = draw(config, (2, 3), [4, 5, 6], sigmas)
        alone = [draw(config, (2, 3), [seed], sigmas) for seed in (4, 5, 6)]
        assert torch.equal(times, torch.cat([t for t, _ in alone]))
        assert torch.equal(noise, torch.cat([n for _, n in alone]))
        assert times.dtype == noise.dtype == torch.float32


def test_times_follow_their_distributions() -> None:
    seeds, sigmas = range(2000), torch.tensor([1.0, 0.75, 0.5, 0.0])
    uniform, _ = draw(UniformTimes(range=(0.2, 0.6)), (1,), seeds, sigmas)
    assert 0.2 <= float(uniform.min()) < 0.21
    assert 0.59 < float(uniform.max()) <= 0.6
    assert float(uniform.mean()) == pytest.approx(0.4, abs=0.01)
    logits = torch.logit(draw(LogitNormalTimes(mean=0.5, std=0.8), (1,), seeds, sigmas)[0])
    assert float(logits.mean()) == pytest.approx(0.5, abs=0.07)
    assert float(logits.std()) == pytest.approx(0.8, abs=0.05)
    scheduled, _ = draw(ScheduleTimes(steps=3), (1,), seeds, sigmas)
    assert {float(t) for t in scheduled} == {1.0, 0.75, 0.5}
    assert [float((scheduled == t).float().mean()) for t in (1.0, 0.75, 0.5)] == pytest.approx([1 / 3] * 3, abs=0.04)


def test_times_of_another_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match="sigmas of 10 steps, got 3"):
        draw(ScheduleTimes(steps=10), (1,), [0], torch.tensor([1.0, 0.75, 0.5, 0.0]))


def test_every_loss_of_the_schemas_has_its_function() -> None:
    assert set(LOSSES) == {config.model_fields["kind"].default for config in (GrpoLoss, NftLoss, SftLoss)}
