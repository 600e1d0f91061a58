"""Small documents, tokenizers and datasets for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fast_llm_ssm.data import Dataset, build_dataset
from fast_llm_ssm.data.config import DataConfig
from fast_llm_ssm.data.documents import Documents, collect


def tokenized(documents: Sequence[Sequence[int]]) -> Documents:
    """Documents in memory, of these ids."""
    ids = [np.array(document, dtype="<u2") for document in documents]
    return collect(((document, index) for index, document in enumerate(ids)), np.dtype("<u2"))


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """A file with one document a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_dataset(*sources: dict[str, Any], seed: int = 0, **data: Any) -> Dataset:
    """A dataset of bytes, with rows of 16 tokens unless `data` says otherwise."""
    values = {"sources": list(sources), "tokenizer": {"type": "bytes"}, "sequence_length": 16} | data
    return build_dataset(DataConfig.model_validate(values), seed)


def make_tokenizer_folder(folder: Path, bos: bool = True, eos: bool = True) -> Path:
    """A Hugging Face tokenizer of 256 bytes and a few merges."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat and the bat " * 10], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>"} | ({"eos_token": "</s>"} if eos else {})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
