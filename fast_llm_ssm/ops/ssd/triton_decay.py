"""SSD kernels that come before and after the matrix work: steps, decays, the shared C B^T tiles, and the gradient of the steps.

Legend, for all SSD kernels here:
    T tokens of all rows together (rows lie one after the other)   H heads   G groups   P head dim   N state size
    chunk: CHUNK tokens handled at once; the last one of a row (or document) may be shorter, tokens past its end count as dt = 0
    v: "virtual heads". A head wider than BLOCK_P is cut into `cuts` slices that share dt and decay; virtual head = head * cuts + slice
    a: log2 of the decay from the document's (or chunk's) start up to and with a token; `centred` is a minus half of the document's total in the
       chunk, so that 2^(centred_i) and 2^(-centred_j) both fit fp32 and their product is the decay from token j to token i
    enter_i: decay from the chunk's start to token i, 0 once a document boundary lies between   leave_j: decay from token j to the chunk's end, likewise
    carry: decay over the whole chunk, 0 with a boundary in it
"""

import triton
import triton.language as tl

# Largest |centred| (log2) whose powers are used in products. fp32 reaches 2^127; 17 bits stay for the data. Beyond it kernels take one exp2 a pair of tokens.
SAFE_LOG2 = tl.constexpr(110.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_bounds(chunk, table, row_length, row_chunks, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """First token of a chunk in the flat order of all rows, and its number of tokens."""
    if TABLE:
        start = tl.load(table + 2 * chunk).to(tl.int64)
        length = tl.load(table + 2 * chunk + 1)
    else:
        row = chunk // row_chunks
        first = (chunk % row_chunks) * CHUNK
        start = row.to(tl.int64) * row_length + first
        length = tl.minimum(row_length - first, CHUNK)
    return start, length


@triton.jit
def _softplus(x):
    u = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    # log(1 + u) loses u's low bits; log(w) * u / (w - 1) does not.
    return tl.where(x > 20.0, x, tl.where(w == 1.0, u, tl.log(w) * (u / tl.maximum(w - 1.0, 1e-30))))


@triton.jit
def _segmented_add(value_l, start_l, value_r, start_r):
    return tl.where(start_r != 0, value_r, value_l + value_r), start_l | start_r


@triton.jit
def _latest(value_l, set_l, value_r, set_r):
    return tl.where(set_r != 0, value_r, value_l), set_l | set_r


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total"])
def decay_kernel(
    dt, bias, A, seq_idx, table, steps, centred, enter, leave, carry, unsafe,
    row_length, row_chunks, total, H, stride_dt_t, stride_dt_h, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dt -> steps dt' and decays, all fp32 [H, T]; carry and unsafe [chunks, H]. One program a chunk and BLOCK_H heads."""
    chunk = tl.program_id(0)
    start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = tl.arange(0, CHUNK)
    head = h < H
    token = t < length
    mask = head[:, None] & token[None, :]
    flat = start + t
    raw = tl.load(dt + h[:, None].to(tl.int64) * stride_dt_h + flat[None, :] * stride_dt_t, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias + h, mask=head, other=0.0).to(tl.float32)[:, None]
    if SOFTPLUS:
        raw = _softplus(raw)
    step = tl.minimum(tl.maximum(raw, dt_min), dt_max)
    step = tl.where(mask, step, 0.0)
    rate = tl.load(A + h, mask=head, other=0.0).to(tl.float32) * LOG2_E
    # 2^-256 is 0 already: the bound changes no decay and keeps weak decays exact behind a strong one.
    log_decay = tl.maximum(step * rate[:, None], -256.0)
    if HAS_DOCS:
        # Each document's sums start afresh, so no bit of them depends on the document before.
        doc = tl.load(seq_idx + flat, mask=token, other=-1)
        before = tl.load(seq_idx + flat - 1, mask=token & (t > 0), other=-1)
        after = tl.load(seq_idx + flat + 1, mask=t + 1 < length, other=-2)
        starts = tl.broadcast_to(((doc != before) | (t == 0)).to(tl.int32)[None, :], (BLOCK_H, CHUNK))
        ends = tl.broadcast_to((doc != after).to(tl.int32)[None, :], (BLOCK_H, CHUNK))
        a, _ = tl.associative_scan((log_decay, starts), 1, _segmented_add)
        doc_total, _ = tl.associative_scan((a, ends), 1, _latest, reverse=True)
        row_first = ((chunk % row_chunks) == 0) & (TABLE == 0)
        doc_first = tl.load(seq_idx + start, mask=length > 0, other=-1)
        doc_before = tl.load(seq_idx + start - 1, mask=(length > 0) & (row_first == 0), other=0)
        doc_before = tl.where(row_first, doc_first, doc_before)
        doc_last = tl.load(seq_idx + start + length - 1, mask=length > 0, other=-1)
        from_start = (doc == doc_before)[None, :]
        to_end = (doc == doc_last)[None, :]
        whole = (doc_last == doc_before).to(tl.float32)
        chunk_end = tl.sum(tl.where((t == length - 1)[None, :], a, 0.0), 1)
    else:
        a = tl.cumsum(log_decay, 1)
        chunk_end = tl.sum(tl.where((t == CHUNK - 1)[None, :], a, 0.0), 1)  # padding does not decay, so the last column is the end
        doc_total = tl.broadcast_to(chunk_end[:, None], (BLOCK_H, CHUNK))
        from_start = token[None, :]
        to_end = token[None, :]
        whole = 1.0
    half = 0.5 * doc_total
    out = h[:, None].to(tl.int64) * total + flat[None, :]
    tl.store(steps + out, step, mask=mask)
    tl.store(centred + out, a - half, mask=mask)
    tl.store(enter + out, tl.where(from_start, tl.exp2(tl.minimum(a, 0.0)), 0.0), mask=mask)
    tl.store(leave + out, tl.where(to_end, tl.exp2(tl.minimum(chunk_end[:, None] - a, 0.0)), 0.0), mask=mask)
    per_chunk = chunk.to(tl.int64) * H + h
    tl.store(carry + per_chunk, tl.exp2(tl.minimum(chunk_end, 0.0)) * whole, mask=head)
    worst = tl.max(tl.where(mask, tl.abs(half), 0.0), 1)
    tl.store(unsafe + per_chunk, (worst > SAFE_LOG2).to(tl.int32), mask=head)


@triton.jit(do_not_specialize=["row_length", "row_chunks"])
def product_kernel(
    B, C, seq_idx, table, cb, row_length, row_chunks, G, N, stride_b_t, stride_b_g, stride_c_t, stride_c_g,
    HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE_N: tl.constexpr,
):  # fmt: skip
    """cb[i, j] = C_i . B_j for j <= i of one document, else 0: [chunks, G, CHUNK, CHUNK]. Shared by all heads of a group."""
    pid = tl.program_id(0)
    chunk = pid // G
    g = (pid % G).to(tl.int64)
    start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
    t = tl.arange(0, CHUNK)
    n = tl.arange(0, BLOCK_N)
    token = t < length
    flat = start + t
    state = n < N
    c_mask = token[:, None] if WHOLE_N else token[:, None] & state[None, :]
    b_mask = token[None, :] if WHOLE_N else token[None, :] & state[:, None]
    c = tl.load(C + flat[:, None] * stride_c_t + g * stride_c_g + n[None, :], mask=c_mask, other=0.0).to(OPERAND)
    b = tl.load(B + flat[None, :] * stride_b_t + g * stride_b_g + n[:, None], mask=b_mask, other=0.0).to(OPERAND)
    product = tl.dot(c, b, input_precision=PRECISION)
    keep = (t[:, None] >= t[None, :]) & token[:, None]
    if HAS_DOCS:
        doc = tl.load(seq_idx + flat, mask=token, other=-1)
        keep &= doc[:, None] == doc[None, :]
    product = tl.where(keep, product, 0.0)
    tl.store(cb + pid.to(tl.int64) * CHUNK * CHUNK + t[:, None] * CHUNK + t[None, :], product.to(OPERAND))


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total"])
def step_grad_kernel(
    dt, bias, A, seq_idx, table, steps, rows_c, rows_b, rows_self, rows_edge, through, ddt, dA, dbias,
    row_length, row_chunks, total, H, stride_dt_t, stride_dt_h, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr, CUTS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Gradients of dt, A and the bias from the row sums that the other kernels left.

    With R_i what token i's output sends back along the decays that end at i, E_j the same for decays from j to the chunk's end, c_j for those that start at j
    inside the chunk, and K for decays through the whole chunk: d(log decay)_k = sum_{i >= k} R_i - c_i  +  sum_{j < k} E_j  +  K, within one document.
    """
    chunk = tl.program_id(0)
    start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = tl.arange(0, CHUNK)
    head = h < H
    token = t < length
    mask = head[:, None] & token[None, :]
    flat = start + t
    own = h[:, None].to(tl.int64) * total + flat[None, :]
    step = tl.load(steps + own, mask=mask, other=0.0)
    ends = tl.zeros((BLOCK_H, CHUNK), tl.float32)
    begins = tl.zeros((BLOCK_H, CHUNK), tl.float32)
    edge = tl.zeros((BLOCK_H, CHUNK), tl.float32)
    itself = tl.zeros((BLOCK_H, CHUNK), tl.float32)
    whole = tl.zeros((BLOCK_H,), tl.float32)
    p = tl.arange(0, BLOCK_P)
    for cut in tl.static_range(CUTS):
        part = (h[:, None].to(tl.int64) * CUTS + cut) * total + flat[None, :]
        ends += tl.load(rows_c + part, mask=mask, other=0.0)
        begins += tl.load(rows_b + part, mask=mask, other=0.0)
        itself += tl.load(rows_self + part, mask=mask, other=0.0)
        edge += tl.load(rows_edge + part, mask=mask, other=0.0)
        lines = (chunk.to(tl.int64) * H + h[:, None]) * (CUTS * BLOCK_P) + cut * BLOCK_P + p[None, :]
        whole += tl.sum(tl.load(through + lines, mask=head[:, None], other=0.0), 1)
    balance = ends - step * begins
    if HAS_DOCS:
        doc = tl.load(seq_idx + flat, mask=token, other=-1)
        after = tl.load(seq_idx + flat + 1, mask=t + 1 < length, other=-2)
        stops = tl.broadcast_to((doc != after).to(tl.int32)[None, :], (BLOCK_H, CHUNK))
        suffix, _ = tl.associative_scan((balance, stops), 1, _segmented_add, reverse=True)
    else:
        suffix = tl.cumsum(balance, 1, reverse=True)
    leaving = step * edge
    prefix = tl.cumsum(leaving, 1) - leaving
    dlog = suffix + prefix + whole[:, None]
    rate = tl.load(A + h, mask=head, other=0.0).to(tl.float32)
    dstep = begins + itself + edge + rate[:, None] * dlog
    per_chunk = chunk.to(tl.int64) * H + h
    tl.store(dA + per_chunk, tl.sum(tl.where(mask, step * dlog, 0.0), 1), mask=head)
    raw = tl.load(dt + h[:, None].to(tl.int64) * stride_dt_h + flat[None, :] * stride_dt_t, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias + h, mask=head, other=0.0).to(tl.float32)[:, None]
    open_step = raw
    if SOFTPLUS:
        open_step = _softplus(raw)
    dstep = tl.where((open_step >= dt_min) & (open_step <= dt_max) & mask, dstep, 0.0)
    if SOFTPLUS:
        dstep *= 1.0 / (1.0 + tl.exp(-raw))
    tl.store(ddt + flat[None, :] * H + h[:, None], dstep, mask=mask)
    if HAS_BIAS:
        tl.store(dbias + per_chunk, tl.sum(dstep, 1), mask=head)


@triton.jit(do_not_specialize=["T"])
def skip_grad_kernel(
    x, dout, dD, T, H, P, stride_x_t, stride_x_h, stride_o_t, stride_o_h, TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Partial sums of dout * x over TOKENS tokens for D of shape [H, P]: dD [pieces, H, P]."""
    piece = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    total = tl.zeros((BLOCK_P,), tl.float32)
    for first in range(0, TOKENS, BLOCK):
        t = piece.to(tl.int64) * TOKENS + first + tl.arange(0, BLOCK)
        mask = (t < T)[:, None] & (p < P)[None, :]
        a = tl.load(x + t[:, None] * stride_x_t + h * stride_x_h + p[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(dout + t[:, None] * stride_o_t + h * stride_o_h + p[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(a * b, 0)
    tl.store(dD + (piece.to(tl.int64) * H + h) * P + p, total, mask=p < P)


@triton.jit(do_not_specialize=["size"])
def gate_kernel(
    y, z, dout, dy, dz, size, H, P, stride_z_t, stride_z_h, stride_o_t, stride_o_h, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """dy = y * silu(z), or backward dy = dout * silu(z), dz = dout * y * silu'(z). y, dy, dz are contiguous [T, H, P]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    t = i // (H * P)
    h = (i // P) % H
    p = i % P
    gate = tl.load(z + t * stride_z_t + h * stride_z_h + p, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    value = tl.load(y + i, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        grad = tl.load(dout + t * stride_o_t + h * stride_o_h + p, mask=mask, other=0.0).to(tl.float32)
        tl.store(dy + i, grad * gate * sigmoid, mask=mask)
        tl.store(dz + i, grad * value * sigmoid * (1.0 + gate * (1.0 - sigmoid)), mask=mask)
    else:
        tl.store(dy + i, value * gate * sigmoid, mask=mask)
