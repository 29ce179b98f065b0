"""The one table of tolerances, each with its reason. Everything not listed here is compared for exact equality."""

TOLERANCES = {
    # Half a step is exact in real numbers; fp32 rounding of (x - zero) / scale and of code * scale + zero adds a few
    # ulp of |x|.
    "half_step_ulp": 4 * 2.0**-23,
    # An fp32 constant has 24 bits, an fp16 zero point 11 and an fp16 scale 11 more: 2^-21 of the constant stays.
    "fp32_constant_in_fp16_metadata": 2.0**-21,
}
