"""Groups that carry no gradient are drawn again until the batch is full (DAPO)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied_rl.contracts import Trajectory
from embodied_rl.launch import run
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.workers.actor import ActorWorker
from tests.configs import tiny_run

WANTED = 8
"""16 envs in groups of 2."""


def config_of(directory: Path, *overrides: str) -> EmbodiedConfig:
    """Goals of a size that some groups reach with both members, some with one and some with none."""
    config = tiny_run(
        directory,
        "cluster=serial",
        "algorithm=dapo",
        "algorithm.group_size=2",
        "algorithm.max_resample_rounds=9",
        "runner.max_steps=1",
        "runner.eval_at_end=false",
        "runner.save_interval=-1",
        "env.use_rel_reward=false",
        *overrides,
    )
    params = {"success_radius": 0.6, "step_size": 0.3}
    return replace(config, env=replace(config.env, init_params=params))


def metrics_of(config: EmbodiedConfig) -> dict[str, float]:
    run(config)
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return json.loads((directory / "metrics.jsonl").read_text())


class Spy:
    """Notes what the actor had received when it was told to update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received: list[Trajectory] = []
        original = ActorWorker.update

        def update(worker: ActorWorker, *, step: int) -> object:
            self.received = list(worker._received)
            return original(worker, step=step)

        monkeypatch.setattr(ActorWorker, "update", update)


def test_it_rolls_out_again_until_there_are_enough_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    metrics = metrics_of(config_of(tmp_path))
    rounds = int(metrics["rollout/rounds"])
    assert 1 < rounds < 10
    assert metrics["actor/groups"] == WANTED
    assert metrics["env/episodes"] == 16 * rounds

    groups: dict[int, list[bool]] = {}
    drawn: list[torch.Tensor] = []
    for t in spy.received:
        for member, group in enumerate(t.group_ids.tolist()):
            groups.setdefault(group, []).append(bool(t.terminated[:, member].any()))
            drawn.append(t.replay_inputs["state"][0, member])
    assert len(groups) == WANTED * rounds, "every group of every round has an id of its own"
    assert all(len(successes) == 2 for successes in groups.values())
    starts = {tuple(state.tolist()) for state in drawn}
    assert len(starts) > 4 * rounds, "a round draws initial states of its own"
    passing = sorted(group for group, successes in groups.items() if sum(successes) == 1)
    assert len([g for g in passing if g < WANTED * (rounds - 1)]) < WANTED <= len(passing)
    # The first that pass are trained on, the rest is left out.
    assert metrics["actor/groups_filtered"] == pytest.approx(1 - WANTED / len(groups))


def test_after_the_last_round_it_trains_on_what_there_is(tmp_path: Path) -> None:
    metrics = metrics_of(config_of(tmp_path, "algorithm.max_resample_rounds=1"))
    assert metrics["rollout/rounds"] == 2
    assert 0 < metrics["actor/groups"] < WANTED
    assert metrics["actor/optimizer_steps"] == 1


def test_without_resampling_filtered_groups_are_masked(tmp_path: Path) -> None:
    metrics = metrics_of(config_of(tmp_path, "algorithm.max_resample_rounds=0"))
    assert metrics["rollout/rounds"] == 1
    assert 0 < metrics["actor/groups"] < WANTED


def test_if_no_group_passes_the_step_is_skipped_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, "algorithm.max_resample_rounds=2")
    metrics = metrics_of(replace(config, env=replace(config.env, init_params={"success_radius": 0.001})))
    assert metrics["rollout/rounds"] == 3
    assert metrics["actor/optimizer_steps"] == metrics["actor/groups"] == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "no update: algorithm.filter_rewards masked every group, also those of 2 further rounds: none has a success "
        "rate of 0.01 to 0.99 (rewards_lower_bound, rewards_upper_bound), over all groups it is 0; start from a better"
    ) in said


@pytest.mark.parametrize("coefficient", [0.2, 5.0])
@pytest.mark.parametrize("relative", [False, True])
def test_scale_and_shape_of_the_rewards_play_no_part(tmp_path: Path, coefficient: float, relative: bool) -> None:
    """The dummy env pays progress, too, so its returns are no multiples of the success."""
    plain = metrics_of(config_of(tmp_path / "plain"))
    scaled = metrics_of(
        config_of(tmp_path / "scaled", f"env.reward_coef={coefficient}", f"env.use_rel_reward={relative}")
    )
    assert scaled["actor/groups"] == plain["actor/groups"] == WANTED
    for name in ("rollout/rounds", "actor/groups_filtered", "actor/score", "actor/samples"):
        assert scaled[name] == plain[name], name
    assert scaled["actor/optimizer_steps"] == 1
    assert scaled["actor/grad_norm"] > 1e-4


@pytest.mark.timeout(120)
def test_the_number_of_actor_ranks_changes_nothing(tmp_path: Path) -> None:
    ranks = "cluster=process", "cluster.component_placement={actor: 0-1, rollout: 0, env: 0}"
    alone = "cluster.component_placement={actor: 0, rollout: 0, env: 0}"
    one = metrics_of(config_of(tmp_path / "alone", alone))
    two = metrics_of(config_of(tmp_path / "two", *ranks))
    for name in ("rollout/rounds", "actor/groups", "actor/groups_filtered", "actor/grad_norm", "actor/samples"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
