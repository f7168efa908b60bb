"""What is told and drawn of a configuration before anything is trained."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from train.cli.inspection import inspect_partition
from train.config.schema import load_config
from train.experiment.assembly import assemble
from train.report.figures import partition_drawings

MLP = "model={name: mlp, hidden: [16, 16]}"


@pytest.fixture(scope="module")
def config():
    return load_config("configs/quickstart.yaml", [MLP])


@pytest.mark.usefixtures("undrawn")
def test_inspect_has_the_partition_and_keep_ratios_of_the_run(config, tmp_path):
    told = "\n".join(inspect_partition(config, tmp_path))
    part = assemble(config)
    parameters = sum(parameter.numel() for parameter in part.server.model.parameters())
    assert f"mlp: {parameters:,} parameters, {part.dense_nbytes:,} bytes; top_n shards " in told
    planned = part.server.plan({"0.2": 0.2, "0.4": 0.4}, 0)
    assert f"top_n shards {len(planned.spectra)} layers" in told
    for ratio in (0.2, 0.4):
        whose = ", ".join(str(client) for client, r in part.clients.keep_ratios.items() if r == ratio)
        assert f"keep ratio {ratio}: {planned.shard(str(ratio)).nbytes:,} bytes a shard" in told
        assert f" clients, {whose}\n" in told


@pytest.mark.usefixtures("undrawn")
def test_skip_names_the_layers_that_are_sent_whole_and_null_leaves_it_to_the_model(tmp_path):
    sharded = {}
    for skip in ("[first, last]", "null", "[fc, 'stages.1']"):
        config = load_config("configs/quickstart.yaml", [f"skip={skip}"])
        part = assemble(config)
        plan = part.server.plan({0: 0.2}, 0)
        told = "\n".join(inspect_partition(config, tmp_path))
        assert f"shards {len(plan.spectra)} layers" in told
        whole = next(line for line in told.splitlines() if line.startswith("layers that are sent whole: "))
        assert ("downsample" in whole) == (skip != "[first, last]")
        sharded[skip] = len(plan.spectra)
        rank = torch.linalg.matrix_rank(part.server.model.stages[1][0].downsample[0].weight.flatten(1))
        assert rank == (4 if skip == "[first, last]" else 16)  # init=low_rank cuts only what is sharded
    assert list(sharded.values()) == [8, 6, 6]


def test_inspect_writes_figures_and_reports_overwritten_ones(config, tmp_path):
    first = list(inspect_partition(config, tmp_path / "new"))
    names = [f"quickstart-{kind}.{end}" for kind in ("partition", "classes") for end in ("png", "svg")]
    assert first[-4:] == [f"wrote {tmp_path / 'new' / name}" for name in names]
    again = list(inspect_partition(config, tmp_path / "new"))
    assert again[-4:] == [line.replace("wrote", "overwrote") for line in first[-4:]]


def test_partition_figure_of_many_clients_draws_all_bars():
    count = 1000
    drawing = next(partition_drawings({"samples": [9] * count, "keep_ratios": [0.2] * count, "classes": None}, "many"))
    canvas = FigureCanvasAgg(drawing.figure)
    canvas.draw()
    (axes,) = drawing.figure.axes
    low, high = (axes.transData.transform((client, 5))[0] for client in (0, count - 1))
    height = canvas.buffer_rgba().shape[0] - int(axes.transData.transform((0, 5))[1])  # between two lines of the grid
    row = np.asarray(canvas.buffer_rgba())[height, int(low) + 1 : int(high), :3]
    assert (row != 255).any(axis=-1).all()


@pytest.mark.usefixtures("undrawn")
def test_inspect_of_several_tasks_reports_each(tmp_path):
    tasks = "tasks={one: {strategy: dense}, two: {keep_ratio: 0.1}}"
    sampler = ["clients.sampler=mmfl", "clients.sampler.signal=uniform", "clients.sampler.budget=2"]
    told = list(inspect_partition(load_config("configs/quickstart.yaml", [MLP, *sampler, tasks]), tmp_path))
    assert [line for line in told if "dense shards 0 layers" in line]
    drawn = {path.name for path in tmp_path.glob("*-partition.png")}
    assert drawn == {"quickstart-one-partition.png", "quickstart-two-partition.png"}


@pytest.mark.parametrize(("overrides", "told"), [([], True), (["init=as_built"], False), (["strategy=dense"], False)])
def test_inspect_tells_the_rank_where_the_start_is_of_low_rank(overrides, told, tmp_path):
    lines = inspect_partition(load_config("configs/quickstart.yaml", [MLP, *overrides]), tmp_path)
    assert any(line.startswith("rank: ") and line.endswith("0.4") for line in lines) == told
