"""Quantized tensor types: never instantiated here, targets of isinstance()."""


class QuantizedTensor: ...
