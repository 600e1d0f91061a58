from __future__ import annotations

from pathlib import Path

import pytest

from fast_llm_ssm.cli import main

MODELS = Path(__file__).parents[2] / "configs/models"


def estimate(capsys, name: str, *overrides: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["estimate", "--config", str(MODELS / name), *overrides])
    assert exit.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "name, count",
    [
        ("zamba2-1.2b", "1,215,064,704"),
        ("zamba2-2.7b", "2,662,214,560"),
        ("zamba2-7b", "7,356,749,648"),
        ("mamba2-2.7b", "2,702,599,680"),
    ],
)
def test_published_models_have_their_published_sizes(name, count, capsys):
    out = estimate(capsys, f"{name}.yaml")
    assert f"parameters   {count}\n" in out
    number = int(count.replace(",", ""))
    assert f"weights      {4 * number / 2**30:.3f} GiB" in out
    assert f"optimizer    {8 * number / 2**30:.3f} GiB" in out
    flops = float(out.split("FLOPs/token")[1].split()[0])
    assert flops > 6 * number * 0.9  # shared blocks work at every use, so more than 6 per parameter is usual


def test_an_override_changes_the_count(capsys):
    out = estimate(capsys, "mamba2-130m.yaml", "model.num_blocks=2", "model.expect={}")
    assert "layers       2\n" in out
