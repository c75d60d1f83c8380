"""The actor: collects trajectories, estimates advantages, updates the policy with FSDP2 and publishes its weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl import checkpoints
from embodied_rl.algorithms.losses import KLController
from embodied_rl.algorithms.statistics import Diagnostics, explained_variance, masked_moments, mean_and_variance
from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.checkpoints.store import Publication, publish, seal
from embodied_rl.contracts import Delivery, TrainBatch, Trajectory
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.models.base import ActionStatistics, Policy, PolicySpec
from embodied_rl.models.compilation import require_compiler
from embodied_rl.models.flops import SampleCost, countable, if_countable, sample_cost
from embodied_rl.models.registry import policy_of
from embodied_rl.models.weights.host import require_accelerator
from embodied_rl.models.weights.precision import want_in
from embodied_rl.models.weights.stored import as_stored, wanted
from embodied_rl.monitoring.peak_memory import UNKNOWN, Peak, PeakMemory
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.monitoring.work import Flops, main_type, peak_of
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.runtime.worker import Abandoned, Worker, WorkerContext
from embodied_rl.schema import EmbodiedConfig, MathConfig
from embodied_rl.seeding import derived_seed
from embodied_rl.training.batch import build_train_batch, passing_members
from embodied_rl.training.critic import Critic
from embodied_rl.training.demonstrated import Demonstrated
from embodied_rl.training.optimizer import build_optimizer, learning_rate_factor, set_learning_rates
from embodied_rl.training.scoring import BaseReference, Reference, Scorer, Training
from embodied_rl.training.sharding import (
    TrainingState,
    checkpoint_blocks,
    compile_blocks,
    gather_values,
    init_process_group,
    max_over_ranks,
    shard,
    sum_over_ranks,
)
from embodied_rl.training.update import Updater
from embodied_rl.workers.weight_planes import sending_end
from embodied_rl.workers.weight_sync import WeightSender


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """A rank's report on an update; the metrics are equal on all ranks."""

    metrics: dict[str, float]
    seconds: dict[str, float]
    """Phase -> wall seconds."""
    without_gradient: tuple[str, ...] = ()
    """Trainable parameters that no loss of the update reached."""
    flops: Mapping[str, Flops] = field(default_factory=dict)
    """Phase -> its operations on this rank, where there were any that can be counted."""
    peak: float | None = None
    """FLOP/s of the rank's device; None: nobody knows."""
    cost: SampleCost | None = None
    """What a sample's passes take."""
    peak_memory: Peak = UNKNOWN
    """Of the process, in the update."""


class ActorWorker(Worker):
    """One rank of the actor."""

    def __init__(
        self, context: WorkerContext, plan: RunPlan[EmbodiedConfig] | RunPlan[MathConfig], channels: Channels
    ) -> None:
        super().__init__(context)
        config = plan.config
        self._plan, self._numbers, self._initial = plan, plan.arithmetic, plan.start.initial
        self._model_config, self._algorithm, self._config = config.model, config.algorithm, config.actor
        self._trajectories, self._weights = Channels.need(channels.trajectories), Channels.need(channels.weights)
        self._timer = PhaseTimer(ended=context.trace.phase)
        self._peak_memory = PeakMemory(context.device)
        self._received: list[Trajectory] = []
        self._scored: dict[tuple[int, int], Diagnostics] = {}
        """Of those of them that were scored when they came, by :func:`place`."""
        self._scoring: dict[str, Flops] = {}
        """Phase -> what scoring took in it, of the present step."""
        self._early: list[Delivery] = []
        """For later training steps."""
        self._writer: checkpoints.shards.AsyncWriter | None = None
        self._written: Path | None = None
        """Directory of the newest checkpoint's contents, perhaps still being written."""
        self._critic: Critic | None = None
        self._scores_ahead = False
        """What comes is scored while more is on its way. Several ranks would have to agree on an order, also when a run
        is interrupted."""
        self._blank: Policy | None = None
        """The policy without memory, until its operations are counted."""
        self._cost: SampleCost | None = None

    def setup(self, spec: PolicySpec, *, action_statistics: ActionStatistics | None = None) -> int:
        """Build, shard and equip the policy; returns its number of parameters.

        Args:
            action_statistics: of what it will imitate. Weights that there are already keep their own.
        """
        self._action_statistics = action_statistics
        context = self.context
        mesh = init_process_group(
            device=context.device, rank=context.rank, world_size=context.world_size, rendezvous=context.rendezvous
        )
        self._policy = self._initial_policy(spec)
        self._record = PolicyRecord.of(self._model_config, spec)
        parameters = sum(p.numel() for p in self._policy.parameters())
        self._blank = if_countable(lambda: countable(self._policy))
        self._peak = self._device_peak()
        if self._config.torch_compile:
            require_compiler("actor.torch_compile", context.device)
            compile_blocks(self._policy)
        if self._config.gradient_checkpointing:
            checkpoint_blocks(self._policy)
        shard(self._policy, mesh, self._config.fsdp_config)
        self._optimizer = build_optimizer(self._policy, self._config.optim)
        policies = self._prepare(spec, mesh)
        self._state: TrainingState | None = None
        if self._config.enable_offload:
            require_accelerator("actor.enable_offload", context.device)
            self._state = TrainingState(policies, self._optimizer, context.device, self._config.offload)
            self._state.leave_device()
        sync_dtype = self._config.sync_dtype or self._plan.config.rollout.dtype
        way = sending_end(self._weights, self._plan, context)
        self._sender = WeightSender(
            self._policy,
            way.channel,
            way.receivers,
            device=way.device,
            bucket_bytes=self._config.sync_bucket_mb * 2**20,
            dtype=None if sync_dtype is None else getattr(torch, sync_dtype),
            verify=self._config.verify_weight_sync,
            report_progress=context.report_progress,
        )
        return parameters

    def _prepare(self, spec: PolicySpec, mesh: DeviceMesh) -> Sequence[Policy]:
        """Make what trains the policy; returns the policies that are on the device for an update alone, with
        ``actor.enable_offload``."""
        context, algorithm = self.context, self._algorithm
        reference = self._build_reference(spec, mesh) if algorithm.kl_beta > 0 else None
        self._kl = KLController(
            algorithm.kl_beta,
            target_kl=algorithm.kl_ctrl.target_kl if algorithm.kl_ctrl.type == "adaptive" else None,
            horizon=algorithm.kl_ctrl.horizon if algorithm.kl_ctrl.type == "adaptive" else None,
        )
        training = Training(
            policy=self._policy,
            reference=reference,
            actor=self._config,
            algorithm=algorithm,
            device=context.device,
            longest_sequence=self._numbers.chunks,
            report_progress=context.report_progress,
        )
        self._scorer = Scorer(training)
        self._updater = Updater(training, self._optimizer, self._demonstrated(training, spec))
        if self._config.encode_once:
            self._require_frozen_encoders()
        self._critic = self._build_critic(spec, mesh, training)
        self._scores_ahead = context.world_size == 1 and not self._takes_turns()
        return training.policies

    def _initial_policy(self, spec: PolicySpec) -> Policy:
        """The policy that training starts from: every rank makes the same whole one, to keep its shards of it.
        Weights of ``model.path`` are as stored until then."""
        torch.manual_seed(self._config.seed)
        initial = self._initial
        with_adapters = initial is not None and checkpoints.shards.has_adapters(initial)

        def load(policy: Policy) -> None:
            if initial is not None:
                checkpoints.shards.load_weights(policy, initial)

        # A checkpoint's weights are written over the file's, so they need memory of their own.
        with as_stored() if initial is None else contextlib.nullcontext():
            policy = policy_of(
                self._model_config, spec, None if with_adapters else load, params=self._plan.model_params
            )
        if self._action_statistics is not None and initial is None and self._model_config.path is None:
            policy.set_action_statistics(self._action_statistics)
        if with_adapters:
            load(policy)
        return policy

    def _build_critic(self, spec: PolicySpec, mesh: DeviceMesh, training: Training) -> Critic | None:
        """The critic of its own, if there is one: from its folder, or with ``runner.init_from`` a checkpoint's."""
        config, initial = self._plan.trained_critic, self._initial
        if config is None:
            return None
        initial = initial if initial is not None and checkpoints.shards.has_critic(initial) else None
        torch.manual_seed(self._config.seed)
        with as_stored() if initial is None else contextlib.nullcontext():
            model = policy_of(
                config, replace(spec, values_per_chunk=self._plan.values_per_chunk), params=self._plan.critic_params
            )
        if initial is not None:
            checkpoints.shards.load_critic_weights(model, initial)
        if self._config.torch_compile:
            compile_blocks(model)
        if self._config.gradient_checkpointing:
            checkpoint_blocks(model)
        shard(model, mesh, self._config.fsdp_config)
        return Critic(model, self._plan.config.critic, training, self._timer)

    def _demonstrated(self, training: Training, spec: PolicySpec) -> Demonstrated | None:
        path = self._algorithm.bc_path
        if not self._algorithm.bc_coef or path is None:
            return None
        from embodied_rl.demonstrations.dataset import Demonstrations, together  # imports pyarrow
        from embodied_rl.demonstrations.fit import camera_features, check_data, kept_to, spaces_of

        config = kept_to(path)
        check_data(config, spaces_of(spec), key="algorithm.bc_path")  # the plan did not know every env's
        cameras = camera_features(config, spec.image_shapes)
        report, clip = self.context.report_progress, config.clip_actions
        parts = [
            Demonstrations.of_policy(folder, spec, cameras=cameras, clip_actions=clip, report=report)
            for folder in config.paths
        ]
        return Demonstrated(training, together(parts), rank=self.context.rank, world_size=self.context.world_size)

    def _takes_turns(self) -> bool:
        """Whether a device is the actor's only when there is no rollout."""
        config = self._plan.config
        offloads = [part.enable_offload for part in (config.actor, config.rollout, config.critic)]
        return any(offloads) or (isinstance(config, EmbodiedConfig) and config.env.train.enable_offload)

    def _require_frozen_encoders(self) -> None:
        """Raise UserError unless what the policy makes of pictures stays the same in an update."""
        got, model = "actor.encode_once: got true, but", self._model_config.model_type
        if not self._policy.pictures:
            raise UserError(f"{got} model_type={model} has no encoder of pictures by itself; set it to false")
        if any(parameter.requires_grad for parameter in self._policy.picture_parameters()):
            raise UserError(
                f"{got} the encoders of pictures of model_type={model} are trained; set it to false, or freeze them "
                "with model.trainable; adapters leave out what model.lora.target_modules does not name"
            )

    def _build_reference(self, spec: PolicySpec, mesh: DeviceMesh) -> Reference:
        """The policy that training starts from: the base under the adapters, or a copy."""
        if self._algorithm.kl_penalty_type == "full" and self._policy.distribution_type is None:
            raise UserError(
                f"algorithm.kl_penalty_type=full: model_type={self._model_config.model_type} has no distribution "
                "with a closed-form divergence; use k3"
            )
        if self._shares_its_base():
            return BaseReference(self._policy)
        policy = self._initial_policy(spec).requires_grad_(False)
        if self._config.reference_dtype is not None:
            want_in(policy, getattr(torch, self._config.reference_dtype))
        if self._config.torch_compile:
            compile_blocks(policy)
        shard(policy, mesh, self._config.fsdp_config)
        return Reference(policy)

    def _shares_its_base(self) -> bool:
        """Whether the policy without its adapters stays what training starts from."""
        starts_with_adapters = self._initial is not None and checkpoints.shards.has_adapters(self._initial)
        return self._model_config.lora.leave_base and not (starts_with_adapters or self._policy.keeps_statistics)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(Exception, checkpoints.shards.CheckpointException):  # one that ends well has asked
                self._writer.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    async def publish_weights(self, version: int) -> float:
        """Give every rollout worker this version of the weights; returns the seconds it took."""
        with self._timer.phase("sync"):
            await self._sender.send(version)
        return self._timer.drain()["sync"]

    async def receive(self, *, step: int, more: bool = False) -> int:
        """Take a rollout's trajectories as the workers that make them deliver them.

        Args:
            step: the training step that they are for; what comes for a later one is kept for it.
            more: the rollout adds to the step's last; else a new step begins.

        Returns:
            How many of the step's groups on this rank can be trained on: they have scores, and pass the filter.
        """
        if not more:
            self._forget()
        arrived = [delivery for delivery in self._early if delivery.step == step]
        self._early = [delivery for delivery in self._early if delivery.step != step]
        while len(arrived) < self._numbers.messages:
            self._score_ahead(arrived)
            delivery: Delivery | Abandoned = await self._trajectories.get(key=self.context.rank)
            if isinstance(delivery, Abandoned):
                self._forget()
                return 0
            (arrived if delivery.step == step else self._early).append(delivery)
        self._received += [delivery.trajectory for delivery in arrived if delivery.trajectory is not None]
        return len(self._passing_groups())

    def _forget(self) -> None:
        self._received, self._scored, self._scoring = [], {}, {}

    def _score_ahead(self, arrived: list[Delivery]) -> None:
        """Score what came, in its place, for as long as nothing else has come: it may be the order to give up."""
        for number, delivery in enumerate(arrived if self._scores_ahead else ()):
            trajectory = delivery.trajectory
            if trajectory is None or place(trajectory) in self._scored:
                continue
            if self._trajectories.depth().get(self.context.rank, 0) or not self._wants_passes(trajectory):
                return
            if not self._scored:
                self._peak_memory.begin()
            self._count_operations(trajectory)
            arrived[number] = replace(delivery, trajectory=self._score(trajectory, "scoring_ahead", what=None))

    def _wants_passes(self, trajectory: Trajectory) -> bool:
        return self._critic is not None or self._scorer.passes(trajectory)

    def _score(self, trajectory: Trajectory, phase: str, *, what: str | None) -> Trajectory:
        """With passes of its own, so that it is of no influence when it is done, and in which order.

        Args:
            what: name of this in progress reports, if there are to be any.
        """
        scores = self._scored[place(trajectory)] = Diagnostics()
        with self._timer.phase(phase):
            [trajectory] = self._scorer.score([trajectory], scores, what=what)
            if self._critic is not None:
                [trajectory] = self._critic.value([trajectory], what=what)
        self._scoring[phase] = self._scoring.get(phase, Flops()) + self._scorer.flops
        return trajectory

    def update(self, *, step: int) -> UpdateReport:
        """Train on what was received."""
        if not self._scored:
            self._peak_memory.begin()
        if self._received:
            self._count_operations(self._received[0])
        with self._state.on_device(self._timer) if self._state else contextlib.nullcontext():
            metrics = self._update(step)
        return UpdateReport(
            metrics=metrics,
            seconds=self._timer.drain(),
            without_gradient=self._without_gradient(),
            flops={phase: found for phase, found in self._flops().items() if found.model},
            peak=self._peak,
            cost=self._cost,
            peak_memory=self._peak_memory.end(),
        )

    def _without_gradient(self) -> tuple[str, ...]:
        return tuple(self._updater.without_gradient)

    def _flops(self) -> dict[str, Flops]:
        return {"update": self._updater.flops, **self._scoring}

    def _count_operations(self, trajectory: Trajectory) -> None:
        """Learn of the first sample that comes what its passes take."""
        blank = self._blank
        if blank is None:
            return
        self._blank = None
        sample = {name: tensor[0, :1] for name, tensor in trajectory.replay_inputs.items()}
        recompute = checkpoint_blocks if self._config.gradient_checkpointing else None
        self._cost = self._scorer.cost = if_countable(lambda: sample_cost(blank, sample, recompute))
        if self._config.encode_once:
            with torch.no_grad():
                sample = blank.encoded(sample)
            self._updater.cost = if_countable(lambda: sample_cost(blank, sample, recompute))
        else:
            self._updater.cost = self._cost

    def _device_peak(self) -> float | None:
        """FLOP/s of this rank's device in the type that the policy computes in."""
        precision = self._config.fsdp_config.mixed_precision.param_dtype
        own = main_type(torch.empty(p.shape, dtype=wanted(p), device="meta") for p in self._policy.parameters())
        return peak_of(self.context.device, own if precision is None else getattr(torch, precision))

    def _update(self, step: int) -> dict[str, float]:
        reduce = sum_over_ranks(self.context.device)
        # In one order however the messages came in: floating-point sums depend on it.
        self._received.sort(key=place)
        passing = gather_values(self._passing_groups()).sort().values
        last_group = int(passing[self._numbers.groups - 1]) if len(passing) > self._numbers.groups else None
        staleness = self._staleness(step)
        algorithm, scores, trajectories = self._algorithm, Diagnostics(), self._received
        if self._scores_ahead:
            trajectories = [
                t if place(t) in self._scored else self._score(t, "scoring", what="scoring") for t in trajectories
            ]
            for trajectory in trajectories:
                scores.merge(self._scored[place(trajectory)])
        else:
            with self._timer.phase("scoring"):
                trajectories = self._scorer.score(trajectories, scores)
            self._scoring["scoring"] = self._scorer.flops
            if self._critic is not None:
                with self._timer.phase("values"):
                    trajectories = self._critic.value(trajectories)
        scores.reduce(reduce, max_over_ranks(self.context.device))
        metrics = scores.result()
        self._received, self._scored = [], {}
        with self._timer.phase("advantage"):
            beta = self._kl.beta
            played = [t.task_ids.unique() for t in trajectories if t.task_ids is not None]
            batch, pairs = build_train_batch(
                trajectories,
                algorithm,
                kl_beta=beta,
                last_group=last_group,
                tasks=gather_values(torch.cat([*played, torch.zeros(0, dtype=torch.int64)])).unique(),
                reduce=reduce,
            )
            totals = {name: reduce(pair) for name, pair in pairs.items()}
            metrics |= self._statistics(batch) | {name: _ratio(pair) for name, pair in totals.items()}
            metrics |= staleness
            metrics["groups"] = float(min(len(passing), self._numbers.groups))
        factor = learning_rate_factor(step, self._config.lr_sched, total_steps=self._plan.config.runner.max_steps)
        set_learning_rates(self._optimizer, factor)
        # Draws in a pass (dropout in adapters) depend on the step alone, as all randomness does.
        torch.manual_seed(derived_seed(self._config.seed, step, self.context.rank, bits=32))
        warm_up = False
        if self._critic is not None:
            with self._timer.phase("critic"):
                metrics |= self._critic.train(batch, step=step, learning_rate_factor=factor)
                self._critic.model.update_statistics(trajectories, reduce)
            batch = replace(batch, values=None, returns=None, value_mask=None)
            warm_up = step < algorithm.critic_warmup_steps
        if self._config.encode_once and not warm_up:
            with self._timer.phase("encoding"):
                batch = self._scorer.encode(batch)
        self._policy.train()
        with self._timer.phase("update"):
            if not warm_up:
                metrics |= self._updater.run(batch, step=step, kl_beta=beta if algorithm.kl_in == "loss" else 0.0)
            self._policy.update_statistics(trajectories, reduce)
        metrics["learning_rate"] = self._config.optim.lr * factor
        if algorithm.kl_beta > 0:
            metrics["kl_beta"] = beta
            divergence = metrics.get("reference_kl", math.nan)
            # A step that left the policy alone says nothing of how far training moves it.
            moved = metrics.get("optimizer_steps") and step >= algorithm.critic_warmup_steps
            if moved and math.isfinite(divergence):
                self._kl.update(divergence, sequences=int(totals["score"][1]))
        return metrics

    def save(self, directory: Path, *, contents: Sequence[str] = ("model", "optimizer")) -> None:
        """Write this rank's shards into ``directory``."""
        optimizer = self._optimizer if "optimizer" in contents else None
        critic = self._trained_critic(with_optimizer="optimizer" in contents)
        try:
            checkpoints.shards.save_actor(self._policy, optimizer, directory, self._extra_state(), critic=critic)
            if self.context.rank == 0:
                self._record.write(directory)
                self._snapshot(contents)(directory)
        except (Exception, checkpoints.shards.CheckpointException) as error:  # the latter is no Exception
            raise checkpoints.shards.write_error(error, directory) from error
        self._written = directory

    def begin_save(self, publication: Publication, *, contents: Sequence[str]) -> None:
        """Copy this rank's shards and start to write them; the checkpoint gets its name when all ranks are done."""
        optimizer = self._optimizer if "optimizer" in contents else None
        critic = self._trained_critic(with_optimizer="optimizer" in contents)
        state = checkpoints.shards.actor_state(self._policy, optimizer, self._extra_state(), critic=critic)
        write_rest = self._snapshot(contents)

        def complete() -> None:
            if self.context.rank == 0:
                self._record.write(publication.scratch)
                write_rest(publication.scratch)
                seal(publication.scratch, publication.state)
                publish(publication.scratch, publication.directory, max_keep=publication.max_keep)

        self._writer = self._writer or checkpoints.shards.AsyncWriter()
        self._writer.begin(state, publication.scratch / checkpoints.shards.ACTOR_DIR, complete)
        self._written = publication.scratch

    def _snapshot(self, contents: Sequence[str]) -> Callable[[Path], None]:
        """Copy what a checkpoint of these ``runner.save_contents`` holds beside shards and record; returns what writes
        it."""
        del contents
        return lambda directory: None

    def finish_save(self, directory: Path) -> None:
        """Return when what :meth:`save` or :meth:`begin_save` writes into ``directory`` is there.

        Raises:
            CheckpointError: it could not be written, or that was interrupted.
        """
        try:
            if self._writer is not None:
                self._writer.wait()
        except (Exception, checkpoints.shards.CheckpointException) as error:
            raise checkpoints.shards.write_error(error, directory) from error
        if self._written != directory:
            raise CheckpointError(f"{directory}: writing was interrupted")

    def load(self, directory: Path, *, weights_only: bool) -> None:
        """Read what :meth:`save` wrote, with any number of ranks."""
        extra = self._extra_state()
        optimizer = None if weights_only else self._optimizer
        critic = self._trained_critic(with_optimizer=not weights_only)
        checkpoints.shards.load_actor(self._policy, optimizer, directory, extra, critic=critic)
        if self._state is not None:
            self._state.leave_device()
        if self._critic is not None:
            self._critic.leave_device()
        self._sender.restart()
        if not weights_only and "kl_beta" in extra:
            self._kl.beta = float(extra["kl_beta"])

    def _trained_critic(self, *, with_optimizer: bool) -> checkpoints.shards.Trained | None:
        if self._critic is None:
            return None
        return self._critic.model, self._critic.optimizer if with_optimizer else None

    def _extra_state(self) -> dict[str, torch.Tensor]:
        """Tensors that change from step to step beside weights and optimiser."""
        if self._algorithm.kl_ctrl.type == "fixed":
            return {}
        return {"kl_beta": torch.tensor(self._kl.beta, dtype=torch.float64)}

    def _staleness(self, step: int) -> dict[str, float]:
        """The most updates that what was received is behind training step ``step``'s weights, over all ranks.

        Raises:
            RuntimeError: it is more than the bound, so nothing is trained on it.
        """
        if not self._plan.staleness_bound:
            return {}
        own = max((step - int(t.policy_versions.min()) for t in self._received), default=0)
        oldest = int(max_over_ranks(self.context.device)(torch.tensor([own], dtype=torch.float64)))
        if oldest > self._plan.staleness_bound:
            raise RuntimeError(
                f"training step {step + 1}: got a sample made {oldest} updates ago, expected at most "
                f"{self._plan.staleness_bound} (rollout.max_staleness)"
            )
        return {"staleness": float(oldest)}

    def _passing_groups(self) -> torch.Tensor:
        """[*] int64: this rank's groups that can be trained on."""
        passing = [t.group_ids[passing_members(t, self._algorithm)] for t in self._received]
        return torch.cat(passing).unique() if passing else torch.zeros(0, dtype=torch.int64)

    def _statistics(self, batch: TrainBatch) -> dict[str, float]:
        """Advantages and returns over the valid units of all ranks."""
        reduce = sum_over_ranks(self.context.device)
        mean, variance = mean_and_variance(reduce(masked_moments(batch.advantages, batch.loss_mask)))
        numbers = {"advantage_mean": mean.item(), "advantage_std": variance.sqrt().item()}
        if batch.returns is not None and batch.values is not None and batch.value_mask is not None:
            mean, variance = mean_and_variance(reduce(masked_moments(batch.returns, batch.value_mask)))
            numbers |= {"return_mean": mean.item(), "return_std": variance.sqrt().item()}
            numbers["explained_variance"] = explained_variance(
                batch.values, batch.returns, batch.value_mask, reduce=reduce
            )
        return numbers


def place(trajectory: Trajectory) -> tuple[int, int]:
    """Where it stands among a training step's."""
    return trajectory.rollout_epoch, int(trajectory.env_ids[0])


def _ratio(pair: torch.Tensor) -> float:
    return float(pair[0] / pair[1]) if pair[1] else float("nan")
