import pytest
import torch.distributed as dist


@pytest.fixture
def group(tmp_path):
    """Be a process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
