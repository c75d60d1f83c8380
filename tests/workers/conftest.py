from tests.training.conftest import mesh

__all__ = ["mesh"]
