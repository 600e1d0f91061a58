"""The run file."""

import subprocess
import sys

import pytest
import yaml
from helpers.training import run_tree, tiny_run

import fast_llm_ssm
from fast_llm_ssm.config import ConfigErrors, UserError, dump, loads
from fast_llm_ssm.train.config import RunConfig, require_trainable
from fast_llm_ssm.train.trainer import train


def test_round_trip(tmp_path):
    config = tiny_run(tmp_path, "schedule={type: wsd, decay_steps: 2}", "samples.prompts=[a]")
    assert loads(dump(config), RunConfig) == config


def test_load_config_is_at_hand_and_names_the_run_after_its_file(tmp_path):
    tree = run_tree(tmp_path)
    del tree["name"]
    path = tmp_path / "my-run.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = fast_llm_ssm.load_config(path, "optim.lr=3e-4", "train.steps=7")
    assert config.name == "my-run" and config.optim.lr == 3e-4 and config.train.steps == 7


def test_importing_the_package_is_light():
    code = "import fast_llm_ssm, sys; assert not {'torch', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'load_confg'"):
        fast_llm_ssm.load_confg  # noqa: B018


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.micro_batch_size=3", "train.micro_batch_size: got 3, expected a divisor of batch_size (4)"),
        ("train.steps=0", "train.steps"),
        ("train.precision=fp8", "train.precision"),
        ("optim.lr=-1e-3", "optim.lr"),
        ("optim.betas=[0.9, 1.0]", "optim.betas"),
        ("optim.clip=0", "optim.clip"),
        ("schedule.type=cosin", "unknown schedule `cosin`, did you mean `cosine`"),
        ("schedule.warmup_steps=7", "schedule.warmup_steps: got 7, expected at most train.steps (6)"),
        (
            "schedule={type: wsd, decay_steps: 5, warmup_steps: 2}",
            "schedule.decay_steps: got 5, expected at most the 4",
        ),
        ("schedule={type: constant, min_ratio: 0.1}", "schedule.min_ratio"),
        ("checkpoint.keep=0", "checkpoint.keep"),
        ("name=a/b", "name"),
        ("samples.prompts=[]", "samples.prompts"),
    ],
)
def test_mistakes_are_named(tmp_path, override, expected):
    with pytest.raises(ConfigErrors) as error:
        tiny_run(tmp_path, override)
    assert len(error.value.errors) == 1, str(error.value)
    assert expected in str(error.value)


def test_validation_needs_something_to_measure_on(tmp_path):
    with pytest.raises(ConfigErrors, match="validation.every: got a number, but data.validation"):
        tiny_run(tmp_path, "data.validation=null", "validation.every=2")


def test_a_model_alone_is_a_run_file_but_cannot_be_trained(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({"model": run_tree(tmp_path)["model"]}))
    with pytest.raises(UserError, match="the run file has no `data:` and no `train:` section, training needs both"):
        require_trainable(fast_llm_ssm.load_config(path))


def test_the_tokenizer_must_fit_the_model(tmp_path):
    with pytest.raises(UserError, match="model.vocab_size: got 200, expected at least the tokenizer's 258"):
        train(tiny_run(tmp_path, "model.vocab_size=200"))


def test_from_takes_the_checkpoint_s_model_as_base(tmp_path):
    train(tiny_run(tmp_path, "train.steps=2", "model.residual_fp32=true"))
    path = tmp_path / "continue.yaml"
    path.write_text(f"model: {{from: {tmp_path}/runs/tiny, name: second}}\n")
    config = fast_llm_ssm.load_config(path)
    assert config.model.residual_fp32 and config.model.hidden_size == 16 and config.model.name == "second"
    assert str(config.model.start_from) == f"{tmp_path}/runs/tiny"
    path.write_text(f"model: {{from: {tmp_path}/nowhere}}\n")
    with pytest.raises(ConfigErrors, match="continue.yaml:1: model.from: .*no such folder"):
        fast_llm_ssm.load_config(path)
