"""Train, look at the result, evaluate a checkpoint and act with it. Run: python examples/from_python.py"""

import numpy as np

import embodied_rl as er


class Watch(er.Callback):
    def on_evaluation(self, step: int, evaluation: er.Evaluation) -> None:
        print(f"--> after {step} steps: {evaluation.rate:.0%} of {evaluation.count} episodes")


run = er.train(
    "experiment=dummy_grpo",
    "runner.max_steps=20",
    "runner.val_check_interval=10",
    "env.eval.video_cfg.save_video=false",
    "runner.report=false",
    "cluster=serial",
    callbacks=[Watch()],
)
print(run)

again = er.evaluate(run.best or run, "env.eval.episodes_per_task=4", "runner.report=false")
for task in again.tasks:
    print(f"{task.rate:.0%}  {task.label}")

policy = er.load_policy(run.best or run)
print(policy.act(np.array([0.0, 0.0, 0.5, 0.5], np.float32)).round(2))
