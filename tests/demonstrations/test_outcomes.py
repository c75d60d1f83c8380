"""What came of recorded chunks, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.demonstrations.outcomes import DemonstratedOutcomes
from embodied_rl.errors import UserError
from embodied_rl.schema import EnvConfig
from tests.configs import embodied
from tests.demonstrations.recording import record


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """Episodes of the dummy env, each up to its first success; and their lengths."""
    root = record(tmp_path_factory.mktemp("shown") / "data", [0, 3, 5])
    return str(root), [int(e["length"]) for e in DataSet.open(root).episodes()]


def env(**fields: object) -> EnvConfig:
    config = embodied("env=dummy").env
    return replace(config, use_rel_reward=True, reward_coef=2.0, **fields)  # type: ignore[arg-type]


def opened(path: str, of: EnvConfig, chunk: int) -> DemonstratedOutcomes:
    return DemonstratedOutcomes(path, of, chunk=chunk, cameras={}, sizes={})


def test_chunks_of_episodes_that_end_in_success(shown: tuple[str, list[int]]) -> None:
    path, lengths = shown
    found, source = opened(path, env(), 3), DataSet.open(Path(path))
    level, state = source.rows("next.reward")[:, 0], source.rows("observation.state")
    assert len(found) == sum(lengths), "every chunk's outcome is known: after the last there is nothing"
    frames, actions, rewards, valid, terminated, following = found.sample(torch.arange(len(found)))
    obs, next_obs = (found.observations(of) for of in (frames, following))
    assert actions.shape[1] == rewards.shape[1] == 3
    row = 0
    for length in lengths:
        first = row
        for t in range(length):
            steps = min(3, length - t)
            before = [0.0 if t + k == 0 else level[row + k - 1] for k in range(steps)]
            expected = [2.0 * (level[row + k] - before[k]) for k in range(steps)]
            assert rewards[row, :steps].tolist() == pytest.approx(expected, abs=1e-6)
            assert valid[row].tolist() == [k < steps for k in range(3)]
            assert terminated[row].tolist() == [t + k == length - 1 for k in range(3)]
            assert torch.equal(obs.state[row], torch.from_numpy(state[row]))
            if t + 3 < length:
                assert torch.equal(next_obs.state[row], torch.from_numpy(state[row + 3]))
            row += 1
        assert row - first == length


def test_without_terminations_only_what_is_followed_is_known(shown: tuple[str, list[int]]) -> None:
    path, lengths = shown
    config = env()
    going_on = replace(config, train=replace(config.train, ignore_terminations=True))
    found = opened(path, going_on, 3)
    assert len(found) == sum(max(0, length - 3) for length in lengths)
    _, _, _, valid, terminated, _ = found.sample(torch.arange(len(found)))
    assert valid.all() and not terminated.any()
    with pytest.raises(UserError, match="no chunk of 99 actions has a known outcome"):
        opened(path, going_on, 99)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("chunk", [1, 3])
def test_an_episode_that_the_env_ended_has_nothing_to_come(tmp_path: Path, chunk: int, ignored: bool) -> None:
    """Whatever is made of successes: what its last step earned is known."""
    root = record(tmp_path, [0, 3], max_steps=4, terminated=True)
    config = env()
    config = replace(config, train=replace(config.train, ignore_terminations=ignored), use_rel_reward=False)
    found, level = opened(str(root), config, chunk), DataSet.open(root).rows("next.reward")[:, 0]
    assert [int(e["length"]) for e in DataSet.open(root).episodes()] == [4, 4]
    assert len(found) == 8
    _, _, rewards, valid, terminated, _ = found.sample(torch.arange(8))
    last = (torch.arange(8)[:, None] + torch.arange(chunk)) % 4 == 3
    assert torch.equal(terminated & valid, last & valid)
    assert rewards[:, 0].tolist() == pytest.approx((2.0 * level).tolist())


def rewards_of(found: DemonstratedOutcomes) -> list[float]:
    return found.sample(torch.arange(len(found)))[2][:, 0].tolist()


def without_start_levels(root: Path) -> None:
    """As data sets were once."""
    [path] = root.glob("meta/episodes/*/*.parquet")
    pq.write_table(pq.read_table(path).drop_columns(["start_level"]), path)


def test_after_a_takeover_what_came_before_is_not_paid(tmp_path: Path, shown: tuple[str, list[int]]) -> None:
    path, lengths = shown
    cut = record(tmp_path, [0, 3, 5], first=2)
    ends = np.cumsum(lengths)
    paid = rewards_of(opened(path, env(), 1))
    kept = [paid[row] for end, n in zip(ends, lengths, strict=True) for row in range(end - n + 2, end)]
    assert rewards_of(opened(str(cut), env(), 1)) == kept
    level = DataSet.open(cut).rows("next.reward")[:, 0]
    assert rewards_of(opened(str(cut), replace(env(), use_rel_reward=False), 1)) == (2.0 * level).tolist()


@pytest.mark.parametrize(
    ("file", "content", "whole"),
    [
        ("meta/collection.yaml", "collect: {takeover_after: [2, 2]}", False),
        ("meta/collection.yaml", "collect: {takeover_after: null}", True),
        ("meta/provenance.json", "[]", False),  # of dagger: collect writes both
        ("meta/notes.txt", "of anybody", True),
    ],
)
def test_of_sets_without_start_levels_a_takeovers_first_step_is_left_out(
    tmp_path: Path, file: str, content: str, whole: bool
) -> None:
    """Where it may be one: what it was paid for is not known."""
    record(tmp_path, [0, 3, 5], first=2)
    paid: list[float | None] = [*rewards_of(opened(str(tmp_path), env(), 1))]
    without_start_levels(tmp_path)
    (tmp_path / file).write_text(content)
    levels = rewards_of(opened(str(tmp_path), replace(env(), use_rel_reward=False), 1))
    for episode in DataSet.open(tmp_path).episodes():
        first = episode["dataset_from_index"]
        paid[first] = levels[first] if whole else None
    assert rewards_of(opened(str(tmp_path), env(), 1)) == [reward for reward in paid if reward is not None]


def test_levels_are_rewards_where_the_env_gives_them(shown: tuple[str, list[int]]) -> None:
    path, _ = shown
    found = opened(path, replace(env(), use_rel_reward=False), 1)
    level = DataSet.open(Path(path)).rows("next.reward")[:, 0]
    _, _, rewards, _, _, _ = found.sample(torch.tensor([0, 1, 2]))
    assert rewards[:, 0].tolist() == pytest.approx((2.0 * level[:3]).tolist())
