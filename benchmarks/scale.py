"""Measure one round of models from 11 million to a billion parameters: seconds, memory, bytes a client.

    python benchmarks/scale.py [resnet18 vit_b ...] [--threads 2]

Ten clients at r = 0.1 (`collective`) take part; the models have random weights, in float32. The server plans a round,
cuts the shards one by one, and averages the updates as they come. Then one client builds its model from a skeleton and
takes one step. In the models with `_int4` the server holds a tenth of the terms as factors, on top of a frozen residual
in 4 bits, which the client has, too. Factors and residual are random; nothing is factorized. Server and client of each
model run in separate processes, and memory is what it takes beyond the libraries, with glibc's own allocator. Writes a
row to results/scale/scale.csv as each model is done; without names, it measures the models that have none. Linux only.
"""

import argparse
import csv
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from measure import forget_peak, in_new_process, resident, save_rows
from torch import Tensor, nn
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).parents[1]))  # `models` runs from a checkout

from models import build_model
from sharding import (
    FactorizedLayer,
    Frozen,
    Plan,
    Server,
    Shard,
    ShardPlanner,
    Update,
    client_model,
    clip_and_decay,
    init_empty,
    shardable_layers,
)
from sharding.layers.decomposition import form_of
from sharding.layers.registry import factorize_empty
from sharding.matrices.quantization import quantize
from sharding.rounds.aggregation.aggregate import Outcome
from sharding.terms.strategies import num_terms

KEEP_RATIO, NUM_CLIENTS = 0.1, 10
Row = dict[str, str | int | float]


def vit_b() -> nn.Module:
    """Return timm's ViT-B/16."""
    from timm import create_model  # noqa: PLC0415 - the library does without

    return create_model("vit_base_patch16_224")


def gpt2(layers: int = 24, vocabulary: int = 50257) -> nn.Module:
    """Return GPT-2 medium, or one of fewer layers."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    shape = {"n_embd": 1024, "n_layer": layers, "n_head": 16, "vocab_size": vocabulary}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, use_cache=False))


def llama() -> nn.Module:
    """Return a decoder of 1.1 billion parameters, of TinyLlama's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=4, use_cache=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: gpt2(layers=1, vocabulary=256),
    "blocks": lambda: gpt2(layers=6, vocabulary=256),
    "resnet18": lambda: build_model("resnet18_gn", input_shape=(3, 32, 32), num_classes=10),
    "vit_b": vit_b,
    "gpt2_medium": gpt2,
    "llama": llama,
}
ON_RESIDUAL = {f"{name}_int4": name for name in ("gpt2_medium", "llama")}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "resnet18": lambda: torch.randn(8, 3, 32, 32),
    "vit_b": lambda: torch.randn(8, 3, 224, 224),
}


def plan_round(server: Server) -> Plan:
    """Plan a round of ten clients."""
    return server.plan(dict.fromkeys(range(NUM_CLIENTS), KEEP_RATIO), round=0)


def trained(shard: Shard) -> Update:
    """Return an update of the size of a trained one, in its own memory."""
    terms = {name: replace(each, u=each.u * 1.001, v=each.v * 1.001) for name, each in shard.terms.items()}
    return Update(terms, {name: part * 1.001 for name, part in shard.whole.items()}, shard.keep_ratio, shard.plan_id)


def aggregate(server: Server, plan: Plan) -> Outcome:
    """Average the clients' updates one by one, and take the server's step."""
    average = server.average(plan)
    for client, shard in plan.shards():
        average.add(client, trained(shard))
    return server.step(average)


def skeleton_of(name: str) -> nn.Module:
    """Return a model without values, whose parameters take no memory."""
    with init_empty():
        return MODELS[ON_RESIDUAL.get(name, name)]()


def random_factors(name: str) -> nn.Module:
    """Return a model as `factorize` makes it, with random factors and residuals, without decomposing anything."""
    model = skeleton_of(name)
    terms = {layer: num_terms(form_of(part).rank, KEEP_RATIO) for layer, part in shardable_layers(model).items()}
    model = factorize_empty(model, terms, dict.fromkeys(terms, "int4"))
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for key, part in module._parameters.items():
            if part is not None and part.is_meta:
                made.setdefault(id(part), nn.Parameter(0.02 * torch.randn(part.shape)))
                module._parameters[key] = made[id(part)]
        if isinstance(module, FactorizedLayer):
            module.multipliers = torch.ones(module.num_terms)
            module.residual = quantize(0.02 * torch.randn(len(module.u), module.columns), "int4")
    return model


def serve(name: str, path: Path, threads: int) -> Row:
    """Measure the server of one round, and leave a client's shard in a file."""
    torch.set_num_threads(threads)
    small = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))  # what a first round loads is not the model's
    first = Server(small, ShardPlanner("collective"))
    aggregate(first, plan_round(first))
    skeleton_of(name)  # imports what builds it
    before = resident("VmRSS")
    model = random_factors(name) if name in ON_RESIDUAL else MODELS[name]()
    parameters = sum(part.numel() for part in skeleton_of(name).parameters())
    server = Server(model, ShardPlanner("collective"))
    forget_peak()
    start = perf_counter()
    plan = plan_round(server)
    planned, plan_peak = perf_counter(), resident("VmHWM")
    outcome = aggregate(server, plan)
    done, round_peak = perf_counter(), resident("VmHWM")
    assert len(outcome.accepted) == NUM_CLIENTS
    shard = plan.shard(0)
    shard.write(path / "shard")
    server.frozen.write(path / "residual")
    return {
        "model": name,
        "parameters": parameters,
        "client_bytes": shard.nbytes,
        "residual_bytes": server.frozen.nbytes if server.frozen.residuals else 0,
        "threads": threads,
        "plan_seconds": round(planned - start, 2),
        "aggregate_seconds": round(done - planned, 2),
        "plan_peak": round((plan_peak - before) / (4 * parameters), 2),
        "round_peak": round((round_peak - before) / (4 * parameters), 2),
    }


def train(name: str, path: Path) -> Row:
    """Measure a client that builds its model from a skeleton and a shard, and takes one step."""
    batch = INPUTS.get(name, lambda: torch.randint(256, (1, 128)))()  # tokens, if not images
    small = nn.Linear(256, 256)
    small(torch.randn(256, 256)).sum().backward()
    skeleton = skeleton_of(name)
    parameters = sum(part.numel() for part in skeleton.parameters())
    before = resident("VmRSS")
    forget_peak()
    frozen = Frozen.read(path / "residual") if name in ON_RESIDUAL else None
    model = client_model(skeleton, Shard.read(path / "shard"), copy=False, frozen=frozen).train()
    built = resident("VmHWM")
    output = model(batch)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    optimizer.register_step_pre_hook(clip_and_decay(model))
    (output if isinstance(output, Tensor) else output.logits).square().mean().backward()
    optimizer.step()
    return {
        "client_model_peak": round((built - before) / (4 * parameters), 3),
        "client_step_peak": round((resident("VmHWM") - before) / (4 * parameters), 3),
    }


def measure(name: str, threads: int) -> Row:
    """Measure server and client of one model, each in a process of its own."""
    with TemporaryDirectory() as folder:
        path = Path(folder)
        return in_new_process(serve, name, path, threads) | in_new_process(train, name, path)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MODELS, *ON_RESIDUAL]
    parser.add_argument("models", nargs="*", help=f"which of {', '.join(names)}; by default what is missing")
    parser.add_argument("--threads", type=int, default=2, help="threads of the server")
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in names]:
        parser.error(f"{unknown[0]} is not one of {', '.join(names)}")
    path = Path(__file__).parents[1] / "results" / "scale" / "scale.csv"
    rows = {row["model"]: row for row in csv.DictReader(path.open())} if path.exists() else {}
    for name in args.models or [name for name in names if name not in rows]:
        rows[name] = measure(name, args.threads)
        print(rows[name], flush=True)
        save_rows(path, [rows[model] for model in names if model in rows])


if __name__ == "__main__":
    main()
