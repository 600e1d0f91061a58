"""The SSD kernel that applies the decayed C B^T tiles: forward for y, mirrored for dx. The legend is in
triton_decay.py."""

import triton
import triton.language as tl

from fast_llm_ssm.ops.ssd.triton_decay import (
    chunk_bounds,
    factor,
    load_factors,
    load_weight,
    related,
    unsafe_range,
    widen,
)


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total"])
def scan_kernel(
    value, weight, other_weight, seq_idx, states, steps, centred, up, down, edge, unsafe, skip, table, out,
    row_length, row_chunks, total, H, G, P, N, splits, stride_v_t, stride_v_h, stride_w_t, stride_w_g, stride_ow_t,
    stride_ow_g,
    REVERSE: tl.constexpr, SKIP: tl.constexpr, HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, CUTS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE_P: tl.constexpr, WHOLE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, ASM: tl.constexpr, UNSAFE: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Forward: y_i  = sum_{j <= i} cb_ij decay_ij dt_j x_j + enter_i C_i S + D x_i         (value x, weight C, other
    B, edge enter, S at the chunk's start)
    Reverse: dx_j = dt_j (sum_{i >= j} cb_ij decay_ij dy_i + leave_j B_j G) + D dy_j     (value dout, weight B, other
    C, edge leave, G = dL/dS at the chunk's end)

    decay_ij dt_j = up_i down_j: one factor goes into the columns of the tile, the other onto the finished rows, so no
    exp2 is taken per pair of tokens. Rounding to OPERAND comes after the products, in fp32. Where that is unsafe a
    second launch with UNSAFE, one exp2 a pair, overwrites the result: both
    ways in one kernel would need twice the registers.
    Grid: chunks * (CHUNK / ROWS) * groups * splits; each program walks its split of the group's virtual heads and
    keeps its C (B) and cb tiles.
    """
    pid = tl.program_id(0)
    split = pid % splits
    g = (pid // splits) % G
    block = (pid // (splits * G)) % (CHUNK // ROWS)
    chunk = pid // (splits * G * (CHUNK // ROWS))
    start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
    heads = H * CUTS
    group_heads = heads // G
    count = tl.cdiv(group_heads, splits)
    first = g * group_heads + split * count
    last = tl.minimum(first + count, (g + 1) * group_heads)
    last = tl.where(block * ROWS < length, last, first)  # nothing to do past a row's end
    if UNSAFE:
        first, last = unsafe_range(unsafe + chunk.to(tl.int64) * H, first, last, CUTS, LOOK)
        if first >= last:
            return
    r = block * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, CHUNK)
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    row = r < length
    col = c < length
    flat_r = start + r
    flat_c = start + c
    w = load_weight(weight, flat_r, row, n, stride_w_t, g, stride_w_g, N, False, WHOLE_N, OPERAND)
    # The tile of C B^T comes from a dot here, though all splits share it: so it lies in registers as the second dot
    # wants it, and no layout changes in the loop.
    pair = tl.dot(
        w,
        load_weight(other_weight, flat_c, col, n, stride_ow_t, g, stride_ow_g, N, True, WHOLE_N, OPERAND),
        input_precision=PRECISION,
    )
    pair = tl.where(related(seq_idx, r, c, flat_r, flat_c, row, col, REVERSE, HAS_DOCS), pair, 0.0)
    if ASM:
        pair = pair.to(OPERAND)
    SIGN: tl.constexpr = -1.0 if REVERSE else 1.0
    for v in tl.range(first, last, num_stages=NUM_STAGES):
        h = v // CUTS
        p0 = (v % CUTS) * BLOCK_P
        line = h.to(tl.int64) * total
        # [N, P]
        state = tl.load(
            states + (chunk.to(tl.int64) * heads + v) * (BLOCK_P * BLOCK_N) + n[:, None] + p[None, :] * BLOCK_N
        )
        value_mask = col[:, None] if WHOLE_P else col[:, None] & (p0 + p < P)[None, :]
        val = tl.load(
            value + flat_c[:, None] * stride_v_t + h.to(tl.int64) * stride_v_h + (p0 + p)[None, :],
            mask=value_mask,
            other=0.0,
        ).to(OPERAND)  # [CHUNK, P]
        pre = tl.load(edge + line + flat_r, mask=row, other=0.0)
        if UNSAFE:
            a_r = tl.load(centred + line + flat_r, mask=row, other=0.0) * SIGN
            a_c = tl.load(centred + line + flat_c, mask=col, other=0.0) * SIGN
            tile_h = widen(pair, ASM) * tl.exp2(tl.minimum(a_r[:, None] - a_c[None, :], 0.0))
            if REVERSE:
                post = tl.load(steps + line + flat_r, mask=row, other=0.0)
            else:
                post = tl.full((ROWS,), 1.0, tl.float32)
                tile_h *= tl.load(steps + line + flat_c, mask=col, other=0.0)[None, :]
        else:
            factors = load_factors(up, line, total, H, flat_c, col)
            if REVERSE:
                pre *= tl.load(up + line + flat_r, mask=row, other=0.0)
                post = tl.load(down + line + flat_r, mask=row, other=0.0)
                tile_h = widen(pair, ASM) * factor(factors, 0)[None, :]
            else:
                post = tl.load(up + line + flat_r, mask=row, other=1.0)
                pre /= post
                tile_h = widen(pair, ASM) * factor(factors, 1)[None, :]
        acc = tl.dot(w, state, input_precision=PRECISION)
        acc *= pre[:, None]
        acc = tl.dot(tile_h.to(OPERAND), val, acc, input_precision=PRECISION)
        acc *= post[:, None]
        out_mask = row[:, None] if WHOLE_P else row[:, None] & (p0 + p < P)[None, :]
        if UNSAFE:
            out_mask = tl.where(out_mask, tl.load(unsafe + chunk.to(tl.int64) * H + h), 0) != 0
        if SKIP != 0:
            if ROWS == CHUNK:
                own = val
            else:
                own = tl.load(
                    value + flat_r[:, None] * stride_v_t + h.to(tl.int64) * stride_v_h + (p0 + p)[None, :],
                    mask=out_mask,
                    other=0.0,
                )
            if SKIP == 1:
                acc += own.to(tl.float32) * tl.load(skip + h).to(tl.float32)
            else:
                acc += (
                    own.to(tl.float32)
                    * tl.load(skip + h * P + p0 + p, mask=p0 + p < P, other=0.0).to(tl.float32)[None, :]
                )
        tl.store(out + (flat_r[:, None] * H + h) * P + (p0 + p)[None, :], acc, mask=out_mask)
