"""Draws of action tokens within top-k and top-p, of each policy that has such tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicyOutput, PolicySpec, Truncation
from embodied_rl.models.registry import build_policy
from embodied_rl.models.smolvla import SmolVlaPolicy
from embodied_rl.models.tiny_vla import TinyVlaPolicy
from embodied_rl.tasks.planning import plan_of
from tests.configs import embodied, small_math
from tests.models.openvla import published
from tests.workers.job import Job, small

SMALL = PolicySpec(
    action_dim=2, num_action_chunks=2, state_dim=3, image_shapes={"agentview": (32, 32)}, values_per_chunk=1
)
CHOICES = PolicySpec(
    action_dim=1, num_action_chunks=1, state_dim=3, image_shapes={}, values_per_chunk=1, action_choices=(7,)
)
MODELS = ("openvla", "openvla_oft", "tiny_vla", "tiny_vla correlated", "mlp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    published.write_checkpoint(directory, l1=True)
    return directory


def observe() -> EnvObs:
    generator = torch.Generator().manual_seed(0)
    return EnvObs(
        env_ids=torch.arange(4),
        images={"agentview": torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=generator)},
        state=torch.randn(4, 3, generator=generator),
        instructions=("push the cube",) * 4,
    )


def make(name: str, folder: Path) -> tuple[Policy, EnvObs]:
    torch.manual_seed(0)
    if name.startswith("openvla"):
        params: dict[str, Any] = {}
        if name == "openvla_oft":
            params = {"cameras": ["agentview"], "action_head": "discrete", "use_proprio": False}
        spec = published.spec(chunks=1 if name == "openvla" else 3, values=1)
        return build_policy(name, spec, params, str(folder)).eval(), published.observe()
    if name == "mlp":
        return build_policy("mlp", CHOICES, {"hidden_size": 16}), observe()
    correlated = {"noise_correlation": 0.7} if "correlated" in name else {}
    policy = build_policy("tiny_vla", SMALL, {"hidden_size": 32, "num_layers": 2, **correlated})
    with torch.no_grad():
        for parameter in policy.parameters():  # fresh weights are nearly uniform
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy, observe()


def act(policy: Policy, obs: EnvObs, *, seed: int = 0, greedy: bool = False) -> PolicyOutput:
    return policy.act(obs, greedy=greedy, temperature=1.6, generator=torch.Generator().manual_seed(seed))


def whole(policy: Policy, output: PolicyOutput) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N,C,A,K] of the whole distributions that the actions were drawn from, by ``evaluate``, and
    the numbers [N,C,A] of what was drawn."""
    evaluation = policy.evaluate(output.replay_inputs, temperature=1.6, with_distribution=True)
    assert evaluation.distribution is not None and output.tokens is not None
    torch.testing.assert_close(evaluation.logprobs, output.logprobs, rtol=0, atol=1e-5)
    first = 31744 if type(policy).__name__.startswith("OpenVla") else 0
    return evaluation.distribution["logits"], output.tokens - first


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("truncation", [Truncation(top_k=3), Truncation(top_p=0.3), Truncation(top_p=0.6, top_k=4)])
@torch.no_grad()
def test_draws_stay_within_and_log_probabilities_are_of_the_whole(
    name: str, truncation: Truncation, folder: Path
) -> None:
    """Against the definition, token by token: what is above a drawn token must leave room for it."""
    policy, obs = make(name, folder)
    beyond = 0
    for truncated in (False, True):
        policy.truncate(truncation if truncated else Truncation())
        for seed in range(3):
            logits, drawn = whole(policy, act(policy, obs, seed=seed))
            shares = logits.double().exp()
            own = shares.gather(-1, drawn[..., None])
            above = shares * (shares > own)
            rank = (shares > own).sum(-1)
            within = torch.ones_like(rank, dtype=torch.bool)
            total = torch.ones_like(own)
            if truncation.top_k is not None:
                within &= rank < truncation.top_k
                total = shares.topk(truncation.top_k).values.sum(-1, keepdim=True)
            within &= (above.sum(-1) / total[..., 0]) < truncation.top_p
            if truncated:
                assert within.all()
            else:
                beyond += int((~within).sum())
    assert beyond, "or there was nothing to cut"


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_likeliest_token_alone_is_greedy_and_greedy_is_not_cut(name: str, folder: Path) -> None:
    policy, obs = make(name, folder)
    greedy = act(policy, obs, greedy=True)
    policy.truncate(Truncation(top_k=1))
    assert torch.equal(act(policy, obs, greedy=True).actions, greedy.actions)
    logits, drawn = whole(policy, act(policy, obs, seed=5))
    assert torch.equal(drawn, logits.argmax(-1))


def test_an_l1_head_refuses(folder: Path) -> None:
    policy = build_policy("openvla_oft", published.spec(chunks=3, values=1), {"cameras": ["agentview"]}, str(folder))
    with pytest.raises(UserError, match="draws no action tokens"):
        policy.truncate(Truncation(top_k=3))
    policy.truncate(Truncation())


@pytest.mark.parametrize("model", ["mlp", "smolvla"])
@pytest.mark.parametrize("key", ["top_k=5", "top_p=0.9"])
def test_policies_without_action_tokens_refuse_before_anything_starts(model: str, key: str, tmp_path: Path) -> None:
    options = ["env=dummy", "model=mlp"]
    if model == "smolvla":
        SmolVlaPolicy.write_tiny(tmp_path)
        options = ["env=libero_spatial", "model=smolvla", f"model.path={tmp_path}"]
    plan_of(embodied(*options))
    with pytest.raises(UserError, match="draws no action tokens"):
        plan_of(embodied(*options, f"algorithm.sampling_params.{key}"))


@pytest.mark.parametrize("key", ["top_k=5", "top_p=0.9"])
def test_completions_have_keys_of_their_own(key: str) -> None:
    with pytest.raises(UserError, match=f"completions have rollout.{key}"):
        small_math(f"algorithm.sampling_params.{key}")


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_both_modes_of_a_run_are_cut_and_the_first_ratio_is_1(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To one token, whose recorded log-probability is that of the whole distribution all the same."""
    seen: list[PolicyOutput] = []
    plain = TinyVlaPolicy.act

    def act(self: TinyVlaPolicy, obs: EnvObs, *, greedy: bool, **options: Any) -> PolicyOutput:
        assert not greedy
        seen.append(plain(self, obs, greedy=greedy, **options))
        return seen[-1]

    monkeypatch.setattr(TinyVlaPolicy, "act", act)
    config = small(
        "algorithm.update_epoch=1",
        "algorithm.n_minibatches=1",
        "algorithm=ppo",  # whose advantages are not 0 where all of a group do the same
        "model=tiny_vla",
        "env.init_params.image_size=32",
        "++model.params.hidden_size=32",
        "++model.params.num_layers=1",
        "algorithm.sampling_params={temperature: 1.3, temperature_eval: 1.3, top_k: 1}",
    )
    with Job(config) as job:
        if mode == "train":
            job.roll()
        else:
            job.evaluate()
        assert seen
        for output in seen:
            evaluation = job.policy.evaluate(output.replay_inputs, temperature=1.3, with_distribution=True)
            assert evaluation.distribution is not None and output.tokens is not None
            assert torch.equal(output.tokens, evaluation.distribution["logits"].argmax(-1))
            assert torch.allclose(output.logprobs, evaluation.logprobs, rtol=0, atol=1e-5)
            assert output.logprobs.max() < -0.1, "not renormalised"
        if mode == "train":
            assert job.update()["ratio"] == pytest.approx(1.0, abs=1e-5)
