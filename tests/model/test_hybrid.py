from __future__ import annotations

import pytest
import torch
from helpers.models import ATTENTION, MAMBA2, MLP, build, shared_hybrid, stack, tokens

from fast_llm_ssm.config import UserError
from fast_llm_ssm.model import ModelConfig, build_model, estimate
from fast_llm_ssm.model.pattern import expand_pattern, fit


def test_pattern_strings():
    assert expand_pattern("(mmh)2 m", {}) == list("mmhmmhm")
    assert expand_pattern("((ab)2 c)2", {}) == list("ababcababc")
    assert expand_pattern("M*-", {"*": "attention"}) == ["M", "attention", "-"]
    assert fit(["m", "m", "h"], 7) == list("mmhmmhm")
    assert fit(["m", "m", "h"], 2) == list("mm")
    for bad in ("(mm", "(mm)", "mm)2"):
        with pytest.raises(ValueError, match="brackets"):
            expand_pattern(bad, {})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pattern": "mx"}, "unknown block `x`"),
        ({"pattern": ""}, "pattern: got an empty one"),
        ({"expect": {"layers": 4}}, "expect.layers: got 4, but the pattern gives 5"),
        ({"shared": {}}, "unknown shared block `A`"),
        ({"hidden_size": 24}, "expected 48"),
    ],
)
def test_wrong_structure_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(shared_hybrid(**change))


def test_expected_parameters_are_checked_before_allocation():
    config = ModelConfig.model_validate(shared_hybrid(hidden_size=16, expect={"params": 10}))
    with pytest.raises(UserError, match="expect.params: the config gives [0-9,]+ parameters, expected 10"):
        build_model(config)


def test_shared_blocks_alternate_and_are_counted_once():
    model = build(shared_hybrid())
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    blocks = [layer[0].inject.block for layer in model.layers if layer[0].inject is not None]
    assert [block is model.shared["A"] for block in blocks] == [True, False, True]
    assert model.num_parameters() == sum(p.numel() for p in set(model.parameters()))

    ids = tokens(1, 9)
    seen = {}
    for i, layer in enumerate(model.layers):
        if layer[0].inject is not None:
            layer[0].inject.register_forward_hook(lambda _, __, out, i=i: seen.update({i: out}))
    model(ids)
    before = dict(seen)
    with torch.no_grad():
        model.shared["B"][1].mixer.down_proj.weight.mul_(2)
    model(ids)
    # Layer 1 uses A and stands before B's use; layer 3 uses B.
    assert torch.equal(before[1], seen[1]) and not torch.allclose(before[3], seen[3])


def test_adapters_belong_to_one_use():
    model = build(shared_hybrid())
    ids = tokens(1, 9)
    outputs = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, out: outputs.append(out))
    model(ids)
    before, outputs[:] = list(outputs), []
    with torch.no_grad():
        model.layers[4][0].inject.adapters[0]["q"].up.weight.add_(0.5)
    model(ids)
    assert all(torch.equal(a, b) for a, b in zip(before[:4], outputs[:4], strict=True))
    assert not torch.allclose(before[4], outputs[4])


def test_shared_hybrid_decodes_as_it_reads():
    model = build(shared_hybrid())
    ids = tokens(2, 23)
    with torch.no_grad():
        expected = model(ids)
        state = model.new_state(2, 23)
        got = [model.prefill(ids[:, :5], state), model.prefill(ids[:, 5:9], state)]
        got += [model.step(ids[:, t], state) for t in range(9, 23)]
    for logits, position in zip(got, [4, 8, *range(9, 23)], strict=True):
        torch.testing.assert_close(logits, expected[:, position], rtol=0, atol=5e-5 * float(expected.abs().max()))


def test_state_is_fp32_where_it_accumulates():
    model = build(shared_hybrid(), dtype=torch.bfloat16)
    state = model.new_state(1, 8)
    assert state.layers[0][0].mixer["ssm"].dtype == torch.float32
    assert state.layers[0][0].mixer["conv"].dtype == torch.bfloat16
    assert {model.get_parameter(name).dtype for name in model.fp32_names()} == {torch.float32}
    assert model.layers[0][0].mixer.in_proj.weight.dtype == torch.bfloat16


def test_recurrent_state_does_not_drift_in_bf16():
    torch.manual_seed(0)
    model = build(stack(MAMBA2, MAMBA2), spread=1.5).to(torch.float32)
    ids = tokens(1, 600)
    with torch.no_grad():
        model.compute_dtype = torch.bfloat16
        expected = model(ids).float()
        state = model.new_state(1, 600)
        steps = torch.stack([model.step(ids[:, t], state)[0] for t in range(600)]).float()
    error = (steps - expected[0]).abs().amax(-1)
    assert error[-100:].mean() <= 1.5 * error[:100].mean() + 1e-3


def test_fp32_residual_stream():
    model = build(stack(MAMBA2, MLP, residual_fp32=True))
    model.compute_dtype = torch.bfloat16
    seen = []
    model.layers[1].register_forward_hook(lambda _, inputs, out: seen.append((inputs[0].dtype, out.dtype)))
    assert model(tokens(1, 5)).dtype == torch.bfloat16
    assert seen == [(torch.float32, torch.float32)]


def test_recomputation_gives_the_same_gradients():
    ids = tokens(2, 18)
    grads = []
    for mode in ("none", "full"):
        model = build(shared_hybrid())
        model.activation_checkpointing = mode
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_loss_is_the_cross_entropy_of_the_logits():
    model = build(stack(MAMBA2, ATTENTION, logits_multiplier=0.5, embedding_multiplier=2.0, tie_embeddings=False))
    ids, targets = tokens(2, 9), tokens(2, 9, seed=4)
    targets[0, :5] = -100
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(ids, targets), expected)
    torch.testing.assert_close(model.loss(ids, targets, reduction="sum"), expected * 13)


def test_initial_weights_follow_the_published_recipe():
    config = stack({**MAMBA2, "d_inner": 512, "n_groups": 1}, MLP)
    meta = build_model(ModelConfig.model_validate(config), device="meta").to_empty(device="cpu")
    meta.init_weights(3)
    model = build_model(ModelConfig.model_validate(config), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(meta.parameters(), model.parameters(), strict=True))
    mixer = model.layers[0][0].mixer
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert dt.min() >= 0.00099 and dt.max() <= 0.101 and len(dt.unique()) == len(dt)
    assert mixer.dt_bias.min() >= -6.908 and mixer.dt_bias.max() <= -2.25
    assert 0.3 < (dt < 0.01).float().mean() < 0.7  # log-uniform: half of them below the geometric mean
    A = -mixer.A_log.exp()
    assert A.min() >= -16 and A.max() <= -1 and A.min() < -10 and A.max() > -6
    assert (mixer.D == 1).all() and (mixer.norm.weight == 1).all()
    assert 0.015 < model.embedding.weight.std() < 0.025
    assert not torch.equal(
        build_model(ModelConfig.model_validate(config), seed=4).embedding.weight, meta.embedding.weight
    )


def test_padded_vocabulary_and_untied_head():
    model = build(stack(MAMBA2, pad_vocab_multiple=16, tie_embeddings=False))
    assert model(tokens(1, 4)).shape == (1, 4, 48)
    assert model.head.weight.shape == (48, 16)


def test_wrong_calls_say_what_is_wrong():
    model = build(stack(MAMBA2))
    ids = tokens(2, 8)
    for bounds, message in (
        ([0, 8], "expected one dimension that rises from 0 to 16"),
        ([0, 5, 16], "lacks the row end 8"),
        ([0, 8, 6, 16], "falls"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, torch.tensor(bounds))
    with pytest.raises(ValueError, match="exclude each other"):
        model(ids, torch.tensor([0, 8, 16]), torch.ones_like(ids))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(2, 7))
    with pytest.raises(ValueError, match="does not fit"):
        model.prefill(ids, model.new_state(2, 7))
    with pytest.raises(ValueError, match="expected \\[batch, length\\]"):
        model(ids[0])


def test_estimate_adds_up():
    model = build_model(ModelConfig.model_validate(shared_hybrid()), device="meta")
    sizes = estimate(model, 64, 2)
    less = estimate(model, 64, 2, recompute=True)
    assert sizes.num_parameters == model.num_parameters() and sizes.num_layers == 5
    assert sizes.weights == 4 * sizes.num_parameters and sizes.optimizer == 8 * sizes.num_parameters
    assert 0 < less.activations < sizes.activations
    assert sizes.total == sizes.weights + sizes.gradients + sizes.optimizer + sizes.activations
