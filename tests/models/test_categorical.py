from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.models.base import WHOLE, ActionStatistics, Truncation
from embodied_rl.models.categorical import (
    about_mean,
    bin_range,
    bins_to_actions,
    cut,
    draw,
    draw_correlated,
    imitation_score,
    median_bins,
    most_likely,
    positions_among_bins,
)

LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 0.5])


def test_bins_are_centres_of_256_equal_parts_of_each_dimensions_range() -> None:
    bins = torch.arange(256)[:, None].expand(-1, 2)
    centres = bins_to_actions(bins, LOW, HIGH)
    assert centres[0].tolist() == pytest.approx([-1 + 1 / 256, 0.25 / 256])
    assert centres[255].tolist() == pytest.approx([1 - 1 / 256, 0.5 - 0.25 / 256])
    assert torch.allclose(positions_among_bins(centres, LOW, HIGH), bins.float(), atol=1e-4)
    beyond = torch.tensor([[-2.0, -1.0], [3.0, 0.6]])
    assert positions_among_bins(beyond, LOW, HIGH).tolist() == [[0.0, 0.0], [255.0, 255.0]]


def test_between_two_bins() -> None:
    assert positions_among_bins(torch.tensor([0.0, 0.25]), LOW, HIGH).tolist() == [127.5, 127.5]


def test_imitation_score_by_hand() -> None:
    def target(place: float, sigma: float) -> torch.Tensor:
        return torch.log_softmax(-0.5 * ((torch.arange(256.0) - place) / sigma) ** 2, -1)

    place = torch.tensor(100.0)
    perfect = imitation_score(target(100.0, 2.0), place, sigma=2.0, l1_weight=1.0)
    assert perfect.item() == pytest.approx(0.0, abs=1e-5)
    # Two Gaussians of equal width: KL = d² / 2σ² = 9/8; the expected action is 3 bins off, 6/256 of half the range.
    off = imitation_score(target(103.0, 2.0), place, sigma=2.0, l1_weight=1.0)
    assert off.item() == pytest.approx(-9 / 8 - 6 / 256, abs=1e-4)
    alone = imitation_score(target(103.0, 2.0), place, sigma=2.0, l1_weight=0.0)
    assert alone.item() == pytest.approx(-9 / 8, abs=1e-4)
    # Uniform: KL = log 256 - H(q), H = log(σ √(2πe)).
    uniform = torch.full((256,), -math.log(256))
    entropy = math.log(2.0 * math.sqrt(2 * math.pi * math.e))
    expected = -(math.log(256) - entropy) - (127.5 - 100) * 2 / 256
    assert imitation_score(uniform, place, sigma=2.0, l1_weight=1.0).item() == pytest.approx(expected, abs=1e-3)


def test_median_by_hand() -> None:
    shares = torch.zeros(4, 256)
    shares[0, [10, 20, 200]] = torch.tensor([0.4, 0.3, 0.3])  # not bin 10, the most likely
    shares[1, [10, 20]] = torch.tensor([0.6, 0.4])
    shares[2, 255] = 1.0
    shares[3] = 1 / 256
    assert median_bins(shares.log()).tolist() == [20, 10, 255, 127]


def test_a_gaussian_about_the_mean_by_hand() -> None:
    shares = torch.zeros(4, 256)
    shares[0, [100, 140]] = torch.tensor([0.75, 0.25])  # mean 110, median 100
    shares[1, 0], shares[2, 255] = 1.0, 1.0
    shares[3, [0, 20]] = torch.tensor([0.8, 0.2])  # mean 4
    found = about_mean(shares.log(), 5.0).log_softmax(-1)
    assert (found[0, 110] - found[0, 115]).item() == pytest.approx(0.5, abs=1e-4)
    assert (found[0, 110] - found[0, 100]).item() == pytest.approx(2.0, abs=1e-4)
    assert median_bins(found).tolist() == [110, 0, 255, 4]
    assert found.exp().sum(-1).tolist() == pytest.approx([1.0] * 4, abs=1e-5)
    at_ends = [found[1, 0], found[2, 255], found[3, 0]]  # 0.1, 0.1 and -0.7 standard deviations inside the bin's edge
    expected = [0.5398, 0.5398, 0.2420]
    assert [end.exp().item() for end in at_ends] == pytest.approx(expected, abs=2e-3), "the end bin has what is beyond"
    assert (found[1, 5] - found[1, 10]).item() == pytest.approx(1.5, abs=1e-4)


@given(place=st.floats(0.0, 255.0), sigma=st.floats(0.05, 200.0))
def test_what_is_played_without_sampling_does_not_depend_on_the_width(place: float, sigma: float) -> None:
    shares, low = torch.zeros(256), int(min(place, 254.0))
    shares[low], shares[low + 1] = low + 1 - place, place - low
    [played] = median_bins(about_mean(shares.log(), sigma).log_softmax(-1)).reshape(1).tolist()
    assert played == pytest.approx(place, abs=0.51)


@given(place=st.floats(0.0, 255.0), sigma=st.floats(0.05, 200.0), bin_number=st.integers(0, 255))
def test_scores_of_a_clipped_gaussian_are_finite(place: float, sigma: float, bin_number: int) -> None:
    logits = (-0.5 * (torch.arange(256.0) - place).square()).requires_grad_()
    drawn = about_mean(logits.log_softmax(-1), sigma).log_softmax(-1)[bin_number]
    assert drawn.isfinite()
    assert torch.autograd.grad(drawn, logits)[0].isfinite().all()


def test_a_gaussian_as_wide_as_a_share_of_the_distribution_by_hand() -> None:
    shares = torch.zeros(2, 256)
    shares[0, [100, 140]] = 0.5  # mean 120, standard deviation 20
    shares[1, 30] = 1.0
    found = about_mean(shares.log(), 3.0, 0.2).log_softmax(-1)
    assert (found[0, 120] - found[0, 125]).item() == pytest.approx(0.5, abs=1e-4), "variance 9 + 4² = 25"
    assert (found[1, 30] - found[1, 33]).item() == pytest.approx(0.5, abs=1e-4), "a sure one is as wide as sigma"


@pytest.mark.parametrize("odds", [0.5, 0.9])
def test_a_share_bounds_the_score_of_an_undecided_hand(odds: float) -> None:
    """The root of a draw's mean squared score, for the log-odds of open and closed. The distribution's own is
    √(odds (1 - odds)); a Gaussian of a width that does not change with the odds has 255 odds (1 - odds) / width."""

    def score(sigma: float, share: float) -> float:
        log_odds = torch.tensor([odds / (1 - odds)]).log().requires_grad_()
        both = torch.cat([torch.zeros(1), torch.full((254,), -torch.inf), log_odds]).log_softmax(0)
        densities = about_mean(both, sigma, share).log_softmax(-1)
        scores = torch.stack([torch.autograd.grad(d, log_odds, retain_graph=True)[0] for d in densities])
        return (densities.detach().exp() @ scores.square()).sqrt().item()

    own = (odds * (1 - odds)) ** 0.5
    assert score(4.0, 0.0) == pytest.approx(255 * own**2 / 4, rel=0.01)
    assert score(4.0, 0.1) < 11 * own


def test_a_far_miss_is_worse_than_a_near_one() -> None:
    sure = torch.full((256, 256), -12.0)
    sure.fill_diagonal_(0.0)
    scores = imitation_score(sure.log_softmax(-1), torch.full((256,), 50.0), sigma=2.0, l1_weight=1.0)
    assert scores.argmax() == 50
    assert (scores[50:].diff() < 0).all()
    assert (scores[:51].diff() > 0).all()


def test_range_of_the_bins() -> None:
    low, high = bin_range(
        ActionStatistics(
            #     spread, gripper, still, at the border
            min=(-0.9, -1.0, 0.0, -1.0),
            max=(0.8, 1.0, 0.0, 1.0),
            mean=(0.0, 0.5, 0.0, 0.0),
            std=(0.2, math.sqrt(0.75), 0.0, 0.5),
            q01=(-0.5, -1.0, 0.0, -0.99),
            q99=(0.3, 1.0, 0.0, 1.0),
        )
    )
    assert low.tolist() == pytest.approx([-0.54, -1.0, -0.01, -1.0])
    assert high.tolist() == pytest.approx([0.34, 1.0, 0.01, 1.0])


def test_a_gripper_that_hardly_ever_opens_keeps_its_range() -> None:
    """Its first percentile is the 99th, too."""
    few = 0.005
    mean = 1 - 2 * few
    low, high = bin_range(
        ActionStatistics(min=(-1.0,), max=(1.0,), mean=(mean,), std=(math.sqrt(1 - mean**2),), q01=(1.0,), q99=(1.0,))
    )
    assert (low.item(), high.item()) == (-1.0, 1.0)


def test_correlated_draws_keep_each_steps_distribution() -> None:
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(20_000, 2, 3, 4)
    for correlation in (0.0, 0.6, 1.0):
        drawn = draw_correlated(shares, correlation, torch.Generator().manual_seed(0))
        for step, dim in ((0, 0), (1, 2)):
            found = torch.bincount(drawn[:, step, dim], minlength=4) / len(drawn)
            assert found.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)


def test_correlated_draws_go_together_over_a_chunk_and_not_over_dimensions() -> None:
    """Of two even choices both are the high one with probability 1/4 + arcsin(ρ) / 2π (Sheppard 1899)."""
    even = torch.tensor([0.5, 0.5]).log().expand(20_000, 2, 2, 2)
    for correlation in (0.0, 0.6, 1.0):
        drawn = draw_correlated(even, correlation, torch.Generator().manual_seed(0)).float()
        together = (drawn[:, 0] * drawn[:, 1]).mean(0)
        assert together.tolist() == pytest.approx([0.25 + math.asin(correlation) / (2 * math.pi)] * 2, abs=0.015)
        assert (drawn[:, 0, 0] * drawn[:, 0, 1]).mean().item() == pytest.approx(0.25, abs=0.015)
    assert torch.equal(drawn[:, 0], drawn[:, 1])


SHARES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])


@pytest.mark.parametrize(
    ("top_p", "top_k", "left"),
    [
        (1.0, None, [0.1, 0.4, 0.05, 0.3, 0.15]),
        (1.0, 2, [0, 4 / 7, 0, 3 / 7, 0]),
        (1.0, 9, [0.1, 0.4, 0.05, 0.3, 0.15]),
        (0.39, None, [0, 1, 0, 0, 0]),
        (0.41, None, [0, 4 / 7, 0, 3 / 7, 0]),
        (0.71, None, [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        (0.56, 2, [0, 1, 0, 0, 0]),  # 0.56 of what top_k leaves, of which the likeliest is 4/7
        (0.58, 2, [0, 4 / 7, 0, 3 / 7, 0]),
    ],
)
def test_what_truncation_leaves_by_hand(top_p: float, top_k: int | None, left: list[float]) -> None:
    found = cut(SHARES.log().expand(3, 2, -1), Truncation(top_p=top_p, top_k=top_k))
    assert found.shape == (3, 2, 5) and found.dtype == torch.float32
    assert found[2, 1].exp().tolist() == pytest.approx(left, abs=1e-6)


def test_nothing_cut_changes_no_bit_and_ties_stay() -> None:
    logits = SHARES.log()
    assert cut(logits, WHOLE) is logits
    even = torch.zeros(4)
    assert most_likely(even, top_p=1.0, top_k=2).tolist() == [0.25] * 4


@pytest.mark.parametrize("correlation", [None, 0.0, 0.8, 1.0])
def test_draws_keep_to_what_is_left_in_its_proportions(correlation: float | None) -> None:
    left = cut(SHARES.log(), Truncation(top_k=3, top_p=0.8)).expand(20_000, 2, 1, 5)  # 8/17, 6/17: together 14/17
    generator = torch.Generator().manual_seed(0)
    drawn = draw(left, generator) if correlation is None else draw_correlated(left, correlation, generator)
    for step in (0, 1):
        found = torch.bincount(drawn[:, step, 0], minlength=5) / len(drawn)
        assert found.tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=0.015)
        assert found[[0, 2, 4]].sum() == 0
