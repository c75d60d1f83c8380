"""``runner`` and ``cluster``: a run's length, files and placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied_rl.schema.types import (
    Fraction,
    Interval,
    NonEmptyString,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    ThreadCount,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig(Section):
    logger_backends: list[str]
    """Any of console, tensorboard, jsonl, wandb, or from outside: an entry point, ``module:Class`` or
    ``path/to/file.py:Class``."""
    params: dict[str, dict[str, Any]]
    """Backend -> its own options: its ``Params`` dataclass documents them. A class of a module or file goes by its bare
    name."""
    project_name: str
    """Project in Weights & Biases."""
    wandb: dict[str, Any]
    """Passed to ``wandb.init`` (mode, entity, tags, ...). The API key stays in the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig(Section):
    task_type: str
    """Task: a name in ``tasks/table.py``; set by ``task=``."""
    experiment_name: str
    """First part of the run directory's name."""
    about: NonEmptyString | None
    """What the run does, in a sentence, for who starts a recipe: the first line on the console, and on its page."""
    output_dir: str
    """Run directories are made here: ``<output_dir>/<experiment_name>/<time>``."""
    max_steps: Annotated[int, Field(ge=0, le=10**9)]
    """RL steps: rollout, advantages, update."""
    val_check_interval: Interval
    """Evaluate every so many steps; -1: never during training."""
    val_before_train: bool
    """Evaluate the policy before the first step: the baseline."""
    eval_at_end: bool
    """Evaluate after the last step."""
    stop_at: Fraction | None
    """End, with a checkpoint, when an evaluation of ``val_check_interval`` has this success rate or accuracy; null:
    train all steps."""
    save_interval: Interval
    """Save a checkpoint every so many steps and at the end; -1: not by steps."""
    save_interval_seconds: PositiveFloat | None
    """Also when so many seconds have passed since the last checkpoint, after the training step; null: not by time."""
    save_async: bool
    """Go on training while a checkpoint is written, from a copy in host memory."""
    save_contents: list[Literal["model", "optimizer"]]
    """Contents of a checkpoint. Without the optimiser it is smaller, and no run can resume it."""
    weight_sync_interval: PositiveInt
    """Training steps between two versions of the weights that rollouts are made with."""
    max_keep: PositiveInt | None
    """Keep only the newest checkpoints; null keeps all."""
    deterministic: bool
    """Let torch use only operations that give the same bits each time, in every worker: a run repeats itself on an
    accelerator, too, if slower. An operation without such an implementation ends the run and is named."""
    trace_steps: list[PositiveInt]
    """Training steps, from 1, of which ``trace.json`` shows what each worker did when (ui.perfetto.dev)."""
    resume_dir: str | None
    """A checkpoint, or a run directory (its newest), to resume; ``auto``: this experiment's newest, if there is."""
    init_from: str | None
    """A checkpoint, or a run's or an experiment's directory (its newest): start from its weights, at step 0. A run that
    resumes goes on from its own instead."""
    recover: Literal["never", "auto"]
    """auto: after a failure that ends the run, go on from its newest whole checkpoint in the same command; and resume
    past damaged ones, which are set aside."""
    max_recoveries: PositiveInt
    """At most so many times, and only while new checkpoints are made in between."""
    only_eval: bool
    """Evaluate the policy (of ``resume_dir``, if given) and stop."""
    report: bool
    """End with a page of the run, ``report.html`` in its directory."""
    logger: LoggerConfig

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.save_interval > 0 or self.save_interval_seconds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroupConfig(Section):
    """Nodes of one kind."""

    nodes: PositiveInt = 1
    """How many."""
    slots: PositiveInt = 1
    """Ranks on each."""
    accelerators: NonNegativeInt = 0
    """GPUs of each, for its first ranks; envs may have further ranks."""
    resources: dict[str, PositiveFloat] = field(default_factory=dict)
    """What else Ray must have on each, by Ray's names: ``{sim: 1}`` of ``ray start --resources``."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers there."""
    interface: str | None = None
    """Network interface between the nodes; null: the one that Ray uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Section):
    backend: Literal["serial", "process", "ray"]
    """serial: all workers in this process, one thread, for a debugger; process: a process each; ray: a process each, on
    the nodes of a Ray cluster."""
    address: NonEmptyString
    """Of ``backend: ray``. local: a Ray of the run's own on this machine; auto or host:port: one that runs."""
    node_groups: dict[str, NodeGroupConfig]
    """Of ``backend: ray``: name -> nodes (empty: one), in the order in which ranks count through them. ``sim:0-3`` in
    ``component_placement`` are the first four ranks of the group ``sim``."""
    wait_for_nodes: PositiveFloat
    """Of ``backend: ray``: seconds to wait for the nodes, at the start and when the run goes on after it lost one."""
    component_placement: dict[str, str | int] | Literal["auto"]
    """Component -> ranks: ``all``, ``3``, ``0,2,3``, ``0-3``, ``0-3,5``. A rank is an accelerator, or a process slot on
    a machine without one. Components may share a line: ``actor,rollout: 0-3``. auto, in ``task=embodied`` on one
    machine: measures what env workers, policy and update take, then chooses the fastest number of env workers,
    ``rollout.pipeline_stage_num`` and ``num_threads.actor``; a resumed run keeps what was chosen."""
    num_threads: dict[str, ThreadCount | Literal["auto"]]
    """Component -> CPU threads of torch in each of its workers. auto, for the actor: the cores that the run may use,
    shared by its ranks, less those of workers that go on during an update. Sums are rounded as their number has it."""
    cpu_affinity: dict[str, str | int]
    """Component -> CPU cores, ``0-7`` or ``0-3,8``, dealt out evenly over its workers of a machine; or ``numa``: each
    worker has those of a NUMA node, that of its accelerator where it has one. Others use all cores."""
    env_vars: dict[str, dict[str, str]]
    """Component -> environment variables of its workers' processes, beside those of the command. Quote what looks like
    a number; keys and passwords belong in the environment itself."""
    matmul_precision: Literal["highest", "high", "medium"]
    """Precision of float32 matrix products in every worker, as in ``torch.set_float32_matmul_precision``. highest:
    float32; high: inputs rounded to TF32, or to two bfloat16 numbers; medium: to bfloat16. Hardware without such units
    goes on with float32."""
    cudnn_tf32: bool
    """Let convolutions in float32 round their inputs to TF32 on an accelerator that has it, as torch does by itself."""
    stall_timeout: PositiveFloat
    """Seconds without a sign of life from any worker after which the run stops and prints every worker's stack."""
    memory_limit: PositiveFloat | None
    """GiB of memory that the run's processes may hold together: a run that needs more by estimate is refused, one that
    comes to hold more ends with a table of them. null: as much as there is."""
