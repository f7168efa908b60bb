"""Truncate pretrained models by their weights, by their activations, and on top of a frozen residual.

    SHARDING_DATA=FOLDER python benchmarks/calibration.py [minilm] [gpt] [--train 800] [--test 600] [--calibration 128]

Nothing is fine-tuned after a truncation.

- `minilm`: a text encoder turns documents of 20 Newsgroups into mean-pooled features. For each truncation, the relative
  error of the features of test documents, and the test accuracy of a logistic regression on features. The calibration
  documents are training documents, without their labels. FOLDER holds `minilm/` (all-MiniLM-L6-v2 in Hugging Face's
  layout) and `newsgroups20/` (`train.parquet`, `test.parquet`, with the columns `text` and `label`). Writes
  results/calibration/calibration.csv.
- `gpt`: a GPT of 0.8 million parameters is first trained here, on the characters of Shakespeare's plays. For each
  truncation, the perplexity of a character of the test set. FOLDER holds `shakespeare/`, as for `data=shakespeare`.
  Writes results/calibration/gpt.csv.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from measure import save_rows
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library

from models import build_model
from sharding import factorize
from train.data import Dataset, load_dataset

Batch = dict[str, Tensor]
Row = dict[str, str]
BATCH = 16
RESULTS = Path(__file__).parents[1] / "results" / "calibration"
FEW = 1 / 24  # of the terms, on top of a residual: 16 of 384


def truncations(model: nn.Module, calibration: Sequence[object], **options: object) -> Iterator[tuple[Row, nn.Module]]:
    """Yield the model and each truncation of it, with the share of its terms, its residual, and what chose its terms.

    `calibration` has batches of its inputs, and the options are those of `factorize`.
    """

    def case(share: str, residual: str = "none", terms_by: str = "weights") -> Row:
        return {"keep_ratio": share, "residual": residual, "terms_by": terms_by}

    yield case("all"), model
    for share in (0.1, 0.25, 0.5):
        yield case(f"{share:.3g}"), factorize(model, share, **options)
        by_activations = factorize(model, share, calibration=calibration, **options)
        yield case(f"{share:.3g}", terms_by="activations"), by_activations
    for residual in ("int4", "int8"):
        yield case(f"{FEW:.3g}", residual), factorize(model, FEW, residual_format=residual, **options)


def load_documents(folder: Path, split: str, count: int, tokens: int) -> tuple[list[Batch], np.ndarray]:
    """Return the first documents of each class in turn, tokenized in batches of similar length, and their labels."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    table = pd.read_parquet(folder / "newsgroups20" / f"{split}.parquet")
    table = table.assign(turn=table.groupby("label").cumcount()).sort_values(["turn", "label"], kind="stable")[:count]
    tokenizer = AutoTokenizer.from_pretrained(folder / "minilm")
    batches = [
        dict(tokenizer(texts, truncation=True, max_length=tokens, padding=True, return_tensors="pt"))
        for texts in (table["text"].tolist()[start : start + BATCH] for start in range(0, len(table), BATCH))
    ]
    return batches, table["label"].to_numpy()


@torch.no_grad()
def features_of(model: nn.Module, batches: list[Batch]) -> np.ndarray:
    """Return the mean over each document's tokens of the last layer."""
    means = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        means.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(means).numpy()


def accuracy(train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> float:
    """Return the test accuracy of a logistic regression, in percent."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    return 100 * float(probe.fit(train, train_labels).score(test, test_labels))


def minilm(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each truncation of the text encoder."""
    from transformers import AutoModel  # noqa: PLC0415

    model = AutoModel.from_pretrained(folder / "minilm", dtype=torch.float32).eval()
    train, train_labels = load_documents(folder, "train", args.train, args.tokens)
    test, test_labels = load_documents(folder, "test", args.test, args.tokens)
    exact = features_of(model, test)
    for case, each in truncations(model, train[: args.calibration // BATCH], skip=["pooler"]):
        features = features_of(each, test)
        error = np.linalg.norm(features - exact) / np.linalg.norm(exact)
        percent = accuracy(features_of(each, train), train_labels, features, test_labels)
        yield case | {"feature_error": f"{error:.3f}", "accuracy": f"{percent:.1f}"}


def train_gpt(data: Dataset, steps: int) -> nn.Module:
    """Return a small GPT that was trained on lines of the plays."""
    torch.manual_seed(0)
    shape = {"width": 128, "depth": 4, "heads": 4, "dropout": 0.0}
    model = build_model("gpt_tiny", input_shape=data.input_shape, num_classes=data.num_classes, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(data.train), (2 * BATCH,))
        optimizer.zero_grad()
        loss_of(model, data, data.train.inputs[rows], data.train.targets[rows]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def loss_of(model: nn.Module, data: Dataset, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a character."""
    return F.cross_entropy(model(inputs).mT, targets, ignore_index=data.ignore_index)


@torch.no_grad()
def perplexity(model: nn.Module, data: Dataset, count: int) -> float:
    """Return the perplexity of a character in the first lines of the test set."""
    return float(loss_of(model, data, data.test.inputs[:count], data.test.targets[:count]).exp())


def gpt(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each truncation of a GPT that is trained first."""
    data = load_dataset("shakespeare", root=folder)
    model = train_gpt(data, args.steps)
    for case, each in truncations(model, data.train.inputs[: args.calibration].split(BATCH)):
        yield case | {"perplexity": f"{perplexity(each, data, args.test):.2f}"}


MODELS = {"minilm": (minilm, "calibration.csv"), "gpt": (gpt, "gpt.csv")}


def main() -> None:
    """Measure every truncation of each model, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"which of {', '.join(MODELS)}; by default all")
    parser.add_argument("--train", type=int, default=800, help="documents that the regression is fitted on")
    parser.add_argument("--test", type=int, default=600, help="documents or lines that are tested")
    parser.add_argument("--calibration", type=int, default=128, help="training samples that the model is shown")
    parser.add_argument("--tokens", type=int, default=48, help="of a document")
    parser.add_argument("--steps", type=int, default=500, help="that the GPT is trained for")
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(MODELS)}")
    folder = Path(os.environ.get("SHARDING_DATA") or "data").expanduser()
    for name in args.models or MODELS:
        measure, file = MODELS[name]
        rows = []
        for row in measure(folder, args):
            print(row, flush=True)
            rows.append(row)
            save_rows(RESULTS / file, rows)


if __name__ == "__main__":
    main()
