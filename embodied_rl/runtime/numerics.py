"""How torch calculates in a run's workers. Without torch until it is applied: a worker's process reads this first."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from embodied_rl.errors import UserError

_CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
_REFUSALS: Final = ("does not have a deterministic implementation", "Deterministic behavior was enabled")
"""Parts of torch's messages, the second that of cuBLAS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """torch's settings of a whole process; the defaults are torch's own."""

    matmul_precision: str = "highest"
    """Of float32 products, as ``torch.set_float32_matmul_precision`` takes it."""
    cudnn_tf32: bool = True
    """cuDNN may round the inputs of float32 convolutions to TF32."""
    deterministic: bool = False
    """Operations give the same bits each time, or raise."""

    @staticmethod
    def current() -> Numerics:
        """Those of this process."""
        import torch

        return Numerics(
            matmul_precision=torch.get_float32_matmul_precision(),
            cudnn_tf32=torch.backends.cudnn.allow_tf32,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """What cuBLAS and torch's compiler read from the environment when they start: the workspaces that cuBLAS needs
        to repeat its sums, and no choice of kernels by their speed."""
        if not self.deterministic:
            return {}
        return {_CUBLAS: os.environ.get(_CUBLAS, ":4096:8"), "TORCHINDUCTOR_DETERMINISTIC": "1"}

    def apply(self) -> None:
        """Make them this process's.

        Raises:
            UserError: it is too late for that.
        """
        import torch

        if self.deterministic and torch.cuda.is_initialized() and _CUBLAS not in os.environ:
            raise UserError(
                f"runner.deterministic=true: this process has used CUDA before, and cuBLAS reads {_CUBLAS} when it "
                f"starts; set {_CUBLAS}=:4096:8 in the environment, or use cluster=process"
            )
        os.environ.update(self.environment)
        if compiler := sys.modules.get("torch._inductor.config"):  # it has read the environment
            compiler.deterministic = self.deterministic  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:  # imports the compiler: 70 MB
            torch.use_deterministic_algorithms(self.deterministic)
        torch.backends.cudnn.deterministic = self.deterministic
        if self.deterministic:
            torch.backends.cudnn.benchmark = False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """They are this process's in the block."""
        before, variables = Numerics.current(), {name: os.environ.get(name) for name in self.environment}
        self.apply()
        try:
            yield
        finally:
            before.apply()
            for name, value in variables.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say of an operation that cannot repeat its result which key refuses it, and where it is.

        Raises:
            UserError: instead of torch's error.
        """
        try:
            yield
        except RuntimeError as error:
            if not self.deterministic or not any(part in str(error) for part in _REFUSALS):
                raise
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
            what = str(error).split(", but you set")[0].split(". ")[0]
            raise UserError(
                f"runner.deterministic=true: {what} ({frames[-1].filename}, line {frames[-1].lineno}); set it to "
                "false, or use a policy or loss without that operation"
            ) from error
