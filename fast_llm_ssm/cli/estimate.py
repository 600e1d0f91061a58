"""`fast-llm estimate`: how large is this model, and what does a training step need?"""

from __future__ import annotations

from fast_llm_ssm.cli.options import Overrides, RunFile

_GIB = 2**30


def estimate(config: RunFile, overrides: Overrides = None) -> None:
    """Print layers, parameters, operations and memory of a run file's model; nothing is allocated."""
    from fast_llm_ssm.model import build_meta, estimate
    from fast_llm_ssm.train.config import load_config

    run = load_config(config, *(overrides or ()))
    length = run.data.sequence_length if run.data else 4096
    rows = run.train.micro_batch if run.train else 1
    half = run.train.precision != "fp32" if run.train else True
    recompute = run.train.activation_checkpointing == "full" if run.train else False
    sizes = estimate(build_meta(run.model), length, rows, 2 if half else 4, recompute)

    print(f"model        {run.model.name}")
    print(f"layers       {sizes.num_layers}")
    print(f"parameters   {sizes.num_parameters:,}")
    print(f"FLOPs/token  {sizes.flops_per_token:.4g} forward and backward, documents of {length:,} tokens")
    print(f"weights      {sizes.weights / _GIB:.3f} GiB, fp32")
    print(f"gradients    {sizes.gradients / _GIB:.3f} GiB, fp32")
    print(f"optimizer    {sizes.optimizer / _GIB:.3f} GiB, AdamW")
    note = "bf16" if half else "fp32"
    print(f"activations  {sizes.activations / _GIB:.3f} GiB, {rows} x {length:,} tokens, {note}, about")
    print(f"total        {sizes.total / _GIB:.3f} GiB, about")
