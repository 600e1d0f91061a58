"""Models published on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.io import WEIGHT_FILES
from fast_llm_ssm.convert.source import WEIGHT_SUFFIXES

_ID = re.compile(r"(?P<repository>(?P<owner>[\w.-]+)/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def is_hub_id(source: str) -> bool:
    """Whether it says OWNER/NAME or OWNER/NAME@REVISION, and is no path: neither it nor a folder OWNER exists."""
    found = _ID.fullmatch(source)
    return found is not None and not Path(source).exists() and not Path(found["owner"]).exists()


def download(source: str, say: Callable[[str], None] = print) -> Path:
    """Bring what an import reads into the hub's own cache, with a progress bar; what is there already is kept.

    Args:
        source: As `is_hub_id` takes it.
        say: Takes one line about what is done.

    Returns:
        The folder.

    Raises:
        UserError: There is no such model, or the hub cannot be reached.
    """
    import httpx
    from huggingface_hub import HfApi, snapshot_download

    found = _ID.fullmatch(source)
    assert found is not None, source
    repository = found["repository"]
    try:
        info = HfApi().model_info(repository, revision=found["revision"], files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = wanted(sizes)
        say(f"{source}: {len(files)} files, {sum(sizes[name] for name in files) / 1e9:.2f} GB, into the hub's cache")
        return Path(snapshot_download(repository, revision=info.sha, allow_patterns=files))
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{source}: no such folder, and not to be had from the Hugging Face hub ({reason})") from None


def wanted(names: Iterable[str]) -> list[str]:
    """Of a repository's files, the small ones, and the weights in the one format that is read first."""
    top = [name for name in names if "/" not in name]
    entry = next((name for name in WEIGHT_FILES if name in top), None)
    kind, suffix = (entry.partition(".")[0], Path(entry.removesuffix(".index.json")).suffix) if entry else ("", "")

    def reads(name: str) -> bool:
        if Path(name).suffix not in WEIGHT_SUFFIXES:
            return True
        return name.startswith(kind) and name.endswith(suffix or ".safetensors")

    return [name for name in top if reads(name)]
