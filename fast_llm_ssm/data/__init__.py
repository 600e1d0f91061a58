"""Text to packed batches."""

from .batch import Batch
from .bigram import Bigram, bigram_baseline
from .config import DataConfig, PrepareConfig, TokenizerConfig, ValidationConfig, tokenizers
from .dataset import Dataset, build_dataset, changed_parts
from .loader import Loader
from .prepare import Document
from .sources import FileSource, SourceConfig, data_sources
from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Bigram",
    "ByteTokenizer",
    "DataConfig",
    "Dataset",
    "Document",
    "FileSource",
    "HuggingFaceTokenizer",
    "Loader",
    "PrepareConfig",
    "SourceConfig",
    "Tokenizer",
    "TokenizerConfig",
    "ValidationConfig",
    "bigram_baseline",
    "build_dataset",
    "changed_parts",
    "data_sources",
    "load_tokenizer",
    "tokenizers",
]
