"""The SSD kernel for the gradients of C and B (mirror images) and the row sums behind those of dt and A. The legend is in triton_decay.py."""

import triton
import triton.language as tl

from fast_llm_ssm.ops.ssd.triton_decay import chunk_bounds


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total"])
def projection_grad_kernel(
    own, across, own_weight, across_weight, states, cb, seq_idx, steps, centred, edge, unsafe, table, out, row_sums, extra_sums, skip_sums,
    row_length, row_chunks, total, H, G, P, N, splits,
    stride_o_t, stride_o_h, stride_a_t, stride_a_h, stride_ow_t, stride_ow_g, stride_aw_t, stride_aw_g,
    REVERSE: tl.constexpr, SKIP: tl.constexpr, HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, WHOLE_P: tl.constexpr,
    WHOLE_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """With q_ij = dy_i . x_j and w_ij = q_ij decay_ij dt_j, summed over the heads of a group:

    Forward: dC_i = sum_{j <= i} w_ij B_j + enter_i dy_i S       own dy, across x,  own weight C, across weight B; row sums over j < i of w_ij cb_ij, + enter_i C_i.(dy_i S)
    Reverse: dB_j = sum_{i >= j} w_ij C_i + leave_j dt_j x_j G   own x,  across dy, own weight B, across weight C; row sums over i > j of w_ij cb_ij / dt_j

    Extra sums: forward cb_ii q_ii, reverse leave_j B_j.(x_j G).
    Both passes form w_ij in fp32 from the same operands, so their row sums cancel to fp32 rounding where the gradient of A needs it.
    Grid and walk as in the scan kernel; `out` is [splits, T, G, N].
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
    state_ok = n < N
    weight_mask = row[:, None] if WHOLE_N else row[:, None] & state_ok[None, :]
    w = tl.load(own_weight + flat_r[:, None] * stride_ow_t + g.to(tl.int64) * stride_ow_g + n[None, :], mask=weight_mask, other=0.0)
    tile = cb + (chunk.to(tl.int64) * G + g) * (CHUNK * CHUNK)
    if REVERSE:
        pair = tl.load(tile + c[None, :] * CHUNK + r[:, None])
    else:
        pair = tl.load(tile + r[:, None] * CHUNK + c[None, :])
    on_diagonal = r[:, None] == c[None, :]
    own_pair = tl.sum(tl.where(on_diagonal, pair.to(tl.float32), 0.0), 1)
    pair = tl.where(on_diagonal, 0.0, pair.to(tl.float32)).to(OPERAND)  # a token's pair with itself has no decay: left out, it need not cancel
    heads = H * CUTS
    group_heads = heads // G
    count = tl.cdiv(group_heads, splits)
    first = g * group_heads + split * count
    last = tl.minimum(first + count, (g + 1) * group_heads)
    last = tl.where(block * ROWS < length, last, first)  # nothing to do past a row's end
    grad = tl.zeros((ROWS, BLOCK_N), tl.float32)
    grad_pair = tl.zeros((ROWS, CHUNK), tl.float32)
    for v in tl.range(first, last, num_stages=NUM_STAGES):
        h = v // CUTS
        p0 = (v % CUTS) * BLOCK_P
        line = h.to(tl.int64) * total
        mine_mask = row[:, None] if WHOLE_P else row[:, None] & (p0 + p < P)[None, :]
        theirs_mask = col[None, :] if WHOLE_P else col[None, :] & (p0 + p < P)[:, None]
        mine = tl.load(own + flat_r[:, None] * stride_o_t + h.to(tl.int64) * stride_o_h + (p0 + p)[None, :], mask=mine_mask, other=0.0).to(OPERAND)
        theirs = tl.load(
            across + flat_c[None, :] * stride_a_t + h.to(tl.int64) * stride_a_h + (p0 + p)[:, None], mask=theirs_mask, other=0.0
        ).to(OPERAND)  # [P, CHUNK]
        state = tl.load(states + (chunk.to(tl.int64) * heads + v) * (BLOCK_P * BLOCK_N) + p[:, None] * BLOCK_N + n[None, :])  # [P, N]
        a_r = tl.load(centred + line + flat_r, mask=row, other=0.0)
        a_c = tl.load(centred + line + flat_c, mask=col, other=0.0)
        on_edge = tl.load(edge + line + flat_r, mask=row, other=0.0)
        safe = tl.load(unsafe + chunk.to(tl.int64) * H + h) == 0
        q = tl.dot(mine, theirs, input_precision=PRECISION)  # [ROWS, CHUNK]
        if not REVERSE:
            itself = tl.sum(tl.where(on_diagonal, q, 0.0), 1)  # dy_i . x_i
        sign = -1.0 if REVERSE else 1.0
        if REVERSE:
            columns = tl.full((CHUNK,), 1.0, tl.float32)
            step_r = tl.load(steps + line + flat_r, mask=row, other=0.0)
        else:
            columns = tl.load(steps + line + flat_c, mask=col, other=0.0)
            step_r = tl.full((ROWS,), 1.0, tl.float32)
        gap_r = a_r * sign
        gap_c = a_c * sign
        post = tl.exp2(tl.where(safe, gap_r, 0.0))
        q *= (columns * tl.exp2(tl.where(safe, -gap_c, 0.0)))[None, :]
        if not safe:
            q *= tl.exp2(tl.minimum(gap_r[:, None] - gap_c[None, :], 0.0))
        sums = tl.sum(q * pair.to(tl.float32), 1) * post
        grad_pair += q * (post * step_r)[:, None]  # pairs outside the triangle may hold inf here; they are dropped below
        k = tl.dot(mine, state, input_precision=PRECISION)  # [ROWS, N]
        edges = tl.sum(k * w.to(tl.float32), 1) * on_edge
        grad += k * (on_edge * step_r)[:, None]
        lines = tl.cast(v, tl.int64) * total + flat_r
        if REVERSE:
            tl.store(row_sums + lines, sums, mask=row)
            tl.store(extra_sums + lines, edges, mask=row)
        else:
            tl.store(row_sums + lines, sums + edges, mask=row)
            tl.store(extra_sums + lines, itself * own_pair, mask=row)
            if SKIP:
                tl.store(skip_sums + (chunk.to(tl.int64) * (CHUNK // ROWS) + block) * heads + v, tl.sum(itself, 0))
    keep = (c[None, :] >= r[:, None]) if REVERSE else (r[:, None] >= c[None, :])
    keep &= row[:, None] & col[None, :]
    if HAS_DOCS:
        doc_r = tl.load(seq_idx + flat_r, mask=row, other=-1)
        doc_c = tl.load(seq_idx + flat_c, mask=col, other=-1)
        keep &= doc_r[:, None] == doc_c[None, :]
    dots = tl.where(keep, grad_pair, 0.0).to(OPERAND)
    theirs_mask = col[:, None] if WHOLE_N else col[:, None] & state_ok[None, :]
    other_w = tl.load(across_weight + flat_c[:, None] * stride_aw_t + g.to(tl.int64) * stride_aw_g + n[None, :], mask=theirs_mask, other=0.0).to(OPERAND)
    grad = tl.dot(dots, other_w, grad, input_precision=PRECISION)
    out_mask = row[:, None] if WHOLE_N else row[:, None] & state_ok[None, :]
    slab = out + split.to(tl.int64) * total * G * N
    tl.store(slab + (flat_r[:, None] * G + g) * N + n[None, :], grad, mask=out_mask)
