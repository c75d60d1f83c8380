"""Every model family, trained whole, by adapters, and by adapters near a reference, resumes bit for bit.

Each run is compared with one that was not interrupted: every tensor of the last checkpoint, weights and moments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from embodied_rl.commands.make_tiny import make_tiny
from embodied_rl.launch import run
from embodied_rl.schema import Config
from embodied_rl.workers import actor, rollout
from tests.checkpoints.saved import saved_tensors
from tests.configs import embodied_sft, tiny_math_run, tiny_run
from tests.demonstrations.recording import record
from tests.test_end_to_end import assert_equal, metrics_of, only_run

SMALL = (
    "cluster=serial",
    "cluster.component_placement={env: 0, rollout: 0, actor: 0}",
    "rollout.pipeline_stage_num=1",
    "++env.init_params.image_size=32",
    "env.train.total_num_envs=4",
    "env.train.max_episode_steps=4",
    "algorithm.group_size=2",
    "model.num_action_chunks=2",
    "runner.eval_at_end=false",
    "actor.optim.lr=1e-3",
)
PPO = ("algorithm=ppo", "algorithm.group_size=1", "algorithm.n_minibatches=1", "algorithm.update_epoch=2")
GRPO = ("algorithm=grpo",)
ONE_CAMERA = ("++model.params.num_steps=2", "++model.params.cameras={image: agentview, image2: null}")
FAMILIES: dict[str, tuple[str, ...]] = {
    "mlp": (*PPO, "++model.params.hidden_size=16"),
    "tiny_vla": (*PPO, "++model.params.hidden_size=32", "++model.params.num_layers=2"),
    "openvla": (*PPO, "model.num_action_chunks=1"),
    "openvla_oft": GRPO,
    "pi0": (*PPO, *ONE_CAMERA, "++model.params.noise_method=flow_noise"),
    "pi05": (*PPO, *ONE_CAMERA, "++model.params.stochastic_steps=all", "++model.params.train_expert_only=false"),
    "smolvla": (*GRPO, *ONE_CAMERA, "++model.params.train_expert_only=false"),
    "causal_lm": (),
}
FRESH = ("mlp", "tiny_vla")
LORA = ("model.lora.rank=2", "model.lora.dropout=0.1")
KL = ("algorithm.kl_beta=0.1", "algorithm.kl_ctrl={type: adaptive, target_kl: 0.01, horizon: 10}")
VARIANTS: dict[str, tuple[str, ...]] = {"full": (), "lora": LORA, "lora_kl": (*LORA, *KL)}
STEPS = 2


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts the operations of so many runs, which takes as long as they do. ``tests/models/test_flops.py`` does
    for these policies, and ``tests/test_devices.py`` in runs of them."""
    for worker in (actor, rollout):
        monkeypatch.setattr(worker, "if_countable", lambda count: None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny folder, for the dummy env, written once."""
    root = tmp_path_factory.mktemp("tiny")

    def find(model: str) -> Path:
        path = root / model
        if not path.exists():
            make_tiny(model, path)
            for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
                if (path / name).exists():  # its statistics are of LIBERO's states and actions
                    text = (path / name).read_text()
                    (path / name).write_text(text.replace("MEAN_STD", "IDENTITY").replace("QUANTILES", "IDENTITY"))
        return path

    return find


def configure(model: str, directory: Path, tiny: Callable[[str], Path], *overrides: str) -> Config:
    own = FAMILIES[model] if model in FRESH else (*FAMILIES[model], f"model.path={tiny(model)}")
    if model != "causal_lm":
        return tiny_run(directory, *SMALL, f"model={model}", *own, *overrides)
    small = ("model=causal_lm", "~model.params.architecture", *own, "actor.optim.lr=1e-3")
    text = "reward.function=tests.language.rewards.scores:by_text"
    return tiny_math_run(directory, *small, text, "runner.save_interval=100", "runner.eval_at_end=false", *overrides)


def resumed_and_not(configure: Callable[..., Config], tmp_path: Path, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """The last checkpoints of a run without interruption, and of one that was ended after each step."""

    def train(name: str, *overrides: str) -> Config:
        config = configure(tmp_path, f"runner.experiment_name={name}", *overrides)
        run(config)
        return config

    whole = train("whole", f"runner.max_steps={steps}", f"runner.save_interval={steps}")
    parts = train("parts", "runner.max_steps=1")
    for done in range(2, steps + 1):
        parts = train("parts", f"runner.max_steps={done}", "runner.resume_dir=auto")
    runs = [only_run(config) for config in (whole, parts)]
    lines = [metrics_of(directory) for directory in runs]
    assert lines[0] == lines[1]
    assert all(line["actor/grad_norm"] > 0 for line in lines[0])
    return [saved_tensors(directory / f"checkpoints/global_step_{steps}") for directory in runs]


def assert_complete(checkpoint: dict[str, Tensor], *, lora: bool) -> None:
    """Moments of every trained tensor are there, and not of others."""
    weights = {name.removeprefix("model.") for name in checkpoint if name.startswith("model.")}
    state = [name.removeprefix("optimizer.state.") for name in checkpoint if name.startswith("optimizer.state.")]
    trained = {name.rpartition(".")[0] for name in state}
    assert trained
    assert set(state) == {f"{name}.{entry}" for name in trained for entry in ("step", "exp_avg", "exp_avg_sq")}
    for name in trained:
        assert checkpoint[f"optimizer.state.{name}.exp_avg"].shape == checkpoint[f"model.{name}"].shape
    if lora:
        adapters = {name for name in weights if ".lora_" in name}
        assert adapters
        heads = ("value_head.", "log_std")
        assert {name for name in trained if not name.startswith(heads)} == adapters


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_a_resumed_run_is_the_uninterrupted_one(
    model: str, variant: str, tmp_path: Path, tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def with_variant(directory: Path, *overrides: str) -> Config:
        return configure(model, directory, tiny, *VARIANTS[variant], *overrides)

    whole, parts = resumed_and_not(with_variant, tmp_path)
    assert_equal(whole, parts)
    assert_complete(whole, lora=variant != "full")
    assert "no gradient for" not in capsys.readouterr().out


ACROSS = {
    "saved_meanwhile": ("runner.save_async=true",),
    "two_ranks": ("cluster=process", "cluster.component_placement={env: 0, rollout: 0, actor: 0-1}"),
}


@pytest.mark.parametrize("way", ["saved_meanwhile", pytest.param("two_ranks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", ["full", "lora_kl"])
def test_however_it_is_saved(way: str, variant: str, tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    def make(directory: Path, *overrides: str) -> Config:
        return configure("openvla_oft", directory, tiny, *VARIANTS[variant], *ACROSS[way], *overrides)

    whole, parts = resumed_and_not(make, tmp_path)
    assert_equal(whole, parts)
    assert_complete(whole, lora=variant != "full")


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("data"), range(10, 256, 64), image_size=32, step_size=2.0)


@pytest.mark.parametrize("variant", ["full", "lora"])
@pytest.mark.parametrize("model", ["openvla_oft", "pi0", "pi05", "smolvla"])
def test_imitation_resumes(
    model: str,
    variant: str,
    tmp_path: Path,
    tiny: Callable[[str], Path],
    demonstrations: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A flow's learned deviation gets no gradient from it: that is said, and the checkpoint has its moments."""
    own = () if model == "openvla_oft" else (*ONE_CAMERA, "++model.params.noise_method=flow_noise")

    def make(directory: Path, *overrides: str) -> Config:
        return embodied_sft(
            demonstrations,
            "cluster=serial",
            f"model={model}",
            f"model.path={tiny(model)}",
            *own,
            *VARIANTS[variant],
            "model.num_action_chunks=2",
            "++env.init_params.image_size=32",
            "++env.init_params.step_size=2.0",
            "data.batch_size=8",
            "actor.global_batch_size=4",
            "runner.eval_at_end=false",
            "runner.val_check_interval=-1",
            "runner.logger.logger_backends=[jsonl]",
            f"runner.output_dir={directory / 'results'}",
            *overrides,
        )

    whole, parts = resumed_and_not(make, tmp_path)
    assert_equal(whole, parts)
    said = " ".join(capsys.readouterr().out.split())
    prefix = "optimizer.state.noise_head."
    noise = {name.rpartition(".")[0] for name in whole if name.startswith(prefix)}
    if model == "openvla_oft" or variant == "lora":
        assert not noise
        assert "no gradient for" not in said
        return
    assert len(noise) == 6
    for name in noise:
        assert [whole[f"{name}.{key}"].abs().sum().item() for key in ("step", "exp_avg", "exp_avg_sq")] == [0, 0, 0]
    assert said.count("no gradient for noise_head.0.weight, noise_head.0.bias") == 3
