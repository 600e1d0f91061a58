"""Write a tiny Zamba 2 with random weights, in the layout of the published ones: something to practise on offline.

python examples/continue_zamba2/make_tiny_zamba2.py FOLDER
"""

import sys

import torch
from transformers import Zamba2Config, Zamba2ForCausalLM


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = Zamba2Config(
        vocab_size=258,  # bytes, and two that mark the ends of a text
        hidden_size=64,
        num_hidden_layers=6,
        layers_block_type=["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
        num_mem_blocks=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        mamba_d_state=16,
        mamba_headdim=16,
        n_mamba_heads=8,
        mamba_ngroups=1,
        adapter_rank=8,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        chunk_size=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Zamba2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
