"""Rules across fields that several tasks share: each problem says what was got, why it cannot be, and what to do."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from typing import Final

from embodied_rl.algorithms.catalog import ADVANTAGES, LEARNERS
from embodied_rl.errors import UserError
from embodied_rl.models.registry import LANGUAGE_MODELS
from embodied_rl.plan import WeightPlane
from embodied_rl.runtime.cores import THREAD_VARIABLES, cores_of, pinnings
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import Config, EmbodiedConfig, EmbodiedSftConfig, MathConfig

AUTO: Final = "auto"
"""As many threads as there are cores to fill."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNED: Final = {
    **dict.fromkeys(THREAD_VARIABLES, "cluster.num_threads"),
    "CUDA_VISIBLE_DEVICES": "cluster.component_placement",
}
"""Environment variable -> the key that decides on it."""


def actor_problems(c: Config, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do.

    Args:
        placement: None where it could not be read, which was said already.
    """
    fsdp = c.actor.fsdp_config
    if fsdp.sharding_strategy == "hybrid_shard":
        if fsdp.fsdp_size is None:
            yield (
                "actor.fsdp_config.fsdp_size: got null, but sharding_strategy=hybrid_shard needs the number of ranks "
                "that share a replica; set it to a divisor of the actor's ranks"
            )
        elif placement and placement.world_size("actor") % fsdp.fsdp_size:
            yield (
                f"actor.fsdp_config.fsdp_size: got {fsdp.fsdp_size}, which does not divide the "
                f"{placement.world_size('actor')} actor ranks into groups of equal size"
            )
    ranks = placement.world_size("actor") if placement else 1
    if c.actor.micro_batch_size == "auto" and ranks > 1 and fsdp.sharding_strategy != "full_shard":
        yield (
            f"actor.micro_batch_size: got auto with {ranks} actor ranks and sharding_strategy="
            f"{fsdp.sharding_strategy}, but where one runs out of memory the others would wait for it; use a number, "
            "such as what full_shard finds (actor/micro_batch_size)"
        )
    if c.actor.micro_batch_size == "auto" and c.actor.max_tokens_per_micro_batch is not None:
        yield (
            f"actor.max_tokens_per_micro_batch: got {c.actor.max_tokens_per_micro_batch} with micro_batch_size=auto; "
            "both say how much goes through the network at once: set one of them"
        )
    for name, section in (("actor", c.actor), ("critic", c.critic)):
        if section.enable_offload and not section.offload:
            yield (
                f"{name}.offload: got [] with {name}.enable_offload=true, expected some of weights, gradients and "
                "optimizer"
            )
    if c.actor.enable_offload and fsdp.cpu_offload:
        yield (
            "actor.enable_offload: got true with actor.fsdp_config.cpu_offload=true, which keeps all in host memory at "
            "all times; set one of them"
        )
    if c.actor.max_tokens_per_micro_batch is not None and c.model.model_type not in LANGUAGE_MODELS:
        yield (
            f"actor.max_tokens_per_micro_batch: got {c.actor.max_tokens_per_micro_batch}, but the samples of "
            f"model_type={c.model.model_type} are all of one length; use actor.micro_batch_size"
        )


def process_problems(c: Config, placement: Placement | None) -> Iterator[str]:
    """Each problem of the workers' processes: what was got, why it cannot be, and what to do.

    Args:
        placement: None where it could not be read, which was said already.
    """
    cluster = c.cluster
    yield from _thread_problems(c)
    for key in ("cpu_affinity", "env_vars"):
        if cluster.backend == "serial" and (got := getattr(cluster, key)):
            yield (
                f"cluster.{key}: got entries for {', '.join(got)}, but with cluster=serial all workers are in one "
                "process, which has those of the command; leave it out, or use cluster=process"
            )
    for component, variables in cluster.env_vars.items():
        for name in variables:
            if not _VARIABLE.fullmatch(name):
                yield f"cluster.env_vars.{component}: got the name {name!r}, expected letters, digits and _"
            elif owner := _OWNED.get(name):
                yield f"cluster.env_vars.{component}.{name}: it follows from {owner}; set that"
    if placement is None or cluster.backend == "serial":
        return
    allowed = os.sched_getaffinity(0) if cluster.backend == "process" else None
    counted = {name for name, count in cluster.num_threads.items() if count != AUTO}
    for component in cluster.cpu_affinity.keys() & placement.slots.keys() & counted:
        try:
            for pinning in pinnings(cluster, placement, component):
                cores_of(pinning, allowed)
        except UserError as error:
            yield str(error)


def critic_problems(c: Config) -> Iterator[str]:
    """Each problem of a critic of its own: what was got, why it cannot be, and what to do."""
    estimator = ADVANTAGES.get(c.algorithm.adv_type)
    if not c.critic.enable or estimator is None:
        return
    if LEARNERS[c.algorithm.learner].replays:
        yield (
            f"critic.enable: got true, but algorithm.learner={c.algorithm.learner} has critics of its own "
            "(algorithm.sac); set it to false, and use algorithm=sac"
        )
        return
    if not estimator.needs_values:
        yield (
            f"critic.enable: got true, but adv_type={c.algorithm.adv_type} has no values for a critic to learn; use "
            "algorithm=ppo, or critic.enable=false"
        )
    if c.critic.enable_offload and c.actor.fsdp_config.cpu_offload:
        yield (
            "critic.enable_offload: got true with actor.fsdp_config.cpu_offload=true, which keeps all in host memory "
            "at all times; set one of them"
        )


def reference_problems(c: Config) -> Iterator[str]:
    """The problem of a type for a reference policy that has no weights of its own."""
    if c.actor.reference_dtype is not None and c.model.lora.leave_base:
        yield (
            f"actor.reference_dtype: got {c.actor.reference_dtype}, but with model.lora the reference is the policy "
            "without its adapters, which has the policy's type; leave it out"
        )


def trainable_problems(c: Config) -> Iterator[str]:
    """The problem of parameters that are chosen beside adapters."""
    if c.model.trainable and c.model.lora.used:
        yield (
            f"model.trainable: got {c.model.trainable} with adapters (model.lora), which freeze the base; leave it "
            "out, and name what is to be trained beside them in model.lora.modules_to_save"
        )


def attention_problems(c: Config, placement: Placement | None) -> Iterator[str]:
    """Each problem of flash attention: what was got, why it cannot be, and what to do."""
    if c.model.attn_implementation != "flash_attention_2" or c.model.model_type not in LANGUAGE_MODELS:
        return  # what other models can have says their class
    got = "model.attn_implementation: got flash_attention_2"
    if importlib.util.find_spec("flash_attn") is None:
        yield f"{got}, but there is no package flash_attn; install flash-attn, or use sdpa"
    if c.model.params.get("dtype") != "bfloat16":
        yield (
            f"{got}, which computes in bfloat16, but model.params.dtype is {c.model.params.get('dtype', 'float32')}; "
            "set it to bfloat16, or use sdpa"
        )
    for component in ("actor", "rollout") if placement else ():
        if placement and placement.device(component, 0) == "cpu":
            yield f"{got}, which needs CUDA, but {component} is on the CPU; use sdpa"


def replaces_env_workers(c: Config) -> bool:
    """Whether a run replaces env workers that it loses, if ``env.max_restarts`` lets it: not in one process, nor where
    rollout workers have other calls under way, or envs go on where another round of the same step left them."""
    if not isinstance(c, EmbodiedConfig) or c.runner.task_type != "embodied":
        return False
    rounds = c.env.train.auto_reset and c.algorithm.max_resample_rounds
    return c.cluster.backend != "serial" and not (rounds or c.rollout.max_staleness)


def at_work_in_updates(c: Config) -> tuple[str, ...]:
    """Components whose workers act, or read, for later steps while the actor updates."""
    if isinstance(c, EmbodiedSftConfig):
        return ("rollout",) if c.data.prefetch else ()
    return ("env", "rollout") if isinstance(c, EmbodiedConfig | MathConfig) and c.rollout.max_staleness else ()


def _thread_problems(c: Config) -> Iterator[str]:
    for component, count in c.cluster.num_threads.items():
        if count != AUTO:
            continue
        got = f"cluster.num_threads.{component}: got {AUTO}"
        if component != "actor":
            yield f"{got}, which is for the actor, whose update other workers wait for; give a number"
        elif c.cluster.backend == "ray":
            yield f"{got}, but nobody knows yet which nodes the actor will be on, and their cores; give a number"
        elif component in c.cluster.cpu_affinity:
            yield f"{got} with cluster.cpu_affinity.{component}, which gives it cores of its own; give their number"


def staleness_bound(c: EmbodiedConfig | MathConfig) -> int:
    """The most updates that the weights of a training step's rollout may be behind.

    The last step before a weight sync has weights of the sync before.
    """
    return max(c.rollout.max_staleness, c.runner.weight_sync_interval - 1)


def staleness_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    if not isinstance(c, EmbodiedConfig | MathConfig):
        return
    bound, interval = c.rollout.max_staleness, c.runner.weight_sync_interval
    if c.rollout.interruptible and not bound:
        yield "rollout.interruptible: got true, but with rollout.max_staleness=0 no weights come in a rollout's middle"
    if isinstance(c, EmbodiedConfig) and c.rollout.chunks_ahead is not None:
        got = f"rollout.chunks_ahead: got {c.rollout.chunks_ahead}"
        if bound != 1:
            yield (
                f"{got} with rollout.max_staleness={bound}, but it is for a rollout that runs ahead of one update; use "
                "rollout.max_staleness=1, or rollout.chunks_ahead=null"
            )
        if interval > 1:
            yield (
                f"{got} with runner.weight_sync_interval={interval}, by which most updates' weights never come; set "
                "one of them to null or 1"
            )
        if c.rollout.interruptible:
            yield (
                f"{got} with rollout.interruptible=true, which takes weights whenever they come; set one of them to "
                "null or false"
            )
    if not bound:
        return
    got = f"rollout.max_staleness: got {bound}"
    if c.cluster.backend == "serial":
        yield f"{got}, but with cluster=serial nothing happens at the same time; use cluster=process, or 0"
    if bound < interval - 1:
        yield (
            f"{got}, but with runner.weight_sync_interval={interval} weights get {interval - 1} updates old; use at "
            f"least {interval - 1}"
        )
    if c.algorithm.max_resample_rounds:
        yield (
            f"{got} with algorithm.max_resample_rounds={c.algorithm.max_resample_rounds}, but when it is known whether "
            "groups are missing the next rollout has begun; set one of them to 0"
        )
    for component in ("actor", "rollout"):
        if getattr(c, component).enable_offload:
            yield (
                f"{got} with {component}.enable_offload=true, by which actor and rollout take turns, but they are to "
                "work at the same time; set one of them to 0 or false"
            )
    if isinstance(c, EmbodiedConfig) and c.env.train.enable_offload:
        yield (
            f"{got} with env.train.enable_offload=true, which gives back what simulators hold while the actor updates, "
            "but they are to step then; set one of them to 0 or false"
        )


def acting_problems(c: Config) -> Iterator[str]:
    """Each problem of how rollout workers compute."""
    if not isinstance(c, EmbodiedConfig) or not c.rollout.cuda_graphs:
        return
    if not c.rollout.torch_compile:
        yield "rollout.cuda_graphs: got true with rollout.torch_compile=false, which makes what is recorded; set both"
    if c.rollout.enable_offload:
        yield (
            "rollout.cuda_graphs: got true with rollout.enable_offload=true, which moves the weights from where graphs "
            "find them; set one of them to false"
        )


def weight_sync_problems(c: Config, placement: Placement | None) -> Iterator[str]:
    """Each problem of the weights' way: what was got, why it cannot be, and what to do."""
    plane = c.actor.sync_backend
    if plane in ("channel", "auto") or not isinstance(c, EmbodiedConfig | MathConfig):
        return
    got = f"actor.sync_backend: got {plane}"
    if c.cluster.backend == "serial":
        yield f"{got}, but with cluster=serial there is one process; use channel, or cluster=process"
    if placement is not None:
        yield from (f"{got}, but {problem}" for problem in _PLANES[plane](placement))


def weight_plane(c: Config, placement: Placement) -> WeightPlane:
    """``actor.sync_backend``, or for ``auto`` the first way between accelerators that the placement allows."""
    if c.actor.sync_backend != "auto":
        return c.actor.sync_backend
    if not isinstance(c, EmbodiedConfig | MathConfig) or c.cluster.backend == "serial":
        return "channel"
    if placement.accelerator("actor", 0):
        for plane, problems in _PLANES.items():
            # A rollout worker that is offloaded wants its weights in host memory.
            if not any(problems(placement)) and not (plane == "cuda_ipc" and c.rollout.enable_offload):
                return plane
    return "channel"


def _lending_problems(placement: Placement) -> Iterator[str]:
    """Why an actor rank cannot lend memory to each rollout worker, and what to do."""
    if not placement.accelerator("actor", 0):
        yield "the actor is on a CPU, and only accelerators have memory that CUDA lends; use channel"
        return
    away = [rank for rank in range(placement.world_size("rollout")) if not placement.beside("rollout", rank, "actor")]
    if away:
        yield (
            f"rollout worker(s) {', '.join(map(str, away))} share no accelerator with an actor rank (actor on slots "
            f"{_slots(placement, 'actor')}, rollout on {_slots(placement, 'rollout')}); place them together with "
            "cluster.component_placement, or use channel or collective"
        )


def _broadcast_problems(placement: Placement) -> Iterator[str]:
    """Why actor rank 0 and the rollout workers cannot be one process group, and what to do."""
    where = [placement.accelerator("rollout", rank) for rank in range(placement.world_size("rollout"))]
    sender = placement.accelerator("actor", 0)
    if sender and sender in where:
        yield (
            "NCCL joins no two workers of one accelerator, and actor and rollout share slot "
            f"{placement.slots['actor'][0]}; use cuda_ipc or channel, or place them apart"
        )
    if len({bool(device) for device in (sender, *where)}) > 1:
        yield "some of actor and rollout have an accelerator and some have none; use channel"


def _slots(placement: Placement, component: str) -> str:
    return ",".join(map(str, placement.slots[component]))


_PLANES: Final[dict[WeightPlane, Callable[[Placement], Iterator[str]]]] = {
    "cuda_ipc": _lending_problems,
    "collective": _broadcast_problems,
}


def precision_problems(c: Config) -> Iterator[str]:
    """Each problem of what policies act with: what was got, why it cannot be, and what to do."""
    if not isinstance(c, EmbodiedConfig | MathConfig):
        return
    for key, dtype in (("rollout.dtype", c.rollout.dtype), ("actor.sync_dtype", c.actor.sync_dtype)):
        if dtype == "float16" and c.model.params.get("dtype") == "bfloat16":
            yield (
                f"{key}: got float16 with model.params.dtype=bfloat16, whose largest numbers float16 does not hold; "
                "use bfloat16"
            )
    if c.rollout.dtype is None:
        return
    got = f"rollout.dtype: got {c.rollout.dtype}"
    if c.actor.sync_dtype not in (None, c.rollout.dtype):
        yield f"{got} with actor.sync_dtype={c.actor.sync_dtype}; leave actor.sync_dtype out, which is the same then"
    if isinstance(c, MathConfig) and c.rollout.backend != "hf":
        yield (
            f"{got}, but rollout.backend={c.rollout.backend} has a type of its own (model.params.dtype for vllm); "
            "leave rollout.dtype out, or use rollout.backend=hf"
        )


def runner_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    if not c.runner.only_eval and (late := [step for step in c.runner.trace_steps if step > c.runner.max_steps]):
        yield f"runner.trace_steps: got {late}, expected steps of the run's {c.runner.max_steps}, from 1"
    if c.runner.deterministic and isinstance(c, EmbodiedConfig | MathConfig) and c.rollout.interruptible:
        yield (
            "runner.deterministic: got true with rollout.interruptible=true, but when weights come into a rollout "
            "depends on time; set one of them to false"
        )
    contents = c.runner.save_contents
    if "model" not in contents or len(set(contents)) != len(contents):
        yield f"runner.save_contents: got {contents}, expected [model, optimizer], or [model] for weights alone"
    if c.runner.recover == "auto" and not (c.runner.saves and "optimizer" in contents):
        yield (
            "runner.recover: got auto, but the run saves no checkpoint to go on from; set runner.save_interval, and "
            "runner.save_contents=[model, optimizer], or use never"
        )
    if c.runner.stop_at is not None and c.runner.val_check_interval < 1:
        yield (
            f"runner.stop_at: got {c.runner.stop_at}, which evaluations during training are compared with, but there "
            f"are none (runner.val_check_interval={c.runner.val_check_interval}); set both or none"
        )
    interval = c.runner.weight_sync_interval
    for key, why in (
        ("save_interval", "a run that resumes a checkpoint begins with the newest weights"),
        ("val_check_interval", "an evaluation needs the newest weights"),
    ):
        period = getattr(c.runner, key)
        if period > 0 and period % interval:
            yield (
                f"runner.{key}: got {period}, no multiple of runner.weight_sync_interval={interval}, but {why}, so the "
                f"rollouts that follow would be others; use {period // interval * interval + interval}"
            )


def imitation_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    if c.algorithm.loss_type != "nll":
        yield (
            f"algorithm.loss_type: got {c.algorithm.loss_type!r}, but task={c.runner.task_type} imitates; use "
            "algorithm=sft"
        )
    for key, wanted in (("adv_type", "raw"), ("group_size", 1), ("filter_rewards", False)):
        if getattr(c.algorithm, key) != wanted:
            yield (
                f"algorithm.{key}: got {getattr(c.algorithm, key)!r}, but demonstrations have no rewards; use "
                f"algorithm=sft, which has {wanted!r}"
            )
    if c.algorithm.sampling_params.temperature != 1:
        yield (
            f"algorithm.sampling_params.temperature: got {c.algorithm.sampling_params.temperature}, but the likelihood "
            "of demonstrations is that at temperature 1"
        )
