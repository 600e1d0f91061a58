"""The SSD kernel that applies the decayed C B^T tiles: forward for y, mirrored for dx. The legend is in triton_decay.py."""

import triton
import triton.language as tl

from fast_llm_ssm.ops.ssd.triton_decay import chunk_bounds


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total"])
def scan_kernel(
    value, weight, states, cb, steps, centred, edge, unsafe, skip, table, out,
    row_length, row_chunks, total, H, G, P, N, splits, stride_v_t, stride_v_h, stride_w_t, stride_w_g,
    REVERSE: tl.constexpr, SKIP: tl.constexpr, TABLE: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, WHOLE_P: tl.constexpr, WHOLE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Forward: y_i  = sum_{j <= i} cb_ij decay_ij dt_j x_j + enter_i C_i S + D x_i         (value x, weight C, edge enter, S at the chunk's start)
    Reverse: dx_j = dt_j (sum_{i >= j} cb_ij decay_ij dy_i + leave_j B_j G) + D dy_j     (value dout, weight B, edge leave, G = dL/dS at the chunk's end)

    decay_ij = 2^(centred_i) 2^(-centred_j): one power goes into the columns of the tile, the other onto the finished rows, so no exp2 is taken per pair of
    tokens, except in chunks marked unsafe. Rounding to OPERAND comes after the products, in fp32.
    Grid: chunks * (CHUNK / ROWS) * groups * splits; each program walks its split of the group's virtual heads and keeps its C (B) and cb tiles.
    """
    pid = tl.program_id(0)
    split = pid % splits
    g = (pid // splits) % G
    block = (pid // (splits * G)) % (CHUNK // ROWS)
    chunk = pid // (splits * G * (CHUNK // ROWS))
    start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
    r = block * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, CHUNK)
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    row = r < length
    col = c < length
    flat_r = start + r
    flat_c = start + c
    weight_mask = row[:, None] if WHOLE_N else row[:, None] & (n < N)[None, :]
    w = tl.load(weight + flat_r[:, None] * stride_w_t + g.to(tl.int64) * stride_w_g + n[None, :], mask=weight_mask, other=0.0).to(OPERAND)
    tile = cb + (chunk.to(tl.int64) * G + g) * (CHUNK * CHUNK)
    if REVERSE:
        pair = tl.load(tile + c[None, :] * CHUNK + r[:, None])
    else:
        pair = tl.load(tile + r[:, None] * CHUNK + c[None, :])
    heads = H * CUTS
    group_heads = heads // G
    count = tl.cdiv(group_heads, splits)
    first = g * group_heads + split * count
    last = tl.minimum(first + count, (g + 1) * group_heads)
    last = tl.where(block * ROWS < length, last, first)  # nothing to do past a row's end
    for v in tl.range(first, last, num_stages=NUM_STAGES):
        h = v // CUTS
        p0 = (v % CUTS) * BLOCK_P
        line = h.to(tl.int64) * total
        state = tl.load(states + (chunk.to(tl.int64) * heads + v) * (BLOCK_P * BLOCK_N) + n[:, None] + p[None, :] * BLOCK_N)  # [N, P]
        value_mask = col[:, None] if WHOLE_P else col[:, None] & (p0 + p < P)[None, :]
        val = tl.load(
            value + flat_c[:, None] * stride_v_t + h.to(tl.int64) * stride_v_h + (p0 + p)[None, :], mask=value_mask, other=0.0
        ).to(OPERAND)  # [CHUNK, P]
        a_r = tl.load(centred + line + flat_r, mask=row, other=0.0)
        a_c = tl.load(centred + line + flat_c, mask=col, other=0.0)
        pre = tl.load(edge + line + flat_r, mask=row, other=0.0)
        post = tl.load(steps + line + flat_r, mask=row, other=0.0) if REVERSE else tl.full((ROWS,), 1.0, tl.float32)
        safe = tl.load(unsafe + chunk.to(tl.int64) * H + h) == 0
        if REVERSE:
            columns = tl.full((CHUNK,), 1.0, tl.float32)
        else:
            columns = tl.load(steps + line + flat_c, mask=col, other=0.0)
        gap_r = -a_r if REVERSE else a_r
        gap_c = -a_c if REVERSE else a_c
        pre *= tl.exp2(tl.where(safe, -gap_r, 0.0))
        post *= tl.exp2(tl.where(safe, gap_r, 0.0))
        columns *= tl.exp2(tl.where(safe, -gap_c, 0.0))
        tile_h = pair.to(tl.float32) * columns[None, :]
        if not safe:
            tile_h *= tl.exp2(tl.minimum(gap_r[:, None] - gap_c[None, :], 0.0))
        acc = tl.dot(w, state, input_precision=PRECISION)
        acc *= pre[:, None]
        acc = tl.dot(tile_h.to(OPERAND), val, acc, input_precision=PRECISION)
        acc *= post[:, None]
        out_mask = row[:, None] if WHOLE_P else row[:, None] & (p0 + p < P)[None, :]
        if SKIP != 0:
            if ROWS == CHUNK:
                own = val
            else:
                own = tl.load(value + flat_r[:, None] * stride_v_t + h.to(tl.int64) * stride_v_h + (p0 + p)[None, :], mask=out_mask, other=0.0)
            if SKIP == 1:
                acc += own.to(tl.float32) * tl.load(skip + h).to(tl.float32)
            else:
                acc += own.to(tl.float32) * tl.load(skip + h * P + p0 + p, mask=p0 + p < P, other=0.0).to(tl.float32)[None, :]
        tl.store(out + (flat_r[:, None] * H + h) * P + (p0 + p)[None, :], acc, mask=out_mask)
