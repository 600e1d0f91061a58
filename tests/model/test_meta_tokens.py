"""Meta tokens, and keys and values that later layers reuse."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import ATTENTION, MAMBA2, build, meta_hybrid, shared_hybrid, stack, tokens

from fast_llm_ssm.model import HybridModel, ModelConfig, build_model


def close(a: torch.Tensor, b: torch.Tensor, scale: float = 5e-5) -> bool:
    return bool((a - b).abs().max() <= scale * b.abs().max().clamp(min=1.0))


def without_meta_tokens(model: HybridModel) -> HybridModel:
    """The same model whose meta tokens are words: id 37 + i stands for meta token i."""
    config = model.config.model_dump()
    count = config.pop("meta_tokens")
    config["vocab_size"] += count
    plain = build_model(ModelConfig.model_validate(config), dtype=model.dtype)
    weights = copy.copy(dict(model.state_dict()))
    weights["embedding.weight"] = torch.cat([weights["embedding.weight"], weights.pop("meta_tokens")])
    plain.load_state_dict(weights)
    return plain


def test_meta_tokens_are_a_learned_beginning():
    model = build(meta_hybrid())
    ids = tokens(2, 19)
    words = torch.cat([torch.arange(37, 40).expand(2, -1), ids], 1)
    assert close(model(ids), without_meta_tokens(model)(words)[:, 3:, :37])
    assert model.num_parameters() == without_meta_tokens(model).num_parameters()


@pytest.mark.parametrize("bounds", [[0, 7, 8, 17, 34, 35, 51], [0, 8, 17, 17, 34, 51], [0, 17, 34, 51]])
def test_packed_documents_equal_separate_ones(bounds):
    model = build(meta_hybrid(), dtype=torch.float64)
    ids, targets = tokens(3, 17), tokens(3, 17, seed=2)
    packed = model(ids, torch.tensor(bounds))
    assert packed.shape == (3, 17, 37)
    model.loss(ids, targets, torch.tensor(bounds), reduction="sum").backward()
    packed_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for first, last in zip(bounds, bounds[1:], strict=False):
        if first < last:
            alone = ids.flatten()[None, first:last]
            assert close(packed.view(51, -1)[first:last], model(alone)[0], 1e-6)
            model.loss(alone, targets.flatten()[None, first:last], reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert (packed_grads[name] - parameter.grad).norm() <= 1e-6 * max(parameter.grad.norm(), 1e-2), name


@pytest.mark.parametrize("first", [1, 2, 5, 20])
def test_decoding_equals_the_forward_pass(first):
    model = build(meta_hybrid())
    ids = tokens(2, 23)
    with torch.no_grad():
        expected = model(ids)
        state = model.new_state(2, 23)
        assert close(model.prefill(ids[:, :1], state), expected[:, 0])
        if first > 1:
            assert close(model.prefill(ids[:, 1:first], state), expected[:, first - 1])
        for t in range(first, 23):
            assert close(model.step(ids[:, t], state), expected[:, t])
        with pytest.raises(ValueError, match="a row of 24 tokens does not fit the state's max_length 23"):
            model.prefill(ids[:, :1], state)


def test_steps_alone_equal_the_forward_pass():
    model = build(meta_hybrid())
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(ids)
        state = model.new_state(2, 9)
        for t in range(9):
            assert close(model.step(ids[:, t], state), expected[:, t])


def test_padding_changes_nothing():
    model = build(meta_hybrid())
    ids = tokens(2, 9)
    padded = torch.cat([ids, torch.zeros(2, 4, dtype=ids.dtype)], 1)
    mask = torch.ones_like(padded)
    mask[:, 9:] = 0
    with torch.no_grad():
        expected = model(ids)
        for flip in (False, True):
            p, m = (padded.roll(4, 1), mask.roll(4, 1)) if flip else (padded, mask)
            assert close(model(p, attention_mask=m)[m != 0].view(2, 9, -1), expected)
            assert close(model.prefill(p, model.new_state(2, 9), m), expected[:, -1])


def test_recomputation_gives_the_same_gradients():
    ids, bounds = tokens(2, 18), torch.tensor([0, 5, 17, 34])
    grads = []
    for mode in ("none", "full"):
        model = build(meta_hybrid())
        model.activation_checkpointing = mode
        model.loss(ids[:, :-1], ids[:, 1:], bounds).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_every_parameter_matters_and_reusers_have_no_keys():
    model = build(meta_hybrid())
    ids = tokens(2, 18)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    names = [name for name, _ in model.named_parameters() if "k_proj" in name or "v_proj" in name]
    assert {name.split(".")[1] for name in names} == {"0", "1", "5"}
    states = model.new_state(1, 4).layers
    assert states[2][0].mixer["0"] == {} and states[1][0].mixer["0"]["k"].shape[1] == 3 + 4


def test_reused_keys_are_those_of_the_nearest_earlier_layer():
    model = build(meta_hybrid())
    ids = tokens(1, 12)
    inputs_of_layer_4: list[torch.Tensor] = []

    def change(owner: int) -> bool:
        """Whether scaling the values of a layer changes what layer 4's attention returns for the same input."""
        attention = model.layers[4][0].mixer.branches[0]
        seen: list[torch.Tensor] = []
        first = attention.register_forward_hook(lambda _, __, out: seen.append(out))
        fixed = model.layers[4].register_forward_pre_hook(
            lambda _, args: (inputs_of_layer_4[0], *args[1:]) if inputs_of_layer_4 else None
        )
        with torch.no_grad():
            model(ids)
            model.layers[owner][0].mixer.branches[0].v_proj.weight.mul_(2.0)
            model(ids)
            model.layers[owner][0].mixer.branches[0].v_proj.weight.div_(2.0)
        first.remove(), fixed.remove()
        return not torch.allclose(seen[0], seen[1])

    grab = model.layers[4].register_forward_pre_hook(lambda _, args: inputs_of_layer_4.append(args[0]))
    model(ids)
    grab.remove()
    assert change(1) and not change(5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pattern": "m r g"}, "blocks.r.0.mixer.kv: layer 1 has no earlier keys and values to reuse"),
        (
            {
                "blocks": {
                    "a": {"mixer": {**ATTENTION, "num_kv_heads": 4}},
                    "r": {"mixer": {**ATTENTION, "kv": "reuse_previous"}},
                },
                "pattern": "ar",
            },
            r"wants \(heads, key size, value size\) \(2, 8, 8\), but the ones to reuse are \(4, 8, 8\)",
        ),
        ({"meta_tokens": -1}, "greater than or equal to 0"),
    ],
)
def test_wrong_reuse_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(meta_hybrid(**change))


def test_shared_blocks_cannot_reuse():
    config = shared_hybrid()
    del config["blocks"]["h"]["inject"]["adapters"]
    config["shared"]["A"][0]["mixer"] = {**config["shared"]["A"][0]["mixer"], "kv": "reuse_previous"}
    with pytest.raises(ValueError, match="shared.A: a shared block can't reuse keys and values"):
        ModelConfig.model_validate(config)


@pytest.mark.parametrize(
    "mixer, message",
    [
        ({"fused_out_proj": True, "branches": [ATTENTION, {"type": "mlp", "size": 4}]}, "mlp has no output projection"),
        ({"fused_out_proj": True, "branches": [ATTENTION, {**MAMBA2, "d_inner": 64}]}, "expected equal widths"),
    ],
)
def test_wrong_branches_are_refused(mixer, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(stack({"type": "parallel", **mixer}))


def test_flops_and_estimate_include_meta_tokens():
    with_meta = build_model(ModelConfig.model_validate(meta_hybrid()), device="meta")
    without = build_model(ModelConfig.model_validate(meta_hybrid(meta_tokens=0)), device="meta")
    assert with_meta.flops_per_token(12) > 1.2 * without.flops_per_token(12) - 2 * 3 * 16 * 37
