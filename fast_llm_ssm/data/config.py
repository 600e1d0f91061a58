"""The `data:` section of a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from fast_llm_ssm.config import Config, Registry

from .sources import SourceConfig, TokensSource, data_sources, not_empty
from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, check_tokenizer_folder


class TokenizerConfig(Config):
    """A tokenizer.

    Attributes:
        type: The registered name.
    """

    type: str

    def load(self) -> Tokenizer:
        """The tokenizer."""
        raise NotImplementedError


tokenizers: Registry[TokenizerConfig] = Registry("tokenizer", "fast_llm_ssm.tokenizers")


@tokenizers.register("bytes")
class BytesConfig(TokenizerConfig):
    """Bytes of UTF-8, with a bos and an eos: 258 ids."""

    type: Literal["bytes"] = "bytes"

    def load(self) -> Tokenizer:
        return ByteTokenizer()


@tokenizers.register("huggingface")
class HuggingFaceConfig(TokenizerConfig):
    """A tokenizer folder as transformers writes it.

    Attributes:
        path: The folder, relative to the working directory; nothing is downloaded.
    """

    type: Literal["huggingface"] = "huggingface"
    path: Path

    @field_validator("path")
    @classmethod
    def _holds_a_tokenizer(cls, path: Path) -> Path:
        check_tokenizer_folder(path)
        return path

    def load(self) -> Tokenizer:
        return HuggingFaceTokenizer(self.path)


Source = Annotated[SourceConfig, data_sources]


class ValidationConfig(Config):
    """What the validation loss is measured on: `fraction` or `sources`.

    Attributes:
        fraction: Share of the training documents to hold out, chosen by a hash of their text: copies of a document stay
            on one side, and the choice is the same in every run.
        sources: Sources of their own; weights mean nothing here.
        max_rows: Rows of sequence_length tokens to use at most, taken from the sources in turn; null uses all.
    """

    fraction: float | None = Field(default=None, gt=0, lt=1)
    sources: tuple[Source, ...] = ()
    max_rows: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> ValidationConfig:
        if (self.fraction is None) == (not self.sources):
            got = "neither" if self.fraction is None else "both"
            raise ValueError(f"got {got} of `fraction` and `sources`, expected one of them")
        for index, source in enumerate(self.sources):
            if source.weight != 1.0:
                raise ValueError(
                    f"sources.{index}.weight: got {source.weight}, expected none, as validation has no weights"
                )
        return self


class DataConfig(Config):
    """What to train on.

    Attributes:
        sources: Where the documents come from.
        tokenizer: Makes the ids; may be left out where a source is of type `tokens`, which brings its own.
        sequence_length: Tokens of a row.
        packing: Fill rows with documents one after the other, kept apart in the model; false puts (a part of) one
            document in each row and pads.
        shuffle: Shuffle documents and rows anew in each epoch.
        validation: What the validation loss is measured on; null for none.
        cache: A folder that keeps the tokens of `text` and `jsonl` sources between runs; null tokenizes into memory.
    """

    sources: Annotated[tuple[Source, ...], AfterValidator(not_empty)]
    tokenizer: Annotated[TokenizerConfig, tokenizers] | None = None
    sequence_length: int = Field(gt=0)
    packing: bool = True
    shuffle: bool = True
    validation: ValidationConfig | None = None
    cache: Path | None = None

    @model_validator(mode="after")
    def _has_a_tokenizer(self) -> DataConfig:
        if self.tokenizer is None and not any(isinstance(source, TokensSource) for source in self.sources):
            raise ValueError("tokenizer: missing, expected one as no source is of type `tokens`")
        return self


class PrepareConfig(Config):
    """What `fast-llm prepare` makes a folder of.

    Attributes:
        source: Where the documents come from.
        tokenizer: Makes the ids.
    """

    source: Source
    tokenizer: Annotated[TokenizerConfig, tokenizers]
