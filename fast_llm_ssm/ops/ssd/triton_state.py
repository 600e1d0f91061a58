"""The SSD kernel that carries states from chunk to chunk: forward for the states, in reverse for their gradients. The
legend is in triton_decay.py."""

import triton
import triton.language as tl

from fast_llm_ssm.ops.ssd.triton_decay import chunk_bounds


@triton.jit(do_not_specialize=["row_length", "row_chunks", "total", "pieces"])
def state_kernel(
    value, weight_b, decay, steps, carry, sequence_chunks, table, states, other_states, through, first_state,
    last_state, piece_states, piece_decay,
    row_length, row_chunks, total, pieces, H, G, P, N, stride_v_t, stride_v_h, stride_b_t, stride_b_g,
    REVERSE: tl.constexpr, TOTALS: tl.constexpr, PIECES: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr, THROUGH: tl.constexpr,
    TABLE: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, WHOLE_P: tl.constexpr, WHOLE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """S <- carry S + sum_t scale_t value_t weight_t^T over a sequence's chunks, S [BLOCK_P, BLOCK_N] in registers;
    stores S before each chunk.

    Forward:  value x, weight B, scale dt * leave; states[c] is S at chunk c's start.
    Reverse:  value dout, weight C, scale enter; states[c] is dL/dS at chunk c's end, and through[c] = carry
    <S(start), dL/dS(end)>, by rows of P.
    A long sequence of few heads is cut in `pieces`: with TOTALS the kernel only writes each piece's own sum, and then
    every piece starts from the sums before it.
    Grid: (virtual heads, sequences * pieces).
    """
    v = tl.program_id(0)
    heads = tl.num_programs(0)
    sequence = tl.program_id(1) // pieces
    piece = tl.program_id(1) % pieces
    h = v // CUTS
    p0 = (v % CUTS) * BLOCK_P
    g = (h // (H // G)).to(tl.int64)
    if TABLE:
        low = tl.load(sequence_chunks + sequence)
        high = tl.load(sequence_chunks + sequence + 1)
    else:
        low = sequence * row_chunks
        high = low + row_chunks
    if PIECES:
        size = tl.cdiv(high - low, pieces)
        # Pieces are numbered in walking order.
        if REVERSE:
            end = tl.maximum(high - piece * size, low)
            begin = tl.maximum(end - size, low)
        else:
            begin = tl.minimum(low + piece * size, high)
            end = tl.minimum(begin + size, high)
    else:
        begin = low
        end = high
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, STEP)
    tile = p[:, None] * BLOCK_N + n[None, :]
    real = (p0 + p < P)[:, None] & (n < N)[None, :]
    edge = (sequence.to(tl.int64) * H + h) * P * N + (p0 + p)[:, None] * N + n[None, :]
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if HAS_FIRST:
        if not TOTALS:
            state += tl.load(first_state + edge, mask=real, other=0.0).to(tl.float32)
        else:
            state += tl.where(piece == 0, tl.load(first_state + edge, mask=real, other=0.0).to(tl.float32), 0.0)
    slot = (sequence.to(tl.int64) * heads + v) * pieces
    if PIECES and not TOTALS:
        for before in range(piece):
            old = tl.load(piece_states + (slot + before) * (BLOCK_P * BLOCK_N) + tile)
            state = tl.where(before == 0, old, state * tl.load(piece_decay + slot + before) + old)
    kept = 1.0
    value_mask_p = (p0 + p < P)[:, None]
    weight_mask_n = (n < N)[None, :]
    for i in tl.range(0, end - begin, num_stages=NUM_STAGES):
        chunk = (end - 1 - i) if REVERSE else (begin + i)
        start, length = chunk_bounds(chunk, table, row_length, row_chunks, CHUNK, TABLE)
        factor = tl.load(carry + chunk.to(tl.int64) * H + h)
        if not TOTALS:
            where = (chunk.to(tl.int64) * heads + v) * (BLOCK_P * BLOCK_N) + tile
            rounded = state.to(OPERAND)
            tl.store(states + where, rounded)
            if THROUGH:
                other = tl.load(other_states + where).to(tl.float32)
                lines = (chunk.to(tl.int64) * heads + v) * BLOCK_P + p
                tl.store(through + lines, factor * tl.sum(other * state, 1))
        state *= factor
        kept *= factor
        for part in tl.static_range(CHUNK // STEP):
            flat = start + part * STEP + t
            token = part * STEP + t < length
            value_mask = token[None, :] if WHOLE_P else token[None, :] & value_mask_p
            weight_mask = token[:, None] if WHOLE_N else token[:, None] & weight_mask_n
            scale = tl.load(decay + h.to(tl.int64) * total + flat, mask=token, other=0.0)
            if not REVERSE:
                scale *= tl.load(steps + h.to(tl.int64) * total + flat, mask=token, other=0.0)
            # Read as [P, T]: transposing in memory order costs nothing here.
            val = tl.load(
                value + flat[None, :] * stride_v_t + h.to(tl.int64) * stride_v_h + (p0 + p)[:, None],
                mask=value_mask,
                other=0.0,
            )
            val = (val.to(tl.float32) * scale[None, :]).to(OPERAND)
            wei = tl.load(
                weight_b + flat[:, None] * stride_b_t + g * stride_b_g + n[None, :], mask=weight_mask, other=0.0
            ).to(OPERAND)
            state = tl.dot(val, wei, state, input_precision=PRECISION)
    if TOTALS:
        tl.store(piece_states + (slot + piece) * (BLOCK_P * BLOCK_N) + tile, state)
        tl.store(piece_decay + slot + piece, kept)
    else:
        if HAS_LAST:
            if piece == pieces - 1:
                tl.store(last_state + edge, state, mask=real)
