"""What other libraries leave in the process that runs the tests: variables, a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()
