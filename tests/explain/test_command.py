"""``python train.py explain`` as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.explain.show import main

REPOSITORY = Path(__file__).parents[2]


def test_it_starts_without_torch_and_before_hydra_sees_the_arguments() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from embodied_rl.cli import main\n"
        "main(['explain', 'verl.actor.clip_ratio'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "algorithm.clip_ratio_low" in done.stdout
    assert "algorithm.clip_ratio_high" in done.stdout
    assert "The ratio is clipped to" in done.stdout


def test_a_near_miss_ends_with_status_2() -> None:
    command = [sys.executable, "train.py", "explain", "verl.actor.clip_ratoi"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: verl.actor.clip_ratoi: verl has no such key in its reference. Did you mean 'verl.actor.clip_ratio'?\n"
    )
    assert not done.stdout


def test_usage_counts_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    out = capsys.readouterr().out
    assert "python train.py explain verl.actor.clip_ratio" in out
    [row] = [line.split() for line in out.splitlines() if line.split()[:1] == ["AReaL"]]
    total, *parts = map(int, row[1:])
    assert total == sum(parts)
    assert total > 600


def test_a_foreign_key_shows_ours_with_default_and_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    main(["verl.actor.ppo_mini_batch_size"])
    out = capsys.readouterr().out
    assert "verl: actor_rollout_ref.actor.ppo_mini_batch_size" in out
    assert "actor.global_batch_size  null" in out
    assert "Counts prompts" in out


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("rlinf.actor.mcore_gpt", "not needed"),
        ("cosmos_rl.train.ckpt.upload_s3", "not needed"),
        ("verl.actor.shuffle", "derived"),
    ],
)
def test_a_key_without_ours_says_why(query: str, status: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([query])
    assert f"  {status}" in capsys.readouterr().out


def test_an_own_key_shows_its_equivalents_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["algorithm.gamma"])
    out = capsys.readouterr().out
    assert out.count("{actor,ref}.discount") == 1
    assert out.count("Applied once per decision") == 1
    assert "none in   Cosmos-RL" in out


def test_several_keys_are_explained_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    main(["roll.pg_clip", "areal.gconfig.n_samples"])
    out = capsys.readouterr().out
    assert "ROLL: pg_clip" in out
    assert "AReaL: gconfig.n_samples" in out


def test_everything_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """No cell is taken for markup, whatever brackets it holds."""
    main(["verl", "roll", "areal", "cosmos", "rlinf", "algorithm.sampling_params", "cluster"])
    out = capsys.readouterr().out
    assert "{actor" not in out.partition("(ours, a config group)")[0]
    assert "train.train_policy.epsilon_low" in out
