"""The FP8 recipes stated a second time, in numpy: every FP8 value listed, the nearest one looked up, one block after the other."""

import numpy as np

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def positive_values(kind):
    """Every finite one, ascending; the index is the code, so an even index is an even mantissa."""
    mantissa_bits, bias, codes = {"e4m3": (3, 7, 127), "e5m2": (2, 15, 124)}[kind]
    steps = 2**mantissa_bits
    values = []
    for code in range(codes):
        exponent, mantissa = divmod(code, steps)
        values.append(2.0 ** (exponent - bias) * (1 + mantissa / steps) if exponent else 2.0 ** (1 - bias) * mantissa / steps)
    return np.array(values)


def nearest(x, kind):
    """Ties go to the even code, what is too large to the largest."""
    values = positive_values(kind)
    middles = (values[:-1] + values[1:]) / 2
    magnitude = np.abs(x).astype(np.float64)
    index = np.searchsorted(middles, magnitude)
    is_tie = (index < len(middles)) & (middles[np.minimum(index, len(middles) - 1)] == magnitude)
    index = np.where(is_tie & (index % 2 == 1), index + 1, index)
    return np.where(np.isnan(x), np.nan, np.copysign(values[index], x)).astype(np.float32)


def scale_and_inverse(amax, kind, rule):
    largest = np.float32(LARGEST[kind])
    with np.errstate(all="ignore"):
        if rule == "exponent":
            quotient = np.float32(amax) * np.float32(1 / LARGEST[kind])
            exponent = np.clip(np.ceil(np.log2(np.float64(quotient))), -127, 127)
            return np.float32(2.0**-exponent), np.float32(2.0**exponent)
        if amax == 0 or np.isinf(amax):
            return np.float32(1), np.float32(1)
        scale = largest / np.float32(amax)
        scale = np.finfo(np.float32).max if np.isinf(scale) else scale
        if rule == "power_of_two":
            scale = np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))
        return scale, np.float32(1) / scale


def quantize(x, kind, block, rule):
    """float32 [rows, columns] -> the FP8 values, and what they stand for."""
    codes, meant = np.empty_like(x), np.empty_like(x)
    height, width = np.maximum(x.shape, 1) if block is None else block
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            here = (slice(top, top + height), slice(left, left + width))
            tile = x[here]
            known = tile[~np.isnan(tile)]
            scale, inverse = scale_and_inverse(np.abs(known).max(initial=0), kind, rule)
            with np.errstate(all="ignore"):
                codes[here] = nearest(tile * scale, kind)
                meant[here] = codes[here] * inverse
    return codes, meant


RULES = {
    # recipe: (rule, block of inputs and gradients, block of weights)
    "blockwise": ("power_of_two", (1, 128), (128, 128)),
    "blockwise-float32": ("float", (1, 128), (128, 128)),
    "mxfp8": ("exponent", (1, 32), (1, 32)),
    "tensorwise": ("float", None, None),
}


def linear(x, weight, grad, recipe, grad_kind):
    """Output, gradient of x and gradient of the weight: three products, each of operands cast along what it sums over."""
    rule, vector, square = RULES[recipe]

    def cast(matrix, block, kind, *, transposed):
        shape = None if block is None else block[::-1] if transposed else block
        return quantize(matrix, kind, shape, rule)[1].astype(np.float64)

    y = cast(x, vector, "e4m3", transposed=False) @ cast(weight, square, "e4m3", transposed=False).T
    grad_x = cast(grad, vector, grad_kind, transposed=False) @ cast(weight, square, "e4m3", transposed=True)
    grad_weight = cast(grad, vector, grad_kind, transposed=True).T @ cast(x, vector, "e4m3", transposed=True)
    return y, grad_x, grad_weight
