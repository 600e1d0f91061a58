"""`python -m fast_llm_ssm`, the same as `fast-llm`."""

from fast_llm_ssm.cli import main

main()
