"""Sub-models by width: windows, their means, and FedAvg where the window is everything."""

import json
from pathlib import Path

import pytest
import torch

from studies import width
from train.config.schema import load_config
from train.experiment.assembly import assemble
from train.rounds import run_rounds

TINY = [
    "result=last",
    *("rounds=2", "evaluate_every=1", "keep_ratio=0.2", "model.width=8", "model.groups=4", "model.blocks=[1, 1]"),
    *("local.epochs=1", "local.decay=0", "engine=sequential"),
]


def test_windows_have_complete_groups_and_wrap_around():
    full, small = torch.zeros(8, 3, 16), torch.zeros(4, 3, 8)
    rows, colors, columns = width.windows(full, small, groups=4, shift=3)
    assert rows[:, 0, 0].tolist() == [6, 7, 0, 1]
    assert colors[0, :, 0].tolist() == [0, 1, 2]
    assert columns[0, 0].tolist() == [12, 13, 14, 15, 0, 1, 2, 3]
    assert width.windows(full, small, groups=4, shift=4)[0][:, 0, 0].tolist() == [0, 1, 2, 3]


def test_width_averages_of_entries_are_over_the_clients_with_them():
    averages = width.Averages({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    averages.add({"w": torch.tensor([10.0, 20.0])}, {"w": (torch.tensor([0, 1]),)}, 1.0)
    averages.add({"w": torch.tensor([40.0, 50.0])}, {"w": (torch.tensor([1, 2]),)}, 3.0)
    assert averages.state()["w"].tolist() == [10.0, 35.0, 50.0, 4.0]


@pytest.mark.parametrize(
    "server",
    [
        ["server_optimizer=plain"],
        ["server_optimizer=nesterov", "server_optimizer.momentum=0.8", "server_optimizer.lr=0.4"],
    ],
)
def test_width_run_with_the_full_window_equals_fedavg(server):
    config = load_config("configs/quickstart.yaml", [*TINY, "keep_ratio=1", "strategy=dense", *server])
    plain = assemble(config)
    plain.start()
    run_rounds(plain, 0)
    for kind in width.WINDOWS:
        ours = width.Federation.of(config, kind)
        for t in range(config.rounds):
            ours.train_round(t)
        torch.testing.assert_close(ours.model.state_dict(), plain.model.state_dict(), rtol=1e-5, atol=1e-6)


def test_width_run_sends_no_more_than_shards_and_trains_its_window(tmp_path):
    path = Path("configs/quickstart.yaml")
    width.run_all("rolling", {"run": load_config(path, [*TINY, f"output={tmp_path}"])})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    experiment = assemble(load_config(path, TINY))
    nbytes = experiment.server.planner.nbytes(experiment.model, 0.2)
    assert [line["round"] for line in lines] == [0, 1]
    assert all(0.3 * nbytes < line["bytes_up"] / 5 <= nbytes for line in lines)
    assert all(0 <= line["test_accuracy"] <= 1 for line in lines)
    ours = width.Federation.of(experiment.config, "rolling")
    before = ours.model.conv1.weight.clone()
    ours.train_round(t=1)
    changed = (ours.model.conv1.weight != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    channels = ours.clients[0.2].conv1.weight.shape[0]
    assert changed == sorted((channel + 2) % 8 for channel in range(channels))


def test_width_run_with_uneven_clients_trains_first_channels_of_weak_ones():
    uneven = ("keep_ratio={0.1: 0.6, 0.6: 0.4}", "model.width=16")
    config = load_config("configs/quickstart.yaml", [*TINY, *uneven])

    nested = width.Federation.of(config, "nested")
    invited = [c for c, r in nested.experiment.keep_ratios.items() if r == 0.1]
    nested.experiment.sampler.invite = lambda t: invited
    before, line = nested.model.conv1.weight.clone(), nested.train_round(0)
    aggregated, sent = line["num_aggregated"], line["bytes_down"]
    moved = (nested.model.conv1.weight != before).flatten(1).any(1)
    weak, strong = (width.nbytes(nested.clients[ratio].state_dict()) for ratio in (0.1, 0.6))
    channels = nested.clients[0.1].conv1.weight.shape[0]
    assert moved[:channels].all()
    assert not moved[channels:].any()
    assert moved.shape == nested.clients[0.6].conv1.weight.shape[:1]
    assert channels < len(moved)
    assert sent == aggregated * weak < aggregated * strong
