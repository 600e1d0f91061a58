"""Where documents come from. A source is a config class registered under the name that `type:` gives.

A source of text implements `documents`; a source that is tokenized already overrides `load`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
import tokenize as python_tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from fast_llm_ssm.config import Config, Registry, UserError

from .documents import Documents, read_meta, read_prepared
from .prepare import Document, prepare, tokenize
from .tokenizer import Tokenizer

_MEMORY_LIMIT = 1 << 30  # bytes of text tokenized into memory
_CHUNK = 1 << 20

T = TypeVar("T")


class SourceConfig(Config):
    """A source of documents.

    Attributes:
        type: The registered name.
        weight: Share of the training rows, relative to the other sources' weights.
    """

    type: str
    weight: float = Field(default=1.0, gt=0)

    def documents(self) -> Iterator[Document]:
        """The documents, in the same order every time."""
        raise NotImplementedError

    def num_bytes(self) -> int | None:
        """Bytes of the source for the progress bar, None where unknown."""
        return None

    def load(self, tokenizer: Tokenizer, cache: Path | None) -> Documents:
        """The tokenized documents.

        Args:
            tokenizer: Makes the ids.
            cache: A folder for tokenized text; None keeps it in memory.
        """
        return tokenize(self.documents(), tokenizer)


data_sources: Registry[SourceConfig] = Registry("data source", "fast_llm_ssm.data_sources")


def expand(pattern: str) -> list[Path]:
    """The files of a path or glob pattern, sorted.

    Raises:
        UserError: There are none.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        example = path / "**" / "*.txt"
        raise UserError(f"got the folder {pattern}, expected a file or a pattern such as {example}")
    files = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]
    if not files:
        raise UserError(f"{'no file matches' if glob.has_magic(pattern) else 'no such file:'} {pattern}")
    return files


def not_empty(items: tuple[T, ...]) -> tuple[T, ...]:
    """Checks a field; unlike `min_length` it keeps silent where an item is wrong."""
    if not items:
        raise ValueError("got an empty list, expected at least one item")
    return items


def _existing(pattern: str) -> str:
    expand(pattern)
    return pattern


class FileSource(SourceConfig):
    """A source that reads text from files.

    Attributes:
        paths: Files or glob patterns (`**` for any depth, read in sorted order), relative to the working directory.
    """

    paths: Annotated[tuple[Annotated[str, AfterValidator(_existing)], ...], AfterValidator(not_empty)]

    def files(self) -> list[Path]:
        """The files, each once."""
        return list(dict.fromkeys(file for pattern in self.paths for file in expand(pattern)))

    def read(self, file: BinaryIO) -> Iterator[str]:
        """The documents of one file."""
        raise NotImplementedError

    def documents(self) -> Iterator[Document]:
        before = 0
        for path in self.files():
            try:
                with path.open("rb") as file:
                    for text in self.read(file):
                        yield Document(text, before + file.tell())
                    before += file.tell()
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror})") from error

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    def load(self, tokenizer: Tokenizer, cache: Path | None) -> Documents:
        if cache is not None:
            folder = cache / self._cache_key(tokenizer)
            if folder.exists():
                return read_prepared(folder)
            return prepare(self.documents(), tokenizer, folder, [self.model_dump(mode="json", exclude={"weight"})])
        if (size := self.num_bytes()) > _MEMORY_LIMIT:
            raise UserError(
                f"{size:,} bytes of text are more than the {_MEMORY_LIMIT:,} that are tokenized into memory; "
                "run `fast-llm prepare` and use a source of type `tokens`, or set data.cache to a folder"
            )
        return super().load(tokenizer, cache)

    def _cache_key(self, tokenizer: Tokenizer) -> str:
        key = hashlib.sha256(f"{self.model_dump_json(exclude={'weight'})} {tokenizer.fingerprint()}".encode())
        for path in self.files():
            with path.open("rb") as file:
                key.update(hashlib.file_digest(file, "sha256").digest())
        return f"{self.type}-{key.hexdigest()[:32]}"


@data_sources.register("text")
class TextSource(FileSource):
    """UTF-8 text files.

    Attributes:
        split: What a document is: a whole file, a stretch between blank lines, or a stretch between delimiters.
        delimiter: The text between two documents, for `split: delimiter`.
    """

    type: Literal["text"] = "text"
    split: Literal["file", "blank_lines", "delimiter"] = "file"
    delimiter: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _delimiter_belongs_to_split(self) -> TextSource:
        if (self.delimiter is not None) != (self.split == "delimiter"):
            raise ValueError(f"delimiter: got {self.delimiter!r} with `split: {self.split}`, expected the two together")
        return self

    def read(self, file: BinaryIO) -> Iterator[str]:
        for number, piece in enumerate(self._pieces(file)):
            if number == 0:
                piece = piece.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            try:
                yield piece.decode()
            except UnicodeDecodeError as error:
                where = f"byte {error.start:,}" + (f" of document {number + 1}" if self.split != "file" else "")
                raise UserError(f"{file.name}: is not UTF-8 at {where}; expected UTF-8 text") from error

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        if self.delimiter is not None:
            rest = b""
            while chunk := file.read(_CHUNK):
                *pieces, rest = (rest + chunk).split(self.delimiter.encode())
                yield from pieces
            yield rest
        elif self.split == "blank_lines":
            lines: list[bytes] = []
            for line in file:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield b"".join(lines)
                    lines = []
            yield b"".join(lines)
        else:
            yield file.read()


@data_sources.register("jsonl")
class JsonlSource(FileSource):
    """Files with one JSON object a line, of which one field is the document.

    Attributes:
        field: Name of the field that holds the text.
    """

    type: Literal["jsonl"] = "jsonl"
    field: str = "text"

    def read(self, file: BinaryIO) -> Iterator[str]:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{file.name}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # also undecodable bytes
                raise UserError(f"{where}: is not JSON ({error}); expected one object a line") from error
            if not isinstance(record, dict):
                raise UserError(
                    f"{where}: is a {type(record).__name__}; expected an object with a field `{self.field}`"
                )
            text = record.get(self.field)
            if not isinstance(text, str):
                got = type(text).__name__ if self.field in record else f"no such field among {', '.join(record)}"
                raise UserError(f"{where}: field `{self.field}` is {got}; expected a text")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: field `{self.field}` is not Unicode ({error.reason})") from error
            yield text


@data_sources.register("python_stdlib")
class PythonStdlibSource(SourceConfig):
    """The source files of the running Python's standard library, without tests and installed packages."""

    type: Literal["python_stdlib"] = "python_stdlib"

    def documents(self) -> Iterator[Document]:
        position = 0
        for path in self._files():
            position += path.stat().st_size
            try:
                with python_tokenize.open(path) as file:
                    yield Document(file.read(), position)
            except (SyntaxError, UnicodeDecodeError):  # samples of broken encodings
                continue

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def _files(self) -> list[Path]:
        root = sysconfig.get_path("stdlib")
        excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        found: list[Path] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - excluded)
            found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
        if not found:
            raise UserError(f"{root}: holds no Python files; expected the source of the standard library")
        return found


@data_sources.register("tokens")
class TokensSource(SourceConfig):
    """A folder that `fast-llm prepare` wrote.

    Attributes:
        path: The folder, relative to the working directory.
        verify: Compare the checksum of all tokens at the start, which reads the file once.
    """

    type: Literal["tokens"] = "tokens"
    path: Path
    verify: bool = True

    @field_validator("path")
    @classmethod
    def _is_prepared(cls, path: Path) -> Path:
        read_meta(path)
        return path

    def load(self, tokenizer: Tokenizer, cache: Path | None) -> Documents:
        documents = read_prepared(self.path, verify=self.verify)
        if (prepared_with := read_meta(self.path).tokenizer) != tokenizer.fingerprint():
            raise UserError(
                f"{self.path} was prepared with tokenizer {prepared_with}; expected the tokenizer of this run, "
                f"{tokenizer.fingerprint()}"
            )
        return documents
