from collections.abc import Iterator

import pytest
import torch

# Tensors are small here: threads gain nothing, and waiting for each other on shared cores costs.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Compiled code and its limits on recompiles are per process, not per test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
