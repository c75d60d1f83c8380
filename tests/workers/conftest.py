from tests.training.conftest import mesh, two_ranks

__all__ = ["mesh", "two_ranks"]
