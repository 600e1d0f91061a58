"""Kernels of the causal convolution.

A program walks over the tokens of its span, four at a time, for a block of channels; the inputs before the present one
(x1 the last, x3 the oldest) stay in registers, so each is read once. Where a document begins they are replaced by its
initial inputs, or by zeros. Filters of fewer than four taps have zeros for the missing ones.
"""

import triton
import triton.language as tl


@triton.jit
def _tap(w_ptr, cols, valid, TAPS: tl.constexpr, LAG: tl.constexpr):
    """The filter's weight on the input LAG tokens back."""
    if LAG < TAPS:
        return tl.load(w_ptr + cols * TAPS + (TAPS - 1 - LAG), mask=valid, other=0.0).to(tl.float32)
    else:
        return tl.zeros(cols.shape, tl.float32)


@triton.jit
def _only(cols, width, on):
    """Which channels there are, if `on`. Newer interpreters of Triton get `channels & on` wrong for a scalar `on`."""
    return cols < tl.where(on, width, 0)


@triton.jit
def _initial(initial_ptr, row, place, cols, on, width, TAPS: tl.constexpr):
    """Initial input number `place` of a row, zero where there is none or it is not wanted."""
    offset = row.to(tl.int64) * width * (TAPS - 1)
    mask = _only(cols, width, on & (place >= 0) & (place < TAPS - 1))
    return tl.load(initial_ptr + offset + cols * (TAPS - 1) + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _number(numbers_ptr, t, length):
    """The document of a token; tokens outside of the row have none."""
    return tl.load(numbers_ptr + t, mask=(t >= 0) & (t < length), other=-1)


@triton.jit
def _before(
    x_ptr, initial_ptr, numbers_ptr, bounds_ptr, t, batch, cols, length, width, x_t, LAG: tl.constexpr,
    TAPS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DOCS: tl.constexpr, PER_DOC: tl.constexpr,
):  # fmt: skip
    """The input LAG tokens before token t, as its document has it."""
    own = t >= LAG
    first = t * 0 == 0
    row, start = batch, t * 0
    if HAS_DOCS:
        number = _number(numbers_ptr, t, length)
        own = own & (_number(numbers_ptr, t - LAG, length) == number)
        if PER_DOC:
            row = number
            start = tl.load(bounds_ptr + number, mask=number >= 0, other=0)
        else:
            first = _number(numbers_ptr, 0, length) == number
    value = tl.load(x_ptr + (t - LAG).to(tl.int64) * x_t + cols, mask=_only(cols, width, own), other=0.0).to(tl.float32)
    if HAS_INITIAL:
        place = TAPS - 1 + t - LAG - start
        value += _initial(initial_ptr, row, place, cols, first & (t < length) & (own == 0), width, TAPS)
    return value


@triton.jit
def _fresh(
    x1, x2, x3, initial_ptr, numbers_ptr, t, cols, length, width,
    TAPS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DOCS: tl.constexpr, PER_DOC: tl.constexpr,
):  # fmt: skip
    """The inputs before token t, given those of the walk: others if a document begins with it."""
    if HAS_DOCS:
        number = _number(numbers_ptr, t, length)
        begins = (t > 0) & (number != _number(numbers_ptr, t - 1, length))
        x1, x2, x3 = tl.where(begins, 0.0, x1), tl.where(begins, 0.0, x2), tl.where(begins, 0.0, x3)
        if PER_DOC and HAS_INITIAL:
            on = begins & (number >= 0)
            x1 += _initial(initial_ptr, number, TAPS - 2, cols, on, width, TAPS)
            x2 += _initial(initial_ptr, number, TAPS - 3, cols, on, width, TAPS)
            x3 += _initial(initial_ptr, number, TAPS - 4, cols, on, width, TAPS)
    return x1, x2, x3


@triton.jit
def _load(ptr, t, stride, cols, width, length):
    return tl.load(ptr + t.to(tl.int64) * stride + cols, mask=_only(cols, width, t < length), other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, bias_ptr, initial_ptr, numbers_ptr, bounds_ptr, y_ptr, length, width, x_b, x_t, numbers_b,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DOCS: tl.constexpr,
    PER_DOC: tl.constexpr, SILU: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    spans = tl.cdiv(length, STEP)
    batch, t0 = tl.program_id(0) // spans, tl.program_id(0) % spans * STEP
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = cols < width
    x_ptr += batch.to(tl.int64) * x_b
    y_ptr += batch.to(tl.int64) * length * width
    if HAS_DOCS:
        numbers_ptr += batch.to(tl.int64) * numbers_b
    w0, w1 = _tap(w_ptr, cols, valid, TAPS, 0), _tap(w_ptr, cols, valid, TAPS, 1)
    w2, w3 = _tap(w_ptr, cols, valid, TAPS, 2), _tap(w_ptr, cols, valid, TAPS, 3)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=valid, other=0.0).to(tl.float32)
    x1 = _before(x_ptr, initial_ptr, numbers_ptr, bounds_ptr, t0, batch, cols, length, width, x_t, 1,
                 TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
    x2 = _before(x_ptr, initial_ptr, numbers_ptr, bounds_ptr, t0, batch, cols, length, width, x_t, 2,
                 TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
    x3 = _before(x_ptr, initial_ptr, numbers_ptr, bounds_ptr, t0, batch, cols, length, width, x_t, 3,
                 TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
    for offset in range(t0, min(t0 + STEP, length), 4):
        four = tl.cast(offset, tl.int32)
        # All four are asked for before the first is used.
        xa = _load(x_ptr, four, x_t, cols, width, length)
        xb = _load(x_ptr, four + 1, x_t, cols, width, length)
        xc = _load(x_ptr, four + 2, x_t, cols, width, length)
        xd = _load(x_ptr, four + 3, x_t, cols, width, length)
        for i in tl.static_range(4):
            t = four + i
            x0 = xa if i == 0 else (xb if i == 1 else (xc if i == 2 else xd))
            x1, x2, x3 = _fresh(x1, x2, x3, initial_ptr, numbers_ptr, t, cols, length, width,
                                TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
            y = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            if SILU:
                y *= tl.sigmoid(y)
            place = y_ptr + t.to(tl.int64) * width + cols
            tl.store(place, y.to(y_ptr.dtype.element_ty), mask=_only(cols, width, t < length))
            x3 = x2
            x2 = x1
            x1 = x0


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, w_ptr, bias_ptr, initial_ptr, numbers_ptr, bounds_ptr, dx_ptr, partial_ptr, length, width,
    dy_b, dy_t, x_b, x_t, numbers_b,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DOCS: tl.constexpr,
    PER_DOC: tl.constexpr, SILU: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of the span's tokens, and the span's part of the filter's and the bias' gradient.

    p1, p2, p3 are the gradients, so far, of the inputs one, two and three tokens back; the walk goes on for four
    tokens after the span, whose outputs read its last inputs.
    """
    spans = tl.cdiv(length, STEP)
    batch, t0 = tl.program_id(0) // spans, tl.program_id(0) % spans * STEP
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = cols < width
    x_ptr += batch.to(tl.int64) * x_b
    dy_ptr += batch.to(tl.int64) * dy_b
    dx_ptr += batch.to(tl.int64) * length * width
    if HAS_DOCS:
        numbers_ptr += batch.to(tl.int64) * numbers_b
    w0, w1 = _tap(w_ptr, cols, valid, TAPS, 0), _tap(w_ptr, cols, valid, TAPS, 1)
    w2, w3 = _tap(w_ptr, cols, valid, TAPS, 2), _tap(w_ptr, cols, valid, TAPS, 3)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=valid, other=0.0).to(tl.float32)
    x1 = _before(x_ptr, initial_ptr, numbers_ptr, bounds_ptr, t0, batch, cols, length, width, x_t, 1,
                 TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
    x2 = _before(x_ptr, initial_ptr, numbers_ptr, bounds_ptr, t0, batch, cols, length, width, x_t, 2,
                 TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
    x3 = _before(x_ptr, initial_ptr, numbers_ptr, bounds_ptr, t0, batch, cols, length, width, x_t, 3,
                 TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
    p1, p2, p3 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    d0, d1 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    d2, d3 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for offset in range(t0, min(t0 + STEP, length) + 4, 4):
        four = tl.cast(offset, tl.int32)
        xa, ga = _load(x_ptr, four, x_t, cols, width, length), _load(dy_ptr, four, dy_t, cols, width, length)
        xb, gb = _load(x_ptr, four + 1, x_t, cols, width, length), _load(dy_ptr, four + 1, dy_t, cols, width, length)
        xc, gc = _load(x_ptr, four + 2, x_t, cols, width, length), _load(dy_ptr, four + 2, dy_t, cols, width, length)
        xd, gd = _load(x_ptr, four + 3, x_t, cols, width, length), _load(dy_ptr, four + 3, dy_t, cols, width, length)
        for i in tl.static_range(4):
            t = four + i
            x0 = xa if i == 0 else (xb if i == 1 else (xc if i == 2 else xd))
            g = ga if i == 0 else (gb if i == 1 else (gc if i == 2 else gd))
            x1, x2, x3 = _fresh(x1, x2, x3, initial_ptr, numbers_ptr, t, cols, length, width,
                                TAPS, HAS_INITIAL, HAS_DOCS, PER_DOC)  # fmt: skip
            if SILU:
                y = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
                s = tl.sigmoid(y)
                g *= s * (1.0 + y * (1.0 - s))
            mine = t < t0 + STEP
            own = tl.where(mine, g, 0.0)
            d0 += own * x0
            d1 += own * x1
            d2 += own * x2
            d3 += own * x3
            dbias += own
            g1, g2, g3 = g, g, g
            if HAS_DOCS:  # inputs of an earlier document did not act on this output
                number = _number(numbers_ptr, t, length)
                g1 = tl.where(_number(numbers_ptr, t - 1, length) == number, g, 0.0)
                g2 = tl.where(_number(numbers_ptr, t - 2, length) == number, g, 0.0)
                g3 = tl.where(_number(numbers_ptr, t - 3, length) == number, g, 0.0)
            done = t - 3
            place = dx_ptr + done.to(tl.int64) * width + cols
            on = (done >= t0) & (done < t0 + STEP) & (done < length)
            tl.store(place, (p3 + w3 * g3).to(dx_ptr.dtype.element_ty), mask=_only(cols, width, on))
            p3 = p2 + w2 * g2
            p2 = p1 + w1 * g1
            p1 = w0 * g
            x3 = x2
            x2 = x1
            x1 = x0
    # Rows of the partial sums follow the filter's order: the oldest tap first, the bias last.
    sums = partial_ptr + tl.program_id(0).to(tl.int64) * (TAPS + 1) * width + cols
    tl.store(sums + (TAPS - 1) * width, d0, mask=valid)
    tl.store(sums + (TAPS - 2) * width, d1, mask=valid)
    if TAPS > 2:
        tl.store(sums + (TAPS - 3) * width, d2, mask=valid)
    if TAPS > 3:
        tl.store(sums + (TAPS - 4) * width, d3, mask=valid)
    tl.store(sums + TAPS * width, dbias, mask=valid)


@triton.jit
def update_kernel(
    x_ptr, state_ptr, w_ptr, bias_ptr, y_ptr, width, x_b, x_d, s_b, s_d, s_w, w_d, w_w,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: the state's inputs move up by one, the token's comes last."""
    batch = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = cols < width
    x = tl.load(x_ptr + batch * x_b + cols * x_d, mask=valid, other=0.0)
    states = state_ptr + batch * s_b + cols * s_d
    y = x.to(tl.float32) * tl.load(w_ptr + cols * w_d + (TAPS - 1) * w_w, mask=valid, other=0.0).to(tl.float32)
    for i in tl.static_range(TAPS - 1):
        old = tl.load(states + i * s_w, mask=valid, other=0.0)
        y += old.to(tl.float32) * tl.load(w_ptr + cols * w_d + i * w_w, mask=valid, other=0.0).to(tl.float32)
        if i > 0:
            tl.store(states + (i - 1) * s_w, old, mask=valid)
    tl.store(states + (TAPS - 2) * s_w, x.to(state_ptr.dtype.element_ty), mask=valid)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=valid, other=0.0).to(tl.float32)
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(y_ptr + batch * width + cols, y.to(y_ptr.dtype.element_ty), mask=valid)
