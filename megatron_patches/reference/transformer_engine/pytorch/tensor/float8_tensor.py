"""FP8 tensor type: never instantiated here, a target of isinstance()."""


class Float8Tensor: ...
