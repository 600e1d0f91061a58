"""SSD kernels that come before and after the matrix work: steps, decays, and the gradient of the steps.

Legend, for all SSD kernels here:
    T tokens of all rows together (rows lie one after the other)   H heads   G groups   P head dim   N state size
    chunk: CHUNK tokens handled at once; the last one of a row (or document) may be shorter, tokens past its end count
    as dt = 0
    v: "virtual heads". A head wider than BLOCK_P is cut into `cuts` slices that share dt and decay; virtual head =
    head * cuts + slice
    a: log2 of the decay from the document's (or chunk's) start up to and with a token; `centred` is a minus half of
    the document's total in the
       chunk, so that the powers below fit fp32
    up_i = 2^(centred_i)   down_j = dt_j 2^(-centred_j): up_i down_j weighs what token j gives to token i
    enter_i: decay from the chunk's start to token i, 0 once a document boundary lies between   leave_j: decay from
    token j to the chunk's end, likewise
    carry: decay over the whole chunk, 0 with a boundary in it
"""

import triton
import triton.language as tl

# Largest |centred| (log2) whose powers are used in products. fp32 reaches 2^127; 17 bits stay for the data. Beyond it
# kernels take one exp2 a pair of tokens.
SAFE_LOG2 = tl.constexpr(110.0)
# Least step in `down`, so that sums over it can be divided by the step again; what it adds where the step is 0 is
# below fp32's rounding.
LEAST_STEP = tl.constexpr(9.094947017729282e-13)
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
def load_factors(up, line, total, H, flat, ok):
    """up, down, enter and leave of some tokens, [4, tokens]: the arrays follow one another in memory.

    Read as one tile because a single short vector would be read by every thread anew, at the price of an address
    register for each element.
    """
    plane = tl.arange(0, 4).to(tl.int64) * total * H
    return tl.load(up + line + plane[:, None] + flat[None, :], mask=ok[None, :], other=0.0)


@triton.jit
def factor(tile, k: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 4)[:, None] == k, tile, 0.0), 0)


@triton.jit
def widen(x, ASM: tl.constexpr):
    """bf16 -> fp32. As assembly it stays inside the loop: hoisted out of it, a tile would hold twice the registers."""
    if ASM:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=False, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def unsafe_range(flags, first, last, CUTS: tl.constexpr, LOOK: tl.constexpr):
    """The smallest range of virtual heads in [first, last) that holds all unsafe heads; empty without any."""
    low = last
    high = first
    for base in range(first // CUTS, tl.cdiv(last, CUTS), LOOK):
        h = base + tl.arange(0, LOOK)
        marked = tl.load(flags + h, mask=h * CUTS < last, other=0) != 0
        low = tl.minimum(low, tl.min(tl.where(marked, h * CUTS, last), 0))
        high = tl.maximum(high, tl.max(tl.where(marked, h * CUTS + CUTS, first), 0))
    return tl.maximum(low, first), tl.minimum(high, last)


@triton.jit
def load_weight(
    weight,
    flat,
    token,
    n,
    stride_t,
    g,
    stride_g,
    N,
    TRANSPOSED: tl.constexpr,
    WHOLE_N: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Rows of B or C as [tokens, N], or read as [N, tokens]."""
    base = weight + g.to(tl.int64) * stride_g
    if TRANSPOSED:
        mask = token[None, :] if WHOLE_N else token[None, :] & (n < N)[:, None]
        tile = tl.load(base + flat[None, :] * stride_t + n[:, None], mask=mask, other=0.0)
    else:
        mask = token[:, None] if WHOLE_N else token[:, None] & (n < N)[None, :]
        tile = tl.load(base + flat[:, None] * stride_t + n[None, :], mask=mask, other=0.0)
    return tile.to(OPERAND)


@triton.jit
def related(seq_idx, r, c, flat_r, flat_c, row, col, REVERSE: tl.constexpr, HAS_DOCS: tl.constexpr):
    """Which pairs of tokens meet: none later than the other, both of one document."""
    keep = (c[None, :] >= r[:, None]) if REVERSE else (r[:, None] >= c[None, :])
    keep &= row[:, None] & col[None, :]
    if HAS_DOCS:
        doc_r = tl.load(seq_idx + flat_r, mask=row, other=-1)
        doc_c = tl.load(seq_idx + flat_c, mask=col, other=-1)
        keep &= doc_r[:, None] == doc_c[None, :]
    return keep


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


# Unspecialized strides of dt keep its tile laid out along the tokens, as everything written here is.
@triton.jit(do_not_specialize=["row_length", "row_chunks", "total", "stride_dt_t", "stride_dt_h"])
def decay_kernel(
    dt, bias, A, seq_idx, table, steps, centred, up, down, enter, leave, carry, unsafe,
    row_length, row_chunks, total, H, stride_dt_t, stride_dt_h, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dt -> steps dt' and decays, all fp32 [H, T]; carry and unsafe [chunks, H]. One program a chunk and BLOCK_H
    heads."""
    chunk = tl.program_id(0)
    start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = tl.arange(0, CHUNK)
    head = h < H
    token = t < length
    mask = head[:, None] & token[None, :]
    flat = start + t
    raw = tl.load(dt + h[:, None].to(tl.int64) * stride_dt_h + flat[None, :] * stride_dt_t, mask=mask, other=0.0).to(
        tl.float32
    )
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
        # padding does not decay, so the last column is the end
        chunk_end = tl.sum(tl.where((t == CHUNK - 1)[None, :], a, 0.0), 1)
        doc_total = tl.broadcast_to(chunk_end[:, None], (BLOCK_H, CHUNK))
        from_start = token[None, :]
        to_end = token[None, :]
        whole = 1.0
    half = 0.5 * doc_total
    out = h[:, None].to(tl.int64) * total + flat[None, :]
    tl.store(steps + out, step, mask=mask)
    tl.store(centred + out, a - half, mask=mask)
    tl.store(up + out, tl.exp2(a - half), mask=mask)
    tl.store(down + out, tl.maximum(step, LEAST_STEP) * tl.exp2(half - a), mask=mask)
    tl.store(enter + out, tl.where(from_start, tl.exp2(tl.minimum(a, 0.0)), 0.0), mask=mask)
    tl.store(leave + out, tl.where(to_end, tl.exp2(tl.minimum(chunk_end[:, None] - a, 0.0)), 0.0), mask=mask)
    per_chunk = chunk.to(tl.int64) * H + h
    tl.store(carry + per_chunk, tl.exp2(tl.minimum(chunk_end, 0.0)) * whole, mask=head)
    worst = tl.max(tl.where(mask, tl.abs(half), 0.0), 1)
    tl.store(unsafe + per_chunk, (worst > SAFE_LOG2).to(tl.int32), mask=head)


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total", "stride_dt_t", "stride_dt_h"])
def step_grad_kernel(
    dt, bias, A, seq_idx, table, steps, row_sums, col_sums, self_dots, self_pairs, enter_sums, leave_sums, through,
    ddt, dA, dbias, dD,
    row_length, row_chunks, total, H, G, stride_dt_t, stride_dt_h, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCS: tl.constexpr, TABLE: tl.constexpr, SKIP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr, CUTS: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of dt, A and the bias from the row sums that the other kernels left.

    With R_i what token i's output sends back along the decays that end at i, E_j the same for decays from j to the
    chunk's end, c_j for those that start at j
    inside the chunk, and K for decays through the whole chunk: d(log decay)_k = sum_{i >= k} R_i - c_i  +  sum_{j <
    k} E_j  +  K, within one document.
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
        ends += tl.load(enter_sums + part, mask=mask, other=0.0) + tl.load(row_sums + part, mask=mask, other=0.0)
        begins += tl.load(col_sums + part, mask=mask, other=0.0)
        if ROWS < CHUNK:
            below = part + tl.cast(H, tl.int64) * CUTS * total
            ends += tl.load(row_sums + below, mask=mask & (t >= ROWS)[None, :], other=0.0)
            begins += tl.load(col_sums + below, mask=mask & (t < ROWS)[None, :] & (length > ROWS), other=0.0)
        itself += tl.load(self_dots + part, mask=mask, other=0.0)
        edge += tl.load(leave_sums + part, mask=mask, other=0.0)
        lines = (chunk.to(tl.int64) * H + h[:, None]) * (CUTS * BLOCK_P) + cut * BLOCK_P + p[None, :]
        whole += tl.sum(tl.load(through + lines, mask=head[:, None], other=0.0), 1)
    per_chunk = chunk.to(tl.int64) * H + h
    if SKIP:
        tl.store(dD + per_chunk, tl.sum(itself, 1), mask=head)
    group = (h // (H // G)).to(tl.int64)
    itself *= tl.load(self_pairs + group[:, None] * total + flat[None, :], mask=mask, other=0.0)
    balance = ends - begins
    begins /= tl.maximum(step, LEAST_STEP)
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
    tl.store(dA + per_chunk, tl.sum(tl.where(mask, step * dlog, 0.0), 1), mask=head)
    raw = tl.load(dt + h[:, None].to(tl.int64) * stride_dt_h + flat[None, :] * stride_dt_t, mask=mask, other=0.0).to(
        tl.float32
    )
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
    x, dout, dD, T, H, P, stride_x_t, stride_x_h, stride_o_t, stride_o_h, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
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
    y, z, dout, dy, dz, size, H, P, stride_z_t, stride_z_h, stride_o_t, stride_o_h, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """dy = y * silu(z), or backward dy = dout * silu(z), dz = dout * y * silu'(z). y, dy, dz are contiguous [T, H,
    P]."""
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
