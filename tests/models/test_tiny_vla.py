from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.categorical import median_bins
from embodied_rl.models.tiny_vla import TinyVlaParams, TinyVlaPolicy, _Block

SPEC = PolicySpec(
    action_dim=2, num_action_chunks=2, state_dim=3, image_shapes={"agentview": (32, 32)}, values_per_chunk=1
)


def policy(seed: int = 0, **params: Any) -> TinyVlaPolicy:
    torch.manual_seed(seed)
    return TinyVlaPolicy(SPEC, TinyVlaParams(**{"hidden_size": 32, "num_layers": 2, "max_words": 8, **params}))


def observe(n: int, *texts: str) -> EnvObs:
    generator = torch.Generator().manual_seed(0)
    return EnvObs(
        env_ids=torch.arange(n),
        images={"agentview": torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=generator)},
        state=torch.randn(n, 3, generator=generator),
        instructions=tuple(texts[i % len(texts)] for i in range(n)),
    )


def distribution(model: TinyVlaPolicy, obs: EnvObs) -> torch.Tensor:
    return model._log_probabilities(model._encode(model._inputs(obs)), 1.0)


def test_replay_inputs_are_small_and_exact() -> None:
    obs = observe(3, "push the cube")
    inputs = policy().act(obs, greedy=False, temperature=1.0, generator=torch.Generator().manual_seed(0)).replay_inputs
    assert {name: (tuple(t.shape), t.dtype) for name, t in inputs.items()} == {
        "words": ((3, 8), torch.int64),
        "proprio": ((3, 3), torch.float32),
        "images/agentview": ((3, 32, 32, 3), torch.uint8),
        "bins": ((3, 2, 2), torch.int64),
    }
    assert torch.equal(inputs["images/agentview"], obs.images["agentview"])


@pytest.mark.parametrize("what", ["instruction", "word order", "image", "state"])
def test_every_input_matters(what: str) -> None:
    model, obs = policy(), observe(2, "push the cube")
    changed = {
        "instruction": {"instructions": ("pull the cube",) * 2},
        "word order": {"instructions": ("cube push the",) * 2},
        "image": {"images": {"agentview": 255 - obs.images["agentview"]}},
        "state": {"state": obs.state + 1},
    }[what]
    before, after = distribution(model, obs), distribution(model, dataclasses.replace(obs, **changed))
    assert (before - after).abs().max() > 1e-4


def test_a_fresh_value_head_says_0() -> None:
    """Values that are not learned yet add nothing to the advantages."""
    model, obs = policy(), observe(2, "push the cube")
    assert model.values(obs).tolist() == [[0.0], [0.0]]


def test_padding_does_not_matter() -> None:
    """A model with room for more words, and otherwise the same weights, says the same."""
    short, long = policy(max_words=4), policy(max_words=12)
    with torch.no_grad():
        for film in short.cameras["agentview"].films:  # type: ignore[union-attr]
            film.weight.normal_()
    state = short.state_dict()
    state["word_positions"] = torch.cat((state["word_positions"], torch.full((8, 32), 9.0)))
    long.load_state_dict(state)
    obs = observe(3, "push the cube", "stop")
    assert torch.allclose(distribution(short, obs), distribution(long, obs), atol=1e-5)


def test_a_longer_instruction_in_the_batch_does_not_matter() -> None:
    """Words are looked at as far as a batch's longest instruction goes; behind the others' ends there is nothing."""
    model, obs = policy(), observe(2, "stop", "push the red cube to the left")
    alone = EnvObs(
        env_ids=obs.env_ids[:1],
        images={"agentview": obs.images["agentview"][:1]},
        state=obs.state[:1],
        instructions=obs.instructions[:1],
    )
    assert torch.allclose(distribution(model, obs)[:1], distribution(model, alone), atol=1e-5)


def test_attention_without_keys_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, where instructions differ in length."""
    model, obs = policy(num_layers=3), observe(3, "push the cube", "stop")
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for few in (True, False):
        monkeypatch.setattr(_Block, "_few", lambda block, queries, few=few: few)
        model.zero_grad()
        said = distribution(model, obs)
        said[..., :7].sum().backward()
        found.append((said.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_the_grid_goes_through_the_first_convolution_once() -> None:
    """As if each image had its colours in [-1, 1] and two channels of rows and columns."""
    stem: Any = policy().cameras["agentview"]
    images = observe(3, "go").images["agentview"]
    colours = torch.cat((images / 127.5 - 1, stem.grid.expand(3, -1, -1, -1)), -1).permute(0, 3, 1, 2)
    found = []
    for x in (stem.patches(colours), stem._patched(images.permute(0, 3, 1, 2).float())):
        stem.zero_grad()
        (x * torch.arange(x.numel()).reshape(x.shape).cos()).sum().backward()
        found.append((x.detach(), stem.patches.weight.grad, stem.patches.bias.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_millimetres_are_told_apart_in_bfloat16() -> None:
    """Both numbers are 0.5 in bfloat16."""
    model, obs = policy().bfloat16(), observe(2, "go")
    near = torch.tensor([[0.501], [0.5]]).expand(2, 3)
    same = {"agentview": obs.images["agentview"][:1].expand(2, -1, -1, -1)}
    said = distribution(model, dataclasses.replace(obs, state=near, images=same))
    assert (said[0] - said[1]).abs().max() > 0


def test_the_image_position_matters() -> None:
    """A bright square at the left and one at the right are told apart."""
    model, obs = policy(), observe(2, "push the cube")
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    images[0, 12:20, 2:10] = 255
    images[1, 12:20, 22:30] = 255
    said = distribution(model, dataclasses.replace(obs, images={"agentview": images}, state=torch.zeros(2, 3)))
    assert (said[0] - said[1]).abs().max() > 1e-4


def test_greedy_takes_the_median() -> None:
    model, obs = policy(), observe(4, "push the cube")
    decided = model.act(obs, greedy=True, temperature=1.0, generator=None)
    assert torch.equal(decided.replay_inputs["bins"], median_bins(distribution(model, obs)))


@pytest.mark.parametrize("noise_correlation", [0.0, 1.0])
def test_a_spread_draws_about_the_mean(noise_correlation: float) -> None:
    """Actions, medians and ratios are of one Gaussian, however undecided the distribution is; imitation is not."""
    model, plain = policy(spread=4.0, noise_correlation=noise_correlation), policy()
    obs, generator = EnvObs.concatenate([observe(1, "push the cube")] * 2000), torch.Generator().manual_seed(0)
    mean = (distribution(plain, obs).exp() * torch.arange(256.0)).sum(-1)
    decided = model.act(obs, greedy=False, temperature=1.0, generator=generator)
    bins = decided.replay_inputs["bins"].float()
    assert (bins.mean(0) - mean[0]).abs().max() < 0.5
    assert (bins.std(0) - 4.0).abs().max() < 0.3
    evaluated = model.evaluate(decided.replay_inputs, temperature=1.0)
    assert torch.allclose(evaluated.logprobs, decided.logprobs, atol=1e-5)
    assert evaluated.entropy[0, 0, 0].item() == pytest.approx(math.log(4.0 * math.sqrt(2 * math.pi * math.e)), abs=1e-3)
    warm = model.act(obs, greedy=False, temperature=4.0, generator=generator).replay_inputs["bins"].float()
    assert (warm.std(0) - 8.0).abs().max() < 0.6, "a temperature multiplies the variance"
    greedy = model.act(obs, greedy=True, temperature=1.0, generator=None).replay_inputs["bins"]
    assert (greedy[0] - mean[0]).abs().max() <= 0.5
    warm_greedy = model.act(obs, greedy=True, temperature=4.0, generator=None).replay_inputs["bins"]
    assert torch.equal(warm_greedy, greedy), "and leaves the mean alone"
    imitated = plain.demonstration(obs, decided.actions)
    assert torch.equal(
        model.evaluate(imitated, temperature=1.0).logprobs, plain.evaluate(imitated, temperature=1.0).logprobs
    )


@pytest.mark.parametrize("noise_correlation", [0.0, 1.0])
def test_a_spread_is_wider_where_the_policy_is_undecided(noise_correlation: float) -> None:
    """What acts without sampling does not change with it."""
    sure, obs = policy(spread=4.0), EnvObs.concatenate([observe(1, "push the cube")] * 2000)
    wide = policy(spread=4.0, relative_spread=0.2, noise_correlation=noise_correlation)
    bins = torch.arange(256.0)
    mean = (distribution(wide, obs)[0].exp() * bins).sum(-1)
    own = ((distribution(wide, obs)[0].exp() * (bins - mean.unsqueeze(-1)).square()).sum(-1)).sqrt()
    decided = wide.act(obs, greedy=False, temperature=1.0, generator=torch.Generator().manual_seed(0))
    drawn = decided.replay_inputs["bins"].float()
    assert (drawn.std(0) / (16 + (0.2 * own).square()).sqrt() - 1).abs().max() < 0.08
    evaluated = wide.evaluate(decided.replay_inputs, temperature=1.0)
    assert torch.allclose(evaluated.logprobs, decided.logprobs, atol=1e-5)
    actions = [model.act(obs, greedy=True, temperature=1.0, generator=None).actions for model in (sure, wide)]
    assert torch.equal(*actions)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("noise_correlation", [0.0, 1.0])
def test_each_dimension_may_have_its_own_spread(noise_correlation: float, greedy: bool) -> None:
    """Draws and ratios of a dimension are those of a policy with that spread everywhere."""
    obs, spreads = EnvObs.concatenate([observe(1, "push the cube")] * 200), (3.0, 24.0)
    made = [policy(spread=spread, noise_correlation=noise_correlation) for spread in (spreads, *spreads)]
    both, *single = (
        model.act(obs, greedy=greedy, temperature=1.0, generator=torch.Generator().manual_seed(0)) for model in made
    )
    bins = both.replay_inputs["bins"]
    assert torch.equal(bins, torch.stack([each.replay_inputs["bins"][..., i] for i, each in enumerate(single)], -1))
    evaluated = [model.evaluate(both.replay_inputs, temperature=1.0) for model in made]
    for name in ("logprobs", "entropy"):
        found, *expected = (getattr(each, name) for each in evaluated)
        assert torch.equal(found, torch.stack([each[..., i] for i, each in enumerate(expected)], -1))


def test_spreads_are_those_of_the_action() -> None:
    with pytest.raises(UserError, match=r"model\.params\.spread: got 3 numbers, expected one, or 2: one for each dim"):
        policy(spread=(4.0, 4.0, 4.0))


def test_a_share_of_no_spread_is_refused() -> None:
    with pytest.raises(ValueError, match=r"relative_spread widens spread, which is null"):
        policy(relative_spread=0.2)


def test_a_spread_moves_the_mean_towards_what_paid() -> None:
    """A step along the ratio's gradient moves the mean, through the distribution that imitation made."""
    model, obs = policy(spread=4.0), observe(1, "push the cube")
    decided = model.act(obs, greedy=False, temperature=1.0, generator=torch.Generator().manual_seed(0))
    bins = torch.arange(256.0)
    before = (distribution(model, obs).exp() * bins).sum(-1).detach()
    model.evaluate(decided.replay_inputs, temperature=1.0).logprobs[0, 0].sum().backward()
    with torch.no_grad():
        for parameter in model.head_parameters():
            assert parameter.grad is not None
            parameter.add_(1e-4 * parameter.grad)
        after = (distribution(model, obs).exp() * bins).sum(-1)
    tried = decided.replay_inputs["bins"]
    assert ((after - tried).abs() < (before - tried).abs())[0, 0].all()


def test_missing_or_wrong_camera() -> None:
    model, obs = policy(), observe(1, "go")
    with pytest.raises(
        ValueError, match=r"got images \{'front': \[32, 32\]\}, expected 'agentview' of size \[32, 32\]"
    ):
        model.values(dataclasses.replace(obs, images={"front": obs.images["agentview"]}))
    with pytest.raises(ValueError, match=r"'agentview': \[16, 32\]"):
        model.values(dataclasses.replace(obs, images={"agentview": obs.images["agentview"][:, :16]}))


@pytest.mark.timeout(60)
def test_it_learns_what_image_state_and_instruction_ask_for() -> None:
    """The instruction sets the action's sign, the square's place its size, the state its second dimension."""
    model = policy(num_layers=2)
    n = 16
    index = torch.arange(n)
    say, column, level = index % 2, index // 2 % 4, index // 8 % 2
    images = torch.zeros(n, 32, 32, 3, dtype=torch.uint8)
    for i in range(n):
        images[i, 12:20, 8 * int(column[i]) : 8 * int(column[i]) + 8] = 255
    obs = EnvObs(
        env_ids=index,
        images={"agentview": images},
        state=(level.float() * 2 - 1).unsqueeze(1).expand(-1, 3).contiguous(),
        instructions=tuple(("move left", "move right")[int(s)] for s in say),
    )
    first = (say.float() * 2 - 1) * (column.float() + 1) / 5
    actions = torch.stack((first, 0.5 * (level.float() * 2 - 1)), -1).unsqueeze(1).expand(-1, 2, -1)
    inputs = model.demonstration(obs, actions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(400):
        loss = -model(inputs, temperature=1.0).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < 0.05:
            break
    assert losses[0] > 3.0, losses[0]
    assert losses[-1] < 0.1, losses[::20]
    greedy = model.act(obs, greedy=True, temperature=1.0, generator=None)
    assert (greedy.actions - actions).abs().max() <= 1 / 256 + 1e-6
