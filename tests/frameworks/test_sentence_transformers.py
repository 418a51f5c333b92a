"""sentence-transformers over stio, with the trained all-MiniLM-L6-v2: the same files, weights and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import trained_model

sentence_transformers = pytest.importorskip("sentence_transformers")

Compare = Callable[..., Any]
TEXTS = [
    "A save is one step.",
    "The reader gets the old file or the new one.",
    "Ein Satz in einer anderen Sprache.",
    "x" * 600,
    "",
]


@pytest.fixture(scope="module")
def minilm() -> str:
    return str(trained_model())


def test_embeddings_of_the_trained_model(compare: Compare, minilm: str) -> None:
    def action(folder: Path) -> Any:
        module = sentence_transformers.SentenceTransformer(minilm, device="cpu")
        arrays = module.encode(TEXTS, batch_size=2)
        tensors = module.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
        return module, arrays, tensors, module.similarity(tensors, tensors)

    _, arrays, _, _ = compare(action)
    assert arrays.shape == (len(TEXTS), 384)


def test_the_trained_model_is_saved_and_loaded(compare: Compare, minilm: str) -> None:
    def action(folder: Path) -> Any:
        module = sentence_transformers.SentenceTransformer(minilm, device="cpu")
        module.save(str(folder / "copy"))
        again = sentence_transformers.SentenceTransformer(str(folder / "copy"), device="cpu")
        return again, again.encode(TEXTS)

    compare(action, saves=True)


def test_modules_with_weights_of_their_own(compare: Compare, minilm: str) -> None:
    """Dense layers are saved by `save_model`, in directories beside the transformer's."""
    from sentence_transformers.sentence_transformer.modules import Dense

    def action(folder: Path) -> Any:
        torch.manual_seed(1)
        whole = sentence_transformers.SentenceTransformer(minilm, device="cpu")
        module = sentence_transformers.SentenceTransformer(modules=[*whole, Dense(384, 16), Dense(16, 4)], device="cpu")
        module.save(str(folder / "copy"))
        again = sentence_transformers.SentenceTransformer(str(folder / "copy"), device="cpu")
        return module, again, again.encode(TEXTS)

    compare(action, saves=True)


def test_static_embeddings(compare: Compare, minilm: str) -> None:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    def action(folder: Path) -> Any:
        torch.manual_seed(1)
        tokenizer = Tokenizer.from_file(str(Path(minilm) / "tokenizer.json"))
        module = sentence_transformers.SentenceTransformer(
            modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu"
        )
        module.save(str(folder / "copy"))
        again = sentence_transformers.SentenceTransformer(str(folder / "copy"), device="cpu")
        return module, again, again.encode(TEXTS)

    compare(action, saves=True)
