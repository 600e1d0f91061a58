"""SSD kernels for the gradients of B and C and the row sums behind those of dt and A. The legend is in triton_decay.py.

With q_ij = dy_i . x_j and w_ij = q_ij decay_ij dt_j for j <= i:
    dC_i = sum_h ( sum_j w_ij B_j + enter_i dy_i S )          dB_j = sum_h ( sum_i w_ij C_i + leave_j dt_j x_j G )
`pair_grad_kernel` sums w over the heads of a group; `edge_grad_kernel` adds the states' terms and multiplies by B or
C once.
"""

import triton
import triton.language as tl

from fast_llm_ssm.ops.ssd.triton_decay import (
    LEAST_STEP,
    chunk_bounds,
    factor,
    load_factors,
    load_weight,
    related,
    unsafe_range,
    widen,
)


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total"])
def pair_grad_kernel(
    dout, x, B, C, seq_idx, steps, centred, up, down, unsafe, table, pair_grad, row_sums, col_sums, self_dots,
    self_pairs,
    row_length, row_chunks, total, H, G, P, N, splits, stride_o_t, stride_o_h, stride_x_t, stride_x_h, stride_b_t,
    stride_b_g, stride_c_t, stride_c_g,
    HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE_P: tl.constexpr, WHOLE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, ASM: tl.constexpr, UNSAFE: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """One ROWS x ROWS tile on or below a chunk's diagonal, CHUNK / ROWS being 1 or 2:

    pair_grad = sum_h w (fp32, [splits, chunks, G, CHUNK, CHUNK]); per head,
    over pairs j < i with t_ij = w_ij cb_ij: row_sums_i = sum_j t, col_sums_j = sum_i t,
    and on the diagonal self_dots_i = q_ii, self_pairs_i = cb_ii [G, T]. Row and column sums come from the same fp32
    products, so that they cancel where A's gradient needs it.
    row_sums and col_sums are [CHUNK / ROWS, virtual heads, T]: first the tile on the diagonal, then the one below it.
    Unsafe heads are left out; a second launch with UNSAFE, one exp2 a pair, adds them.
    Grid: chunks * tiles * G * splits.
    """
    TILES: tl.constexpr = 1 if CHUNK == ROWS else 3
    pid = tl.program_id(0)
    split = pid % splits
    g = (pid // splits) % G
    tile = (pid // (splits * G)) % TILES
    chunk = pid // (splits * G * TILES)
    i = (tile + 1) // 2
    j = tile // 2
    start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
    heads = H * CUTS
    group_heads = heads // G
    count = tl.cdiv(group_heads, splits)
    first = g * group_heads + split * count
    last = tl.minimum(first + count, (g + 1) * group_heads)
    last = tl.where(i * ROWS < length, last, first)  # nothing to do past a row's end
    if UNSAFE:
        first, last = unsafe_range(unsafe + chunk.to(tl.int64) * H, first, last, CUTS, LOOK)
        if first >= last:
            return
    r = i * ROWS + tl.arange(0, ROWS)
    c = j * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, BLOCK_P)
    row = r < length
    col = c < length
    flat_r = start + r
    flat_c = start + c
    n = tl.arange(0, BLOCK_N)
    pair = tl.dot(
        load_weight(C, flat_r, row, n, stride_c_t, g, stride_c_g, N, False, WHOLE_N, OPERAND),
        load_weight(B, flat_c, col, n, stride_b_t, g, stride_b_g, N, True, WHOLE_N, OPERAND),
        input_precision=PRECISION,
    )
    keep = related(seq_idx, r, c, flat_r, flat_c, row, col, False, HAS_DOCS)
    on_diagonal = r[:, None] == c[None, :]
    own_pair = tl.sum(tl.where(on_diagonal, pair, 0.0), 1)
    if not UNSAFE and i == j and split == 0:
        tl.store(self_pairs + g.to(tl.int64) * total + flat_r, own_pair, mask=row)
    # a token's pair with itself has no decay: left out, it need not cancel
    pair = tl.where(keep & (r[:, None] > c[None, :]), pair, 0.0)
    if ASM:
        pair = pair.to(OPERAND)
    grad = tl.zeros((ROWS, ROWS), tl.float32)
    slot = (i - j).to(tl.int64) * heads
    for v in tl.range(first, last, num_stages=NUM_STAGES):
        h = v // CUTS
        p0 = (v % CUTS) * BLOCK_P
        line = h.to(tl.int64) * total
        row_mask = row[:, None] if WHOLE_P else row[:, None] & (p0 + p < P)[None, :]
        col_mask = col[None, :] if WHOLE_P else col[None, :] & (p0 + p < P)[:, None]
        dy = tl.load(
            dout + flat_r[:, None] * stride_o_t + h.to(tl.int64) * stride_o_h + (p0 + p)[None, :],
            mask=row_mask,
            other=0.0,
        ).to(OPERAND)
        # [P, c]
        xt = tl.load(
            x + flat_c[None, :] * stride_x_t + h.to(tl.int64) * stride_x_h + (p0 + p)[:, None], mask=col_mask, other=0.0
        ).to(OPERAND)
        q = tl.dot(dy, xt, input_precision=PRECISION)
        lines = tl.cast(v, tl.int64) * total
        if not UNSAFE and i == j:
            itself = tl.sum(tl.where(on_diagonal, q, 0.0), 1)
            tl.store(self_dots + lines + flat_r, itself, mask=row)
        flag = tl.load(unsafe + chunk.to(tl.int64) * H + h)
        chosen = (flag != 0) if UNSAFE else (flag == 0)
        if UNSAFE:
            a_r = tl.load(centred + line + flat_r, mask=row, other=0.0)
            a_c = tl.load(centred + line + flat_c, mask=col, other=0.0)
            step = tl.maximum(tl.load(steps + line + flat_c, mask=col, other=0.0), LEAST_STEP)
            q = tl.where(chosen, q * (step[None, :] * tl.exp2(tl.minimum(a_r[:, None] - a_c[None, :], 0.0))), 0.0)
            rows = tl.full((ROWS,), 1.0, tl.float32)
        else:
            q *= tl.where(chosen, factor(load_factors(up, line, total, H, flat_c, col), 1), 0.0)[None, :]
            rows = tl.where(chosen, tl.load(up + line + flat_r, mask=row, other=0.0), 0.0)
        grad += q * rows[:, None]  # above the diagonal this may overflow; it is dropped below
        q *= widen(pair, ASM)
        out_r = row
        out_c = col
        if UNSAFE:
            out_r = tl.where(row, flag, 0) != 0
            out_c = tl.where(col, flag, 0) != 0
        tl.store(row_sums + slot * total + lines + flat_r, tl.sum(q, 1) * rows, mask=out_r)
        tl.store(col_sums + slot * total + lines + flat_c, tl.sum(q * rows[:, None], 0), mask=out_c)
    chunks = tl.num_programs(0) // (splits * G * TILES)
    out = pair_grad + ((split.to(tl.int64) * chunks + chunk) * G + g) * (CHUNK * CHUNK)
    where = r[:, None] * CHUNK + c[None, :]
    grad = tl.where(keep, grad, 0.0)
    if UNSAFE:
        grad += tl.load(out + where)
    tl.store(out + where, grad)


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total", "pair_splits"])
def edge_grad_kernel(
    own, own_weight, across_weight, states, pair_grad, steps, edge, table, out, edge_sums,
    row_length, row_chunks, total, H, G, P, N, splits, pair_splits, stride_o_t, stride_o_h, stride_ow_t, stride_ow_g,
    stride_aw_t, stride_aw_g,
    REVERSE: tl.constexpr, TABLE: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, WHOLE_P: tl.constexpr,
    WHOLE_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Forward: dC, own dy, states S, edge enter, edge_sums_i = enter_i C_i . (dy_i S). Reverse: dB, own x, states G,
    edge leave, edge_sums_j = leave_j B_j . (x_j G).

    Grid: chunks * (CHUNK / ROWS) * G * splits; `out` is [splits, T, G, N].
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
    row_mask = row[:, None] if WHOLE_N else row[:, None] & (n < N)[None, :]
    w = load_weight(own_weight, flat_r, row, n, stride_ow_t, g, stride_ow_g, N, False, WHOLE_N, OPERAND)
    if ASM:
        # Multiplied by one, the weight lies in registers like k below, and no layout changes in the loop.
        w = tl.dot(w, (n[:, None] == n[None, :]).to(OPERAND)).to(OPERAND)
    heads = H * CUTS
    group_heads = heads // G
    count = tl.cdiv(group_heads, splits)
    first = g * group_heads + split * count
    last = tl.minimum(first + count, (g + 1) * group_heads)
    last = tl.where(block * ROWS < length, last, first)
    grad = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for v in tl.range(first, last, num_stages=NUM_STAGES):
        h = v // CUTS
        p0 = (v % CUTS) * BLOCK_P
        line = h.to(tl.int64) * total
        mine_mask = row[:, None] if WHOLE_P else row[:, None] & (p0 + p < P)[None, :]
        mine = tl.load(
            own + flat_r[:, None] * stride_o_t + h.to(tl.int64) * stride_o_h + (p0 + p)[None, :],
            mask=mine_mask,
            other=0.0,
        ).to(OPERAND)
        # [P, N]
        state = tl.load(
            states + (chunk.to(tl.int64) * heads + v) * (BLOCK_P * BLOCK_N) + p[:, None] * BLOCK_N + n[None, :]
        )
        on_edge = tl.load(edge + line + flat_r, mask=row, other=0.0)
        k = tl.dot(mine, state, input_precision=PRECISION)
        tl.store(edge_sums + tl.cast(v, tl.int64) * total + flat_r, tl.sum(k * widen(w, ASM), 1) * on_edge, mask=row)
        if REVERSE:
            on_edge *= tl.load(steps + line + flat_r, mask=row, other=0.0)
        grad += k * on_edge[:, None]
    # The upper tiles of pair_grad hold nothing.
    below = (c[None, :] >= r[:, None]) if REVERSE else (r[:, None] >= c[None, :])
    where = (c[None, :] * CHUNK + r[:, None]) if REVERSE else (r[:, None] * CHUNK + c[None, :])
    chunks = tl.num_programs(0) // (splits * G * (CHUNK // ROWS))
    dots = tl.zeros((ROWS, CHUNK), tl.float32)
    if split == 0:
        for part in range(pair_splits):
            dots += tl.load(
                pair_grad + ((part * chunks + chunk).to(tl.int64) * G + g) * (CHUNK * CHUNK) + where,
                mask=below,
                other=0.0,
            )
    other = load_weight(across_weight, flat_c, col, n, stride_aw_t, g, stride_aw_g, N, False, WHOLE_N, OPERAND)
    grad = tl.dot(dots.to(OPERAND), other, grad, input_precision=PRECISION)
    slab = out + split.to(tl.int64) * total * G * N
    tl.store(slab + (flat_r[:, None] * G + g) * N + n[None, :], grad, mask=row_mask)
