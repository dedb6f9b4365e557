import pytest
import torch


@pytest.fixture
def pretended_ranks():
    """Process groups whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start = torch.distributed.init_process_group
    yield lambda size: start("fake", store=FakeStore(), rank=0, world_size=size)
    torch.distributed.destroy_process_group()
