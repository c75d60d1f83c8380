"""Micro-batches that fit: halved where memory runs out."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.errors import UserError
from embodied_rl.models.base import Evaluation, Policy
from embodied_rl.schema import Config
from embodied_rl.training.micro_batch import MicroBatch, of_equal_size, within_budget
from tests.training.learner import Learner, distance, same, trained, training_config, two_epochs
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy

AUTO = "actor.micro_batch_size=auto"
ON_THE_CPU = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."
)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def limited(limit: int, where: str, tried: list[int]) -> Any:
    """A policy that runs out of memory above ``limit`` samples: in its second block, or in the backward pass."""

    def make(values_per_chunk: int) -> Policy:
        policy = small_policy(values_per_chunk)
        evaluate, block = policy.evaluate, policy.shard_units()[-1]
        inner = block.forward

        def forward(state: Tensor) -> Tensor:
            if where == "forward" and len(state) > limit:
                raise RuntimeError(ON_THE_CPU)
            out = inner(state)
            return _Fails.apply(out) if where == "backward" and len(state) > limit else out

        def evaluated(replay_inputs: Any, **options: Any) -> Evaluation:
            tried.append(len(replay_inputs["state"]))
            return evaluate(replay_inputs, **options)

        block.forward = forward
        policy.evaluate = evaluated  # type: ignore[method-assign]
        return policy

    return make


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulated", ["true", "false"])
def test_the_result_is_that_of_a_given_size(mesh: DeviceMesh, where: str, accumulated: str) -> None:
    once = f"actor.fsdp_config.enable_gradient_accumulation={accumulated}"
    config, tried = training_config("ppo", AUTO, once), []
    learner = Learner(mesh, config, make_policy=limited(6, where, tried))
    metrics = learner.train()
    given = trained(mesh, training_config("ppo", "actor.micro_batch_size=5", once), 1)
    assert distance(learner.weights(), given["weights"]) < 1e-6
    assert metrics.pop("micro_batch_size") <= 6
    assert metrics == pytest.approx(given["metrics"], rel=1e-4, abs=1e-6)


def test_what_was_found_is_remembered(mesh: DeviceMesh) -> None:
    tried: list[int] = []
    learner = Learner(mesh, training_config("ppo", AUTO), make_policy=limited(6, "forward", tried))
    batch = learner.batch(two_epochs(learner.config))
    size = learner.update(batch, step=0)["micro_batch_size"]
    first, *others = tried
    assert first == max(tried) > 6, "all at once"
    assert 3 < size <= 6
    tried.clear()
    learner.update(batch, step=1)
    assert max(tried) == size
    assert others


def test_recomputed_logprobs_fit_too(mesh: DeviceMesh) -> None:
    tried: list[int] = []
    recipe = ("grpo", "actor.recompute_logprobs=true", "algorithm.kl_beta=0.1")
    learner = Learner(mesh, training_config(*recipe, AUTO), make_policy=limited(6, "forward", tried))
    given = Learner(mesh, training_config(*recipe, "actor.micro_batch_size=5"))
    got, expected = (each.batch(two_epochs(each.config)) for each in (learner, given))
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=0, atol=1e-6)
    assert got.reference_logprobs is not None
    torch.testing.assert_close(got.reference_logprobs, expected.reference_logprobs, rtol=0, atol=1e-6)
    assert max(tried) > 6


def test_where_nothing_fails_all_samples_go_at_once(mesh: DeviceMesh) -> None:
    config = training_config("grpo", AUTO, "algorithm.n_minibatches=1", "algorithm.update_epoch=1")
    tried: list[int] = []
    metrics = Learner(mesh, config, make_policy=limited(10_000, "forward", tried)).train()
    assert tried == [metrics["samples"]]
    assert "micro_batch_size" not in metrics, "nothing had to be found"


def test_if_not_even_one_sample_fits_the_run_ends(mesh: DeviceMesh) -> None:
    learner = Learner(mesh, training_config("ppo", AUTO), make_policy=limited(0, "forward", []))
    with pytest.raises(UserError, match=r"not even one sample fits in memory: \[enforce fail"):
        learner.train()


PLENTY = 10_000


def trained_where_memory_is_short(mesh: DeviceMesh, config: Config, limits: list[int], where: str) -> dict[str, Any]:
    """A rank of several, each of which runs out of memory above its number of samples."""
    tried: list[int] = []
    learner = Learner(mesh, config, make_policy=limited(limits[mesh.get_rank()], where, tried))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        metrics = learner.train(2)
    return {"weights": learner.weights(), "metrics": metrics, "tried": tried, "said": said.getvalue().splitlines()}


ROUNDED = (
    "actor.fsdp_config.mixed_precision.param_dtype=bfloat16",
    "actor.fsdp_config.reshard_after_forward=false",
    "actor.gradient_checkpointing=true",
)


@pytest.mark.parametrize(
    ("limits", "where", "options"),
    [
        ([PLENTY, 6], "forward", ()),
        ([PLENTY, 6], "backward", ()),
        ([3, PLENTY], "backward", ("actor.fsdp_config.enable_gradient_accumulation=false",)),
        ([6, 2], "forward", ()),
        ([6, 2], "backward", ROUNDED),
    ],
)
def test_several_ranks_agree_on_what_fits_all(
    two_ranks: Ranks, limits: list[int], where: str, options: tuple[str, ...]
) -> None:
    options = (*options, "algorithm.n_minibatches=1")
    first, second = two_ranks.run(trained_where_memory_is_short, training_config("ppo", AUTO, *options), limits, where)
    size = first["metrics"].pop("micro_batch_size")
    assert size <= min(limits) <= 2 * size + 1
    assert second["metrics"].pop("micro_batch_size") == size
    given = two_ranks.run(trained, training_config("ppo", f"actor.micro_batch_size={size:.0f}", *options), 2)[0]
    assert same(first["weights"], given["weights"])
    assert first["metrics"] == second["metrics"] == given["metrics"]
    short = "0, 1" if PLENTY not in limits else str(1 - limits.index(PLENTY))
    line = r"out of memory on rank {} with \d+ samples at once, (\d+) from now on; set actor.micro_batch_size=\1 to .*"
    assert re.fullmatch(line.format(short), first["said"][0])
    assert f"set actor.micro_batch_size={size:.0f} to begin with that" in first["said"][-1]
    assert second["said"] == [], "one rank tells of it"


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_several_ranks_recompute_logprobs_in_what_fits(two_ranks: Ranks, reshard: str) -> None:
    recipe = (
        "grpo",
        "actor.recompute_logprobs=true",
        "algorithm.kl_beta=0.1",
        "algorithm.n_minibatches=1",
        f"actor.fsdp_config.reshard_after_forward={reshard}",
    )
    short = two_ranks.run(trained_where_memory_is_short, training_config(*recipe, AUTO), [PLENTY, 3], "forward")
    size = short[0]["metrics"].pop("micro_batch_size")
    given = two_ranks.run(trained, training_config(*recipe, f"actor.micro_batch_size={size:.0f}"), 2)[0]
    assert same(short[0]["weights"], given["weights"])
    assert "actor.logprob_micro_batch_size=" in short[0]["said"][0]


def short_of_everything(mesh: DeviceMesh) -> tuple[list[int], str]:
    """The second of two ranks has no room for any sample."""
    tried: list[int] = []
    micro_batch = MicroBatch("auto", nn.Linear(1, 1), say=lambda text: None)

    def one(rows: Tensor) -> None:
        tried.append(len(rows))
        if len(rows) and mesh.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(UserError) as found:
        micro_batch.run(4, None, lambda parts: [micro_batch.attempt(one, part) for part in parts])
    return tried, str(found.value)


def test_if_one_of_several_ranks_has_no_room_for_a_sample_all_say_so(two_ranks: Ranks) -> None:
    (first, heard), (second, said) = two_ranks.run(short_of_everything)
    assert first == [4, 2, 2, 1, 1, 1, 1]
    assert second == [4, 0, 2, 0, 0, 1, 0, 0, 0, 0], "after the first that failed only for the others' sake"
    assert "not even one sample fits in memory: memory ran out on rank 1. Set" in heard
    assert "not even one sample fits in memory: CUDA out of memory." in said


def test_a_given_size_is_not_changed(mesh: DeviceMesh) -> None:
    learner = Learner(mesh, training_config("ppo", "actor.micro_batch_size=7"), make_policy=limited(6, "backward", []))
    with pytest.raises(torch.OutOfMemoryError):
        learner.train()


def test_other_errors_are_not_caught() -> None:
    calls: list[int] = []

    def work(parts: list[Tensor]) -> None:
        calls.append(len(parts[0]))
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot"):
        MicroBatch("auto", nn.Linear(1, 1)).run(8, None, work)
    assert calls == [8]


def test_samples_of_like_length_go_together() -> None:
    lengths = torch.tensor([[2, 3], [1, 1], [9, 1], [2, 4], [1, 2]])  # 5, 2, 10, 6 and 3 tokens
    assert [part.tolist() for part in of_equal_size(5, lengths, 2)] == [[2, 3], [0, 4], [1]]
    assert [part.tolist() for part in of_equal_size(5, None, 2)] == [[0, 1], [2, 3], [4]]
    assert of_equal_size(0, None, 2) == of_equal_size(0, lengths[:0], 2) == []
    # Beside the longest nothing has room; [2, 4] and [2, 3] take 2 x (2 + 4), the rest 2 x (1 + 2).
    assert [part.tolist() for part in within_budget(lengths, 12)] == [[2], [3, 0], [4, 1]]
    # A third would make the second 3 x 6, and nothing makes the first fit.
    assert [part.tolist() for part in within_budget(lengths, 8)] == [[2], [3], [0], [4, 1]]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=40), st.integers(1, 200))
def test_a_micro_batch_is_within_its_budget_or_a_single_sample(lengths: list[tuple[int, int]], budget: int) -> None:
    tensor = torch.tensor(lengths, dtype=torch.int64).reshape(-1, 2)
    parts = within_budget(tensor, budget)
    assert sorted(place for part in parts for place in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        padded = int(tensor[part].amax(0).sum()) * len(part)
        assert padded <= budget or len(part) == 1


def of_uneven_lengths(values_per_chunk: int) -> Policy:
    """A policy whose samples are said to have 2 to 8 tokens."""
    policy = small_policy(values_per_chunk)

    def lengths(replay_inputs: Any) -> Tensor:
        tokens = 1 + (10 * replay_inputs["state"][:, :2]).abs().long() % 4
        return tokens

    policy.sample_lengths = lengths  # type: ignore[method-assign]
    return policy


def trained_within(mesh: DeviceMesh, budget: int) -> dict[str, Any]:
    config = training_config("ppo")
    # Set past the checks: only language models have such a budget.
    config = replace(config, actor=replace(config.actor, max_tokens_per_micro_batch=budget))
    learner = Learner(mesh, config, make_policy=of_uneven_lengths)
    learner.train()
    return learner.weights()


def test_the_budget_changes_nothing(mesh: DeviceMesh, two_ranks: Ranks) -> None:
    whole = trained(mesh, training_config("ppo"), 1)["weights"]
    for budget in (1, 13, 10_000):
        assert distance(trained_within(mesh, budget), whole) < 1e-6
    assert distance(two_ranks.run(trained_within, 13)[0], whole) < 1e-6
