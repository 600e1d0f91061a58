"""What YAML can name: mixers and their parts. Importing this room registers the built-in mixers."""

from fast_llm_ssm.layers.attention import AttentionConfig
from fast_llm_ssm.layers.base import AnyMixer, Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.mamba import MambaConfig
from fast_llm_ssm.layers.mamba2 import Mamba2Config
from fast_llm_ssm.layers.mlp import MLPConfig
from fast_llm_ssm.layers.parallel import ParallelConfig

__all__ = [
    "AnyMixer",
    "AttentionConfig",
    "MLPConfig",
    "Mamba2Config",
    "MambaConfig",
    "Mixer",
    "MixerConfig",
    "ParallelConfig",
    "State",
    "mixers",
]
