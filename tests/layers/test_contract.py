"""What every mixer owes the rest of the package, checked on each built-in one."""

from __future__ import annotations

import pytest
import torch
from helpers.models import MIXERS, build, stack, tokens

from fast_llm_ssm.config import dump
from fast_llm_ssm.layers import mixers
from fast_llm_ssm.model import ModelConfig, build_model

pytestmark = pytest.mark.parametrize("config", MIXERS.values(), ids=MIXERS)

SCALE = 5e-5  # of the largest logit: what fp32 leaves between two orders of the same sums


def assert_close(a: torch.Tensor, b: torch.Tensor, scale: float = SCALE) -> None:
    assert (a - b).abs().max() <= scale * b.abs().max().clamp(min=1.0)


def test_every_registered_mixer_is_tested(config):
    assert set(mixers.names()) <= {c["type"] for c in MIXERS.values()}


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 29])
def test_gradients_are_finite_at_odd_lengths(config, length):
    model = build(stack(config, config))
    ids = tokens(2, length + 1)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_every_parameter_matters(config):
    model = build(stack(config, config))
    ids = tokens(2, 18)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        # Softmax ignores a constant added to all keys; only rotary positions make a bias of k matter.
        if not name.endswith("k_proj.bias"):
            assert parameter.grad.abs().max() > 0, name


def test_earlier_logits_do_not_see_later_tokens(config):
    model = build(stack(config, config))
    ids = tokens(1, 20)
    changed = ids.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 37
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("bounds", [[0, 7, 8, 17, 34, 35, 51], [0, 8, 17, 17, 34, 51], [0, 17, 34, 51]])
def test_packed_documents_equal_separate_ones(config, bounds):
    model = build(stack(config, config), dtype=torch.float64)
    ids = tokens(3, 17)
    targets = tokens(3, 17, seed=2)
    packed = model(ids, torch.tensor(bounds))
    model.loss(ids, targets, torch.tensor(bounds), reduction="sum").backward()
    packed_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    flat = ids.flatten()
    for first, last in zip(bounds, bounds[1:], strict=False):
        if first < last:
            alone = model(flat[None, first:last])
            assert_close(packed.view(51, -1)[first:last], alone[0], 1e-6)  # rope angles and states are fp32-made
            model.loss(flat[None, first:last], targets.flatten()[None, first:last], reduction="sum").backward()
    for name, parameter in model.named_parameters():
        difference = (packed_grads[name] - parameter.grad).norm()
        assert difference <= 1e-6 * max(parameter.grad.norm(), 1e-2), name


def test_documents_are_sealed(config):
    model = build(stack(config, config))
    ids, bounds = tokens(1, 24), torch.tensor([0, 9, 24])
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 37
    assert torch.equal(model(ids, bounds)[:, 9:], model(changed, bounds)[:, 9:])


@pytest.mark.parametrize("first", [1, 2, 7, 8, 9, 20])
def test_prefill_and_steps_equal_the_forward_pass(config, first):
    model = build(stack(config, config))
    ids = tokens(2, 23)
    with torch.no_grad():
        expected = model(ids)
        state = model.new_state(2, 23)
        assert_close(model.prefill(ids[:, :first], state), expected[:, first - 1])
        for t in range(first, 23):
            assert_close(model.step(ids[:, t], state), expected[:, t])


def test_prefill_in_pieces_equals_one_piece(config):
    model = build(stack(config, config))
    ids = tokens(2, 23)
    with torch.no_grad():
        expected = model(ids)
        for cuts in ([1, 2, 3, 23], [8, 16, 23], [22, 23], [5, 5, 23]):
            state, start = model.new_state(2, 23), 0
            for end in cuts:
                logits = model.prefill(ids[:, start:end], state)
                if end > start:
                    assert_close(logits, expected[:, end - 1])
                start = end


def test_padding_on_either_side_changes_nothing(config):
    model = build(stack(config, config))
    ids = tokens(2, 23)
    with torch.no_grad():
        for pads in (0, 1, 5, 64):
            for filler in (0, 36):
                pad = torch.full((2, pads), filler)
                for side in ("left", "right"):
                    padded = torch.cat([pad, ids] if side == "left" else [ids, pad], 1)
                    mask = torch.ones_like(padded)
                    mask[:, slice(0, pads) if side == "left" else slice(23, None)] = 0
                    real = slice(pads, None) if side == "left" else slice(0, 23)
                    assert_close(model(padded, attention_mask=mask)[:, real], model(ids))
                    assert_close(model(padded[:1], attention_mask=mask[:1])[:, real], model(ids[:1]))


def test_rows_of_different_lengths_decode_as_alone(config):
    model = build(stack(config, config))
    prompts = [tokens(1, n, seed=n)[0] for n in (3, 23, 1)]
    with torch.no_grad():
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=5)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True)
        state = model.new_state(3, 30)
        together = [model.prefill(padded, state, mask)]
        for t in range(4):
            together.append(model.step(torch.tensor([t, t + 1, t + 2]), state))
        for row, prompt in enumerate(prompts):
            alone = model.new_state(1, 30)
            assert_close(together[0][row], model.prefill(prompt[None], alone)[0])
            for t in range(4):
                assert_close(together[t + 1][row], model.step(torch.tensor([t + row]), alone)[0])


def test_state_dict_and_yaml_round_trip(config):
    model = build(stack(config, config))
    again = build_model(ModelConfig.model_validate(model.config.model_dump()), seed=5)
    again.load_state_dict(model.state_dict())
    ids = tokens(1, 9)
    assert torch.equal(model(ids), again(ids))
    assert "type: " + config["type"] in dump(model.config)


def test_bf16_stays_near_fp32_and_in_bf16(config):
    model = build(stack(config, config), spread=1.0)
    ids = tokens(2, 29)
    expected = model(ids)
    model.compute_dtype = torch.bfloat16
    seen = []
    for _, mixer in model.named_mixers():
        mixer.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    logits = model(ids)
    assert logits.dtype == torch.bfloat16 and set(seen) == {torch.bfloat16}
    assert (logits - expected).norm() <= 2e-2 * expected.norm()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_flops_are_twice_the_matrices_and_more(config):
    model = build_model(ModelConfig.model_validate(stack(config)), device="meta")
    (layer,) = model.layers
    matrices = sum(p.numel() for name, p in layer.named_parameters() if p.dim() == 2 and "D" not in name)
    assert 2 * matrices <= layer.flops_per_token(64) <= layer.flops_per_token(4096)
    assert layer.activation_size_per_token() > 0


def test_no_decay_covers_vectors_and_leaves_matrices(config):
    model = build(stack(config))
    names = model.no_decay_names()
    for name, parameter in model.named_parameters():
        vector = parameter.dim() < 2 or name.endswith((".D", ".A_log", "bias"))
        assert (name in names) == vector, name
