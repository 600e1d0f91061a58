"""`fast-llm layers`: what a run file's `mixer: {type: ...}` can name."""

from __future__ import annotations

import inspect


def layers() -> None:
    """List the registered mixers: name, what it is, and where it comes from if not from here."""
    from fast_llm_ssm.layers import mixers

    names = mixers.names()
    width = max(map(len, names))
    for name in names:
        config = mixers[name]
        summary = (inspect.getdoc(config) or "").partition("\n")[0]
        outside = not config.__module__.startswith("fast_llm_ssm.")
        print(f"{name:<{width}}  {summary}  [{config.__module__}{', out of tree' if outside else ''}]")
